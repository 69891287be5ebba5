from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.conversations.errors import ConflictError, ConversationError, NotFoundError
from app.conversations.run import Run
from app.conversations.service import Conversations, Shelf
from app.conversations.turn import Said, Turn
from app.store.records import Item
from app.store.valkey import ValkeyStore
from engine.batcher import Batcher
from engine.core import NotReadyError, RequestError, SamplingParams
from tests.app.conversations.asking import text_of, turn

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_turn_is_in_the_log_when_it_is_accepted(conversations: Conversations, valkey: ValkeyStore) -> None:
    run = await conversations.submit(turn(max_tokens=60))
    assert not run.finished
    stored = await valkey.response(run.id)
    assert stored and stored.status == "in_progress"
    items = await valkey.items(stored.conversation)
    assert items[stored.input[0]].text == "hello you"
    text = await text_of(run)
    assert run.response.status == "incomplete"
    assert await valkey.response(run.id) == run.response
    reply = (await valkey.items(stored.conversation))[stored.output]
    assert reply.text == text == "".join(entry.text for entry in await valkey.entries(run.id))
    assert reply.ids is not None
    assert len(reply.ids) == 60
    assert await valkey.open_responses() == []


async def test_a_followers_view_is_the_same_whenever_it_comes(conversations: Conversations) -> None:
    run = await conversations.submit(turn(max_tokens=60))
    early = asyncio.create_task(text_of(run))
    await run.done()
    late = await conversations.attach("ana", run.id)
    assert await early == await text_of(run) == await text_of(late)
    whole = [pair async for pair in late.entries()]
    for after in range(len(whole) + 1):
        assert [pair async for pair in late.entries(after)] == whole[after:]


async def test_the_next_turn_is_built_from_the_tokens_of_the_last(conversations: Conversations, batcher: Batcher) -> None:
    first = await conversations.submit(turn(max_tokens=40, owner="eve"))  # who never ran anything else
    await first.done()
    second = await conversations.submit(turn("and you", previous=first.id, owner="eve"))
    await second.done()
    run = first.response.usage.prompt_tokens + first.response.usage.completion_tokens
    assert second.response.usage.cached_tokens == run - 1, "all but the last token, which was never run"
    assert second.reply.parent == second.response.input[0]
    prompt = [*first.reply.lead_ids, *(first.reply.ids or []), *second.reply.lead_ids]
    assert second.response.usage.prompt_tokens == len(prompt)


async def test_what_was_run_is_not_tokenised_again(conversations: Conversations, batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """E10, through the whole domain."""
    first = await conversations.submit(turn("the first message"))
    await first.done()
    assert batcher._engine
    tokenizer, encoded = batcher._engine.tokenizer, []
    real = tokenizer.encode_plain

    def watched(text: str, *rest: Any) -> list[int]:
        encoded.append(text)
        return real(text, *rest)

    monkeypatch.setattr(type(tokenizer), "encode_plain", lambda self, text, *rest: watched(text, *rest))
    second = await conversations.submit(turn("and you", previous=first.id))
    await second.done()
    assert any("and you" in text for text in encoded)
    assert not any("first" in text for text in encoded)


async def test_a_stopped_reply_keeps_the_tokens_of_its_text(conversations: Conversations, batcher: Batcher) -> None:
    assert batcher._engine
    whole = await text_of(await conversations.submit(turn(max_tokens=30)))
    stop = whole[10:13]
    sampling = replace(turn().sampling, max_tokens=30, stop=(stop,))
    run = await conversations.submit(replace(turn(), sampling=sampling))
    await run.done()
    assert run.response.status == "completed"
    assert run.reply.text == whole[: whole.index(stop)]
    assert batcher._engine.tokenizer.decode(run.reply.ids or []) == run.reply.text


async def test_a_retry_in_a_conversation_finds_its_run_while_it_is_in_progress(conversations: Conversations) -> None:
    """C4: neither the conversation's own lock nor a second request answers it."""
    thread = await conversations.threads.create("ana", {})
    message = turn(conversation=thread.id, client_message_id="m", max_tokens=100)
    runs = await asyncio.gather(*(conversations.submit(message) for _ in range(3)))
    assert not runs[0].finished
    runs.append(await conversations.submit(message))
    assert len({id(run) for run in runs}) == 1
    await runs[0].done()


async def test_a_conversation_without_a_name_cannot_be_named(conversations: Conversations) -> None:
    run = await conversations.submit(turn())
    await run.done()
    with pytest.raises(NotFoundError):
        await conversations.submit(turn(conversation=run.response.conversation))


async def test_following_a_response_of_a_conversation_takes_its_turn(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {})
    first = await conversations.submit(turn(conversation=thread.id))
    await first.done()
    running = await conversations.submit(turn(conversation=thread.id, max_tokens=150))
    with pytest.raises(ConflictError):
        await conversations.submit(turn(previous=first.id))
    await running.done()
    branch = await conversations.submit(turn(previous=first.id))
    await branch.done()
    assert len(await conversations.threads.items("ana", thread.id)) == 4, "the newest turn is where the conversation goes on"


async def test_a_reply_of_another_model_is_rendered_anew(conversations: Conversations, valkey: ValkeyStore) -> None:
    first = await conversations.submit(turn())
    await first.done()
    foreign = Item(
        **{name: getattr(first.reply, name) for name in first.reply.__struct_fields__} | {"fingerprint": "another", "ids": [299] * 5}
    )
    await valkey.finish(first.response, foreign)
    second = await conversations.submit(turn("and you", previous=first.id))
    await second.done()
    assert second.response.status != "failed"
    assert second.response.usage.prompt_tokens == len(second.reply.lead_ids)


async def test_branches_of_one_response(conversations: Conversations) -> None:
    root = await conversations.submit(turn())
    await root.done()
    branches = await asyncio.gather(*(conversations.submit(turn(text, previous=root.id)) for text in ("one", "two")))
    for branch in branches:
        await branch.done()
        assert branch.response.usage.cached_tokens
    assert branches[0].response.conversation == branches[1].response.conversation


async def test_a_repeated_message_runs_once(conversations: Conversations, batcher: Batcher) -> None:
    """C4."""
    assert batcher._engine
    before = next(batcher._ids)
    runs = await asyncio.gather(*(conversations.submit(turn(client_message_id="m")) for _ in range(5)))
    assert len({run.id for run in runs}) == 1
    await runs[0].done()
    again = await conversations.submit(turn(client_message_id="m"))
    assert again.id == runs[0].id
    assert await text_of(again) == await text_of(runs[0])
    assert next(batcher._ids) == before + 2, "one engine request"
    assert (await conversations.submit(turn(client_message_id="m", owner="ben"))).id != runs[0].id


async def test_what_does_not_last_is_forgotten_with_its_key_after_a_day(
    conversations: Conversations, valkey: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = [await conversations.submit(turn(client_message_id=key, lasting=False)) for key in ("kept", "followed")]
    lasting = await conversations.submit(turn(client_message_id="lasting"))
    await asyncio.gather(*(run.done() for run in (*brief, lasting)))
    following = await conversations.submit(turn(previous=brief[1].id))
    await following.done()
    now = time.time()
    for hours, left in ((23, 3), (25, 1)):
        monkeypatch.setattr("app.conversations.service.time.time", lambda now=now + 3600 * hours: now)
        await (await conversations.submit(turn(client_message_id=f"after {hours}", lasting=False))).done()
        await asyncio.gather(*conversations._tasks)
        found = [await valkey.response(run.id) for run in (*brief, lasting)]
        assert sum(response is not None for response in found) == left
    assert await valkey.items(brief[0].response.conversation) == {}
    assert len(await valkey.items(brief[1].response.conversation)) == 4, "what was built on it needs it"
    assert (await conversations.submit(turn(client_message_id="kept", lasting=False))).id != brief[0].id


async def test_a_message_id_that_comes_with_something_else_is_refused(conversations: Conversations, valkey: ValkeyStore) -> None:
    run = await conversations.submit(turn(client_message_id="other", asked_digest=b"1"))
    for other in (turn("what then", client_message_id="other", asked_digest=b"2"), turn(client_message_id="other")):
        with pytest.raises(ConversationError, match="first sent with") as refused:
            await conversations.submit(other)
        assert refused.value.code == "idempotency_error"
    assert (await conversations.submit(turn(client_message_id="other", asked_digest=b"1"))).id == run.id
    await run.done()
    assert await valkey.open_responses() == []


async def test_owners_do_not_exist_for_each_other(conversations: Conversations) -> None:
    """C9: the same answer as for an id that never was."""
    thread = await conversations.threads.create("ana", {})
    run = await conversations.submit(turn(conversation=thread.id, max_tokens=150))

    async def refused(action: Callable[[str, str, str], Any]) -> None:
        for owner, response, conversation in (("ben", run.id, thread.id), ("ana", "resp_x", "conv_x")):
            with pytest.raises(NotFoundError) as fault:
                await action(owner, response, conversation)
            seen.append((type(fault.value), str(fault.value).replace(response, "ID").replace(conversation, "ID"), fault.value.code))
        assert seen[-1] == seen[-2]

    seen: list[tuple[type, str, str]] = []
    await refused(lambda owner, response, _: conversations.attach(owner, response))
    await refused(lambda owner, response, _: conversations.cancel(owner, response))
    await refused(lambda owner, response, _: conversations.submit(turn(owner=owner, previous=response)))
    await refused(lambda owner, _, conversation: conversations.submit(turn(owner=owner, conversation=conversation)))
    await refused(lambda owner, _, conversation: conversations.threads.conversation(owner, conversation))
    await refused(lambda owner, _, conversation: conversations.threads.items(owner, conversation))
    await refused(lambda owner, _, conversation: conversations.threads.delete(owner, conversation))
    await refused(lambda owner, _, conversation: conversations.threads.listed(owner, 10, conversation))
    assert await conversations.threads.listed("ben", 10) == []
    await run.done()
    assert run.response.reason == "max_output_tokens", "nobody stopped it"


async def test_owners_share_no_cache(conversations: Conversations) -> None:
    """E3."""
    for owner, cached in (("cleo", False), ("cleo", True), ("dora", False)):  # who never ran anything else
        run = await conversations.submit(turn("a prompt that is long enough for a block or two", owner=owner))
        await run.done()
        assert bool(run.response.usage.cached_tokens) is cached


async def test_one_turn_of_a_conversation_at_a_time(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {"topic": "x"})
    both = await asyncio.gather(
        *(conversations.submit(turn(conversation=thread.id, max_tokens=100)) for _ in range(2)), return_exceptions=True
    )
    assert [type(one) for one in both] == [Run, ConflictError]
    run = both[0]
    assert isinstance(run, Run)
    with pytest.raises(ConflictError):
        await conversations.submit(turn(conversation=thread.id))
    with pytest.raises(ConflictError):
        await conversations.submit(turn(previous=run.id))
    assert [one.id for one in conversations.running(thread.id)] == [run.id]
    await conversations.cancel("ana", run.id)
    await run.done()
    assert (run.response.status, run.response.reason) == ("incomplete", "cancelled")
    await (await conversations.submit(turn(conversation=thread.id))).done()
    assert [item.role for item in await conversations.threads.items("ana", thread.id)] == ["user", "assistant"] * 2
    (listed,) = await conversations.threads.listed("ana", 10)
    assert (listed.id, listed.title, listed.metadata) == (thread.id, "hello you", {"topic": "x"})


async def test_deleting_ends_what_runs(conversations: Conversations, valkey: ValkeyStore) -> None:
    thread = await conversations.threads.create("ana", {})
    run = await conversations.submit(turn(conversation=thread.id, max_tokens=200))
    await conversations.threads.delete("ana", thread.id)
    assert run.response.reason == "cancelled"
    assert await valkey.response(run.id) is None
    assert await valkey.items(thread.id) == {}
    with pytest.raises(NotFoundError):
        await conversations.attach("ana", run.id)


async def test_what_is_not_stored_is_on_its_shelf_alone(conversations: Conversations, valkey: ValkeyStore) -> None:
    shelf = Shelf.scratch()
    stored = await conversations.submit(turn())
    await stored.done()
    hidden = await conversations.submit(turn("and you", previous=stored.id, stored=False), shelf)
    await hidden.done()
    assert await valkey.response(hidden.id) is None
    assert hidden.response.conversation != stored.response.conversation
    more = await conversations.submit(turn("and more", previous=hidden.id, stored=False), shelf)
    await more.done()
    assert more.response.usage.prompt_tokens > hidden.response.usage.prompt_tokens > stored.response.usage.prompt_tokens
    with pytest.raises(NotFoundError):
        await conversations.submit(turn(previous=hidden.id))
    kept = await conversations.submit(turn("keep", previous=more.id), shelf)
    await kept.done()
    assert len(await valkey.items(kept.response.conversation)) == 8
    with pytest.raises(ConversationError, match="store: true"):
        await conversations.submit(turn(conversation="conv_x", stored=False), shelf)


async def test_what_cannot_run_is_refused_before_anything_is_written(conversations: Conversations, valkey: ValkeyStore) -> None:
    for wrong, kind in (
        (turn(""), ConversationError),
        (Turn(owner="ana", items=[], sampling=SamplingParams(max_tokens=1)), ConversationError),
        (turn("x" * 1000), RequestError),
        (turn(max_tokens=10**12), RequestError),
        (turn(previous="a", conversation="b"), ConversationError),
    ):
        with pytest.raises(kind, match="expected"):
            await conversations.submit(wrong)
    assert await valkey.open_responses() == []


async def test_not_ready_is_said(valkey: ValkeyStore, batcher: Batcher) -> None:
    idle = Conversations(valkey, Batcher(batcher.options), lambda owner: b"")
    with pytest.raises(NotReadyError):
        await idle.submit(turn())


async def test_a_prompt_that_is_only_read_warms_the_next_turn(conversations: Conversations) -> None:
    warm = await conversations.submit(turn("hello you " * 8, generate=False))
    assert await text_of(warm) == ""
    assert (warm.response.status, warm.response.usage.completion_tokens, warm.reply.text) == ("completed", 0, "")
    after = await conversations.submit(turn("go on", previous=warm.id))
    told = [Said("user", "hello you " * 8), Said("user", "go on")]
    cold = await conversations.submit(replace(turn(), items=told, owner="ben"))
    assert await text_of(after) == await text_of(cold)
    assert after.response.usage.cached_tokens >= warm.response.usage.prompt_tokens - 8, "all but what opens a reply"


async def test_a_raw_prompt_is_run_as_it_is(conversations: Conversations, batcher: Batcher) -> None:
    ids = await batcher.encode("hello you")
    text = await conversations.submit(turn(stored=False, raw="hello you"))
    same = await conversations.submit(turn(stored=False, raw=tuple(ids)))
    assert await text_of(text) == await text_of(same)
    assert text.response.usage.prompt_tokens == same.response.usage.prompt_tokens == len(ids)
    with pytest.raises(RequestError, match="expected a prompt of at least one token"):
        await conversations.submit(turn(stored=False, raw=()))


async def test_a_deleted_response_is_gone_and_what_it_said_with_it(conversations: Conversations, valkey: ValkeyStore) -> None:
    run = await conversations.submit(turn(max_tokens=150))
    with pytest.raises(NotFoundError):
        await conversations.delete_response("ben", run.id)
    await conversations.delete_response("ana", run.id)
    assert run.finished
    with pytest.raises(NotFoundError):
        await conversations.attach("ana", run.id)
    with pytest.raises(NotFoundError):
        await conversations.submit(turn(previous=run.id))
    assert await valkey.items(run.response.conversation) == {}


async def test_the_items_that_a_response_brought_in(conversations: Conversations) -> None:
    first = await conversations.submit(turn("one"))
    await first.done()
    second = await conversations.submit(turn("two", previous=first.id))
    assert [item.text for item in await conversations.input_items("ana", second.id)] == ["two"]
    with pytest.raises(NotFoundError):
        await conversations.input_items("ben", second.id)
    await second.done()
