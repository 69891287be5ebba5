"""Stores that fail, callers that go away, processes that die: every accepted run ends once, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from app.api.errors import refusal
from app.conversations.errors import ClosingError, ConflictError, NotFoundError
from app.conversations.service import Conversations
from app.store import StoreError
from app.store.records import Conversation, Entry, Item, Response
from app.store.valkey import ValkeyStore
from engine.batcher import Batcher
from engine.core import BusyError
from tests.app.conversations.asking import text_of, turn

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Flaky:
    """A store whose writes fail while `broken`, with or without having been done."""

    def __init__(self, store: ValkeyStore, after_writing: bool) -> None:
        self._store = store
        self._after_writing = after_writing
        self.broken: Exception | None = None  # what a write raises

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, batch: list[tuple[str, int, Entry]]) -> None:
        await self._unreliable(self._store.append, batch)

    async def finish(self, response: Response, reply: Item) -> None:
        await self._unreliable(self._store.finish, response, reply)

    async def _fail(self, *_: Any) -> None:
        raise StoreError("gone fishing")

    async def _unreliable(self, write: Callable[..., Any], *arguments: Any) -> None:
        if self.broken and self._after_writing:
            await write(*arguments)
        if self.broken:
            raise self.broken
        await write(*arguments)


@pytest.mark.parametrize("after_writing", [False, True])
async def test_a_store_that_comes_back_loses_and_doubles_nothing(
    valkey: ValkeyStore, new_conversations: Callable[[object], Conversations], after_writing: bool
) -> None:
    flaky = Flaky(valkey, after_writing)
    conversations = new_conversations(flaky)
    wanted = await conversations.submit(turn(max_tokens=80))
    await wanted.done()
    run = await conversations.submit(turn(max_tokens=80))
    flaky.broken = StoreError("gone fishing")
    asyncio.get_running_loop().call_later(0.5, lambda: setattr(flaky, "broken", None))
    await run.done()
    assert await text_of(run) == await text_of(wanted)
    assert "".join(entry.text for entry in await valkey.entries(run.id)) == await text_of(wanted)
    assert (await valkey.response(run.id)) == run.response
    await conversations.close()


@pytest.mark.parametrize("fault", [StoreError("gone fishing"), TypeError("a bug")])
async def test_a_store_that_stays_away_fails_the_run(
    valkey: ValkeyStore, new_conversations: Callable[[object], Conversations], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """C11: one terminal state, which is not success, shows nothing that was not logged, and is written once the log is back."""
    monkeypatch.setattr("app.conversations.journal.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("app.conversations.service.UNWRITTEN_SECONDS", 0.01)
    flaky = Flaky(valkey, after_writing=False)
    conversations = new_conversations(flaky)
    thread = await conversations.threads.create("ana", {})
    run = await conversations.submit(turn(conversation=thread.id, max_tokens=150))
    flaky.broken = fault
    await run.done()
    assert run.response.status == "failed"
    assert "log" in (run.response.error or "")
    assert run.reply.text == "".join(entry.text for entry in await valkey.entries(run.id)) == await text_of(run)
    assert await conversations.attach("ana", run.id) is run, "the same end for whoever asks later"
    for following in (turn(conversation=thread.id), turn(previous=run.id)):
        with pytest.raises(ConflictError):  # or the next turn would not know what this one said
            await conversations.submit(following)
    flaky.broken = None
    await asyncio.wait(conversations._tasks)
    assert await valkey.open_responses() == []
    assert await valkey.response(run.id) == run.response
    await (await conversations.submit(turn(conversation=thread.id))).done()
    await conversations.threads.delete("ana", thread.id)
    await conversations.close()


async def test_a_refused_write_fails_that_run_and_no_other(conversations: Conversations, valkey: ValkeyStore) -> None:
    """C12: another producer has written this run's log."""
    run, other = [await conversations.submit(turn(max_tokens=150)) for _ in range(2)]
    await valkey.append([(run.id, 10_000, Entry([], "intruder"))])
    await run.done()
    await other.done()
    assert run.response.status == "failed"
    assert run.response.usage.completion_tokens < 150, "the engine stopped working on it"
    assert other.response.status == "incomplete"


async def test_recovery_keeps_what_was_logged(
    conversations: Conversations, valkey: ValkeyStore, new_conversations: Callable[[object], Conversations]
) -> None:
    """What a killed process leaves: an accepted response, some of its log, no end."""
    run = await conversations.submit(turn(max_tokens=150))
    seen = []
    async for _, entry in run.entries():
        seen.append(entry)
        if len(seen) == 20:
            break
    begun = await valkey.response(run.id)
    assert begun
    await run.done()
    items = await valkey.items(run.response.conversation)
    await valkey.delete_conversation((await valkey.conversation(run.response.conversation)) or pytest.fail())
    await put_back(valkey, begun, items, seen)
    restarted = new_conversations(valkey)
    assert await restarted.recover() == 1
    assert await restarted.recover() == 0
    cut = await restarted.attach("ana", run.id)
    assert (cut.response.status, cut.response.reason) == ("incomplete", "interrupted")
    assert cut.reply.text == "".join(entry.text for entry in seen) == await text_of(cut)
    assert cut.reply.ids == ([id for entry in seen for id in entry.ids] if seen[-1].exact else None)
    following = await restarted.submit(turn("go on", previous=run.id))
    await following.done()
    assert following.response.usage.cached_tokens > 0
    await restarted.close()


async def test_nothing_is_visible_before_it_is_logged(valkey: ValkeyStore, new_conversations: Callable[[object], Conversations]) -> None:
    """The log is held up: the reply stands still, and goes on when the log does."""
    gate = Gated(valkey, "append")
    conversations = new_conversations(gate)
    run = await conversations.submit(turn(max_tokens=20))
    await gate.asked.wait()
    assert list(run.logged) == []
    reader = asyncio.create_task(text_of(run))
    for _ in range(10_000):  # until the engine has said all: no follower is told of it
        if run.generation and run.generation._finished:
            break
        await asyncio.sleep(0.001)
    assert list(run.logged) == []
    assert not reader.done()
    gate.open.set()
    await run.done()
    assert await reader == run.reply.text != ""
    await conversations.close()


async def test_an_accepted_turn_that_the_engine_refuses_ends_as_failed(
    conversations: Conversations, valkey: ValkeyStore, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise BusyError("full house")

    monkeypatch.setattr(batcher, "_submit", full)
    run = await conversations.submit(turn())
    await run.done()
    stored = await valkey.response(run.id)
    assert stored
    assert (stored.status, stored.error) == ("failed", "full house")
    assert await valkey.open_responses() == []


async def test_any_other_fault_ends_the_run_too(
    valkey: ValkeyStore, new_conversations: Callable[[object], Conversations], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: a bug in the store, say. The next run is served."""
    conversations = new_conversations(valkey)
    real, calls = valkey.append, iter(range(1000))

    async def buggy(batch: Any) -> None:
        if next(calls) == 2:
            raise ZeroDivisionError
        await real(batch)

    monkeypatch.setattr(valkey, "append", buggy)
    run = await conversations.submit(turn(max_tokens=100))
    await run.done()
    assert run.response.status == "failed"
    following = await conversations.submit(turn())
    await following.done()
    assert following.response.status == "incomplete"
    await conversations.close()


class Gated:
    """A store of which one method waits until it is told to go on."""

    def __init__(self, store: ValkeyStore, method: str = "accept") -> None:
        self._store = store
        self._method = method
        self.asked, self.open = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return self._gated if name == self._method else getattr(self._store, name)

    async def _gated(self, *arguments: Any) -> Any:
        self.asked.set()
        await self.open.wait()
        return await getattr(self._store, self._method)(*arguments)


async def test_a_caller_that_goes_away_leaves_no_turn_half_accepted(
    valkey: ValkeyStore, new_conversations: Callable[[object], Conversations]
) -> None:
    """A socket that closes between a turn's frame and its acknowledgement."""
    gate = Gated(valkey)
    conversations = new_conversations(gate)
    caller = asyncio.create_task(conversations.submit(turn(client_message_id="gone")))
    await gate.asked.wait()
    caller.cancel()
    gate.open.set()
    again = await conversations.submit(turn(client_message_id="gone"))
    await again.done()
    assert again.response.reason == "max_output_tokens"
    assert caller.cancelled()
    assert await valkey.open_responses() == []
    assert not conversations._submitting
    await conversations.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_deleting_while_a_turn_is_being_accepted_leaves_nothing(
    valkey: ValkeyStore, new_conversations: Callable[[object], Conversations], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    gate = Gated(valkey)
    conversations = new_conversations(gate)
    thread = await conversations.threads.create("ana", {})
    if fails:
        monkeypatch.setattr(valkey, "accept", Flaky(valkey, False)._fail)
    submitting = asyncio.create_task(conversations.submit(turn(conversation=thread.id)))
    await gate.asked.wait()
    deleting = asyncio.create_task(conversations.threads.delete("ana", thread.id))
    await asyncio.sleep(0)
    gate.open.set()
    await deleting
    await asyncio.gather(submitting, return_exceptions=True)
    with pytest.raises(NotFoundError):
        await conversations.submit(turn(conversation=thread.id))
    assert await valkey.conversation(thread.id) is None
    assert await valkey.items(thread.id) == {}
    assert await valkey.open_responses() == []
    await conversations.close()


def tokenising(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Prompts wait. Events: one has been asked for, and they may go on."""
    real, asked, go_on = batcher.prompt, asyncio.Event(), asyncio.Event()

    async def slow(*chat: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await real(*chat)

    monkeypatch.setattr(batcher, "prompt", slow)
    return asked, go_on


@pytest.mark.parametrize("branch", [False, True])
async def test_deleting_while_a_turn_is_being_tokenised_leaves_nothing(
    conversations: Conversations, valkey: ValkeyStore, batcher: Batcher, monkeypatch: pytest.MonkeyPatch, branch: bool
) -> None:
    thread = await conversations.threads.create("ana", {})
    first = await conversations.submit(turn(conversation=thread.id))
    await first.done()
    asked, go_on = tokenising(batcher, monkeypatch)
    following = turn(previous=first.id) if branch else turn(conversation=thread.id)
    submitting = asyncio.create_task(conversations.submit(following))
    await asked.wait()
    deleting = asyncio.create_task(conversations.threads.delete("ana", thread.id))
    await asyncio.sleep(0.05)  # time to do it wrong
    go_on.set()
    await asyncio.gather(submitting, deleting)
    assert await conversations.threads.listed("ana", 10) == []
    assert await valkey.items(thread.id) == {}
    assert await valkey.open_responses() == []


@pytest.mark.parametrize("listed", [False, True])
async def test_what_is_deleted_while_a_turn_after_it_is_tokenised_is_not_gone_on_with(
    conversations: Conversations, valkey: ValkeyStore, batcher: Batcher, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    thread = await conversations.threads.create("ana", {}) if listed else None
    first = await conversations.submit(turn(conversation=thread.id if thread else None))
    await first.done()
    asked, go_on = tokenising(batcher, monkeypatch)
    submitting = asyncio.create_task(conversations.submit(turn(previous=first.id)))
    await asked.wait()
    await conversations.delete_response("ana", first.id)
    go_on.set()
    with pytest.raises(NotFoundError) as refused:
        await submitting
    assert refused.value.code == "previous_response_not_found"
    assert await valkey.open_responses() == []
    assert len(await valkey.items(first.response.conversation)) == (2 if listed else 0), "what was said in a listed one stays"
    assert (await valkey.conversation(first.response.conversation) is not None) == listed
    if thread:
        await (await conversations.submit(turn(conversation=thread.id))).done()


async def test_a_response_that_nobody_carries_out_is_ended_when_asked_for(conversations: Conversations, valkey: ValkeyStore) -> None:
    """An accepted turn whose process lost the store's answer."""
    run = await conversations.submit(turn())
    await run.done()
    items = await valkey.items(run.response.conversation)
    for exact in (True, False):
        orphan = replace(run.response, id=f"resp_orphan_{exact}", status="in_progress")
        await put_back(valkey, orphan, items, [Entry([4], "w"), Entry([5], "x", exact)])
        found = await conversations.attach("ana", orphan.id)
        assert (found.response.status, found.response.reason, found.reply.text) == ("incomplete", "interrupted", "wx")
        assert found.reply.ids == ([4, 5] if exact else None), "ids that say more than the text are not kept"
    assert await valkey.open_responses() == []


async def put_back(valkey: ValkeyStore, response: Response, items: dict[str, Item], entries: list[Entry]) -> None:
    """Write the records as they stood when the process died."""
    conversation = Conversation(id=response.conversation, owner="ana", created_at=1.0, updated_at=1.0, listed=False, leaf=response.output)
    reply = items[response.output]
    reply.text, reply.ids, reply.status = "", None, "in_progress"
    await valkey.accept(conversation, response, list(items.values()))
    await valkey.append([(response.id, index, entry) for index, entry in enumerate(entries, start=1)])


async def test_closing_ends_every_run(valkey: ValkeyStore, new_conversations: Callable[[object], Conversations]) -> None:
    conversations = new_conversations(valkey)
    runs = [await conversations.submit(turn(max_tokens=200)) for _ in range(3)]
    await conversations.close()
    assert [run.response.reason for run in runs] == ["server_shutdown"] * 3
    assert await valkey.open_responses() == []
    with pytest.raises(ClosingError) as refused:
        await conversations.submit(turn())
    assert (refusal(refused.value).status, refusal(refused.value).code) == (503, "server_shutdown")
    assert await valkey.open_responses() == []
    await conversations.close()
