"""Named conversations and their items, without the wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from app.conversations.errors import ConflictError, ConversationError, NotFoundError
from app.conversations.service import Conversations
from app.conversations.turn import Said
from app.store.valkey import ValkeyStore
from engine.batcher import Batcher
from engine.tool_calls import call_text
from tests.app.conversations.asking import text_of, turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = Said("assistant", call_text("look", '{"at": 1}'), call_ids=("call_1",))


async def texts(conversations: Conversations, id: str) -> list[str]:
    return [item.text for item in await conversations.threads.items("ana", id)]


async def test_a_conversation_begins_with_items_and_goes_on_after_them(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {}, [Said("system", "Be kind."), Said("user", "hello")])
    assert thread.title == "hello"
    run = await conversations.submit(turn("more", conversation=thread.id))
    await run.done()
    assert await texts(conversations, thread.id) == ["Be kind.", "hello", "more", run.reply.text]
    whole = await conversations.submit(turn(conversation=None, stored=False))
    await whole.done()
    assert run.response.usage.prompt_tokens > whole.response.usage.prompt_tokens, "what it began with is part of the prompt"


async def test_a_conversation_is_replied_to_without_new_input(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {}, [Said("user", "hello you")])
    run = await conversations.submit(replace(turn(conversation=thread.id), items=[]))
    same = await conversations.submit(turn("hello you"))
    assert await text_of(run) == await text_of(same), "the same chat has the same reply"


async def test_an_empty_conversation_has_nothing_to_reply_to(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {})
    with pytest.raises(ConversationError, match="something to reply to"):
        await conversations.submit(replace(turn(conversation=thread.id), items=[]))


async def test_items_are_added_at_the_end_in_front_and_between(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {}, [Said("user", "b")])
    (b,) = await conversations.threads.items("ana", thread.id)
    (d,) = await conversations.threads.add_items("ana", thread.id, [Said("user", "d")])
    await conversations.threads.add_items("ana", thread.id, [Said("user", "c1"), Said("user", "c2")], after=b.id)
    await conversations.threads.add_items("ana", thread.id, [Said("system", "a")], after="")
    await conversations.threads.add_items("ana", thread.id, [Said("user", "e")], after=d.id)
    assert await texts(conversations, thread.id) == ["a", "b", "c1", "c2", "d", "e"]
    with pytest.raises(NotFoundError):
        await conversations.threads.add_items("ana", thread.id, [Said("user", "x")], after="msg_none")
    run = await conversations.submit(turn("f", conversation=thread.id))
    await run.done()
    assert (await texts(conversations, thread.id))[:7] == ["a", "b", "c1", "c2", "d", "e", "f"]


async def test_nothing_goes_between_a_question_and_the_reply_being_made(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {})
    run = await conversations.submit(turn(conversation=thread.id, max_tokens=150))
    question, reply = await conversations.threads.items("ana", thread.id)
    with pytest.raises(ConflictError):
        await conversations.threads.add_items("ana", thread.id, [Said("user", "x")], after=question.id)
    with pytest.raises(ConflictError):
        await conversations.threads.change_item("ana", thread.id, reply.id, None)
    await conversations.threads.add_items("ana", thread.id, [Said("user", "next")])
    await run.done()
    assert await texts(conversations, thread.id) == ["hello you", run.reply.text, "next"]


async def everything(valkey: ValkeyStore) -> bytes:
    """All that the log holds."""
    client, found = valkey._client, []
    async for key in client.scan_iter():
        match await client.type(key):
            case b"string":
                found.append(await client.get(key))
            case b"hash":
                found += (await client.hgetall(key)).values()
            case b"stream":
                found += [value for _, fields in await client.xrange(key) for value in fields.values()]
    return b"\n".join(found)


async def test_a_deleted_item_is_gone_from_the_chat_and_from_the_log(
    conversations: Conversations, valkey: ValkeyStore, batcher: Batcher
) -> None:
    thread = await conversations.threads.create("ana", {})
    run = await conversations.submit(turn("secret word", conversation=thread.id))
    await run.done()
    question, reply = await conversations.threads.items("ana", thread.id)
    tokens = msgspec.msgpack.encode(await batcher.encode("secret word"))[1:]
    kept = await everything(valkey)
    assert all(one in kept for one in (b"secret word", tokens, reply.text.encode()))
    await conversations.threads.change_item("ana", thread.id, question.id, None)
    kept = await everything(valkey)
    assert reply.text.encode() in kept
    assert b"secret word" not in kept, "nor in the title"
    assert tokens not in kept, "nor as what the reply was read after"
    await conversations.threads.change_item("ana", thread.id, reply.id, None)
    kept = await everything(valkey)
    assert reply.text.encode() not in kept
    assert not any(entry.text.encode() in kept for entry in run.logged if len(entry.text) > 3)
    assert await texts(conversations, thread.id) == []
    with pytest.raises(NotFoundError):
        await conversations.threads.change_item("ana", thread.id, reply.id, None)
    again = await conversations.submit(turn("hello you", conversation=thread.id))
    alone = await conversations.submit(turn("hello you"))
    assert await text_of(again) == await text_of(alone)
    assert again.response.usage.prompt_tokens == alone.response.usage.prompt_tokens


async def test_what_a_reply_is_being_made_of_cannot_be_deleted_meanwhile(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {}, [Said("user", "before")])
    run = await conversations.submit(turn(conversation=thread.id, max_tokens=150))
    before, question, _ = await conversations.threads.items("ana", thread.id)
    for item in (before, question):
        with pytest.raises(ConflictError):
            await conversations.threads.change_item("ana", thread.id, item.id, None)
    await run.done()
    await conversations.threads.change_item("ana", thread.id, question.id, None)


async def test_a_shortened_reply_is_what_the_next_turn_sees(conversations: Conversations) -> None:
    thread = await conversations.threads.create("ana", {})
    run = await conversations.submit(turn(conversation=thread.id))
    await run.done()
    await conversations.threads.change_item("ana", thread.id, run.reply.id, run.reply.text[:3])
    assert (await texts(conversations, thread.id))[1] == run.reply.text[:3]
    after = await conversations.submit(turn("and you", conversation=thread.id))
    told = [Said("user", "hello you"), Said("assistant", run.reply.text[:3]), Said("user", "and you")]
    cold = await conversations.submit(replace(turn(), items=told))
    assert await text_of(after) == await text_of(cold)


async def test_an_output_answers_a_call_that_was_made(conversations: Conversations) -> None:
    async def refused(said: list[Said]) -> None:
        with pytest.raises(ConversationError, match="call_id"):
            await conversations.threads.create("ana", {}, said)

    await refused([Said("tool", "4", call_id="call_1")])
    await refused([Said("user", "hi"), CALL, Said("tool", "4", call_id="call_2")])
    await refused([CALL, Said("tool", "4", call_id="call_1"), Said("tool", "5", call_id="call_1")])
    await refused([Said("assistant", CALL.text), Said("tool", "4", call_id="call_1")])  # markup that no client called a call
    thread = await conversations.threads.create("ana", {}, [Said("user", "hi"), CALL])
    await conversations.threads.add_items("ana", thread.id, [Said("tool", "", call_id="call_1")])
    with pytest.raises(ConversationError, match="call_id"):
        await conversations.threads.add_items("ana", thread.id, [Said("tool", "again", call_id="call_1")])


@pytest.mark.parametrize("whose", ["ben", "ana"])
async def test_owners_and_ids_that_never_were_look_the_same(conversations: Conversations, whose: str) -> None:
    thread = await conversations.threads.create("ana", {}, [Said("user", "hi")])
    id = thread.id if whose == "ben" else "conv_none"
    (item,) = await conversations.threads.items("ana", thread.id)
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: conversations.threads.add_items(whose, id, [Said("user", "x")]),
        lambda: conversations.threads.add_items(whose, id, [Said("user", "x")], after=item.id),
        lambda: conversations.threads.change_item(whose, id, item.id, None),
        lambda: conversations.threads.items(whose, id),
    ]
    for attempt in attempts:
        with pytest.raises(NotFoundError, match=f"conversation '{id}' does not exist"):
            await attempt()
