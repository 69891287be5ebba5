"""Submit, attach to, cancel and look up: everything a protocol adapter may ask of conversations.

Owns the rules: who may see what, what a turn follows, that a repeated client message id runs once, and that a turn is in the log
before it is acknowledged. Knows no wire format: adapters in `app.api` translate. Owners never learn of each other: what is
another's does not exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from app.conversations import calls, ledger, window
from app.conversations.errors import ClosingError, ConflictError, ConversationError, NotFoundError, shown
from app.conversations.journal import Journal
from app.conversations.pump import ended, finish_or_fail, interrupted, pump, read_prompt
from app.conversations.run import Run
from app.conversations.segments import Segments
from app.conversations.threads import Threads, unknown_conversation
from app.conversations.turn import Place, Turn, draft, new_conversation, new_id, new_items
from app.store import GoneError, Store
from app.store.memory import MemoryStore
from app.store.records import Item, Response
from engine.batcher import Batcher, Session
from engine.core import Ending, EngineError, Prompt, SamplingParams

log = logging.getLogger(__name__)

MOST_FORGOTTEN = 256  # responses that have expired, at a time
UNWRITTEN_SECONDS = 1.0  # between attempts to write the end of a run that the log would not take

T = TypeVar("T")


class Shelf:
    """Where a run's records go: the durable log, or (`store: false`) a memory that lives and dies with a connection."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.journal = Journal(store)

    @classmethod
    def scratch(cls) -> Shelf:
        return cls(MemoryStore())


class Conversations:
    def __init__(self, store: Store, batcher: Batcher, salt: Callable[[str], bytes], segments: Segments | None = None) -> None:
        """`salt` gives the secret that roots an owner's prefix blocks; `segments`, what is known of an earlier process's replies."""
        self._durable = Shelf(store)
        self._batcher = batcher
        self._salt = salt
        self._segments = segments or Segments()
        self._runs: dict[str, Run] = {}  # from just before they are accepted until they have ended, by response id
        self._closed = asyncio.Event()  # or about to be
        self.threads = Threads(store, self.running)
        self._submitting: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # (owner, client message id)
        self._tasks: set[asyncio.Task[object]] = set()  # pumps and submissions, which end whoever waits for them

    # Turns

    async def submit(self, turn: Turn, scratch: Shelf | None = None) -> Run:
        """Accept a turn and start its run. When this returns, the turn is in the log, or on `scratch` if it is not to be stored.

        Earlier responses are looked up on `scratch` too. A client message id that the same owner used within a day gives the run that
        exists; another turn with the same one is refused. A stored turn is accepted and started as a whole even if the caller is cancelled
        meanwhile.
        Raises: ConversationError, StoreError, engine.core.EngineError
        """
        turn.check()
        if not turn.stored:
            return await self._submit(turn, scratch or Shelf.scratch(), scratch)
        return await asyncio.shield(self._task(self._submit_once(turn, scratch)))

    async def count(self, turn: Turn) -> int:
        """How many tokens a turn's prompt is. Nothing is written. Raises: ConversationError, StoreError, engine.core.EngineError"""
        turn.check()
        place = await self._place(turn, self._durable, None)
        items = new_items(turn.items, place.leaf)
        calls.check_answers(place.path, items)
        return len((await self._prompt(turn, place.path, items)).ids)

    async def _submit_once(self, turn: Turn, scratch: Shelf | None) -> Run:
        if turn.client_message_id is None:
            return await self._submit(turn, self._durable, scratch)
        key = (turn.owner, turn.client_message_id)
        lock = self._submitting.setdefault(key, asyncio.Lock())
        async with lock:
            if repeated := await self._durable.store.repeated(*key):
                return await self._repeat(turn, repeated, self._durable)
            run = await self._submit(turn, self._durable, scratch)
        if not turn.lasting:  # as many as come are forgotten
            self._task(self._forget_expired())
        return run

    async def _repeat(self, turn: Turn, repeated: Response, shelf: Shelf) -> Run:
        """The run of a turn that was accepted before. Raises: ConversationError when it is another turn that had the client message id"""
        if repeated.asked_digest not in (b"", turn.asked_digest):  # an earlier Hocket kept none
            message = (
                f"expected the request that the client message id or idempotency key {shown(turn.client_message_id or '')} was first "
                "sent with, got another one: give each request an id of its own"
            )
            raise ConversationError(message, None, "idempotency_error")  # no conflict: clients send those again
        return await self._run_of(repeated, shelf)

    async def _submit(self, turn: Turn, shelf: Shelf, scratch: Shelf | None) -> Run:
        named = turn.conversation
        if named is None:
            place = await self._place(turn, shelf, scratch)
            if not place.conversation.listed:
                return await self._accept(turn, place, shelf)
            named = place.conversation.id  # by following one of its responses
        async with self.threads.alone_with(turn.owner, named):
            if self.running(named):
                message = f"conversation {shown(named)} has a response in progress: wait for it or cancel it"
                raise ConflictError(message, "conversation", "conversation_locked")
            return await self._accept(turn, await self._place(turn, shelf, scratch), shelf)

    async def _accept(self, turn: Turn, place: Place, shelf: Shelf) -> Run:
        """Tokenise, check, write, start, in this order: nothing is written that cannot run, and nothing runs that is not written."""
        ready = self._batcher.ready()
        sampling = _limited(turn, ready.context_length)
        response_id = new_id("resp")
        items = new_items(turn.items, place.leaf, response_id)
        calls.check_answers(place.path, items)
        tools = msgspec.json.encode(turn.tools).decode() if turn.tools else ""
        path, new = (place.path, items) if turn.context is None else ([], new_items(turn.context, None))
        chat = self._segments.recall(turn.owner, ready.fingerprint, turn.instructions, path, new, tools)
        prompt = await self._prompt(turn, path, new)
        drafted = draft(turn, place, response_id, items, prompt, ready.fingerprint)
        run = Run(drafted.response, drafted.reply)

        session = self._batcher.session(self._salt(turn.owner))
        session.admit(prompt.ids, sampling)
        try:
            if sampling.grammar:
                await self._until_closing(session.compile(sampling.grammar))
            if self._closed.is_set():
                raise _closing()
            self._runs[run.id] = run
            written = [*drafted.items, drafted.reply]
            repeated = await shelf.store.accept(drafted.conversation, drafted.response, written, not place.new)
        except BaseException as fault:
            session.leave()
            self._runs.pop(run.id, None)
            run.finish(*ended(run, "failed", error=str(fault)))  # for whoever waits for it already
            if isinstance(fault, GoneError):
                raise _gone(turn) from fault
            raise
        if repeated:
            session.leave()
            del self._runs[run.id]
            run.finish(*ended(run, "failed", error="it repeats another"))
            return await self._repeat(turn, repeated, shelf)
        keep: Callable[[Item], None] = _forget
        if turn.raw is None and (turn.ending is Ending.REPLY or prompt.goes_on):
            keep = functools.partial(self._segments.keep, chat, whole=prompt if prompt.goes_on else None)
        follow = functools.partial(pump, keep=keep) if turn.generate else read_prompt
        self._task(self._carry_out(run, session, prompt.ids, sampling, turn.background, shelf, follow))
        return run

    async def _until_closing(self, work: Coroutine[Any, Any, None]) -> None:
        """Raises: ClosingError, and what the work raises"""
        tasks = working, closing = asyncio.ensure_future(work), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _closing()
            working.result()
        finally:
            working.cancel()
            closing.cancel()
            if working.done() and not working.cancelled():
                working.exception()  # seen, also by who is cancelled just now

    async def _carry_out(
        self,
        run: Run,
        session: Session,
        ids: list[int],
        sampling: SamplingParams,
        background: bool,
        shelf: Shelf,
        follow: Callable[[Run, Journal, int], Coroutine[Any, Any, None]],
    ) -> None:
        """Take an accepted run to its end, whatever happens on the way."""
        try:
            run.begin(session.generate(ids, sampling, background))
            await follow(run, shelf.journal, len(ids))
        except Exception as fault:
            if not isinstance(fault, EngineError):
                log.exception("response %s broke off", run.id)
            error = str(fault) if isinstance(fault, EngineError) else "the server met an error it did not expect"
            await finish_or_fail(run, shelf.journal, *ended(run, "failed", error=error))
        try:
            await self._see_written(run, shelf)
        finally:
            del self._runs[run.id]

    async def _prompt(self, turn: Turn, path: list[Item], new: list[Item]) -> Prompt:
        """The whole chat, or under `truncation: auto` the window of it that leaves room for a reply."""
        ready = self._batcher.ready()
        if turn.raw is not None:
            return Prompt(await self._batcher.encode(turn.raw) if isinstance(turn.raw, str) else list(turn.raw), (), b"")
        messages = ledger.messages(turn.instructions, path + new, ready.fingerprint)
        if turn.generate and turn.context is None and not new and all(item.role == "system" for item in path if item.spoken):
            raise ConversationError("expected input, or a conversation with something to reply to, got an empty one", "input")
        if turn.truncation == "disabled":
            return await self._batcher.prompt(messages, turn.tools, turn.ending)
        limit = ready.context_length - window.room(turn.sampling.max_tokens, ready.context_length)
        ends = await self._batcher.measure(messages, turn.tools)
        for part in window.windows(messages, ends, limit, window.newest(new)):
            prompt = await self._batcher.prompt(part, turn.tools, turn.ending)
            if len(prompt.ids) < ready.context_length:
                break
        return prompt

    async def _see_written(self, run: Run, shelf: Shelf) -> None:
        """Where the log could not take a run's end, keep the run until it can: whoever asks meanwhile is told of the same end."""
        while not (run.written or self._closed.is_set()):
            try:
                await shelf.store.finish(run.response, run.reply)
                run.written = True
            except Exception:
                await asyncio.sleep(UNWRITTEN_SECONDS)

    async def _place(self, turn: Turn, shelf: Shelf, scratch: Shelf | None) -> Place:
        if turn.previous is not None:
            return await self._after(turn.owner, turn.previous, shelf, scratch)
        if turn.conversation is not None:
            conversation = await self.threads.conversation(turn.owner, turn.conversation)
            return Place(conversation, ledger.path(await shelf.store.items(conversation.id), conversation.leaf))
        return Place(new_conversation(turn.owner, listed=False), [], new=True)

    async def _after(self, owner: str, response_id: str, shelf: Shelf, scratch: Shelf | None) -> Place:
        """The end of an earlier response. A turn that goes to another shelf takes a copy of what it follows."""
        for source in (scratch, self._durable):
            response = await source.store.response(response_id) if source else None
            if not source or response is None or response.owner != owner:
                continue
            if response.status == "in_progress" and not (await self._run_of(response, source)).settled:
                raise ConflictError(f"response {shown(response_id)} is still in progress", "previous_response_id", "response_in_progress")
            path = ledger.path(await source.store.items(response.conversation), response.output)
            if source is not shelf:
                return Place(new_conversation(owner, listed=False), path, new=True)
            conversation = await source.store.conversation(response.conversation)
            if conversation:
                return Place(conversation, path)
        raise _unknown_previous(response_id)

    # Runs

    async def attach(self, owner: str, response_id: str, scratch: Shelf | None = None) -> Run:
        """The run of a response, live or finished. Raises: NotFoundError, StoreError"""
        if (run := self._runs.get(response_id)) and run.response.owner == owner:
            return run
        for shelf in (scratch, self._durable):
            response = await shelf.store.response(response_id) if shelf else None
            if shelf and response and response.owner == owner:
                return await self._run_of(response, shelf)
        raise NotFoundError(f"response {shown(response_id)} does not exist", "response_id", "response_not_found")

    async def cancel(self, owner: str, response_id: str, scratch: Shelf | None = None) -> Run:
        """Ask a run to end; one that has ended is left as it is. Raises: NotFoundError, StoreError"""
        run = await self.attach(owner, response_id, scratch)
        run.cancel()
        return run

    async def _run_of(self, response: Response, shelf: Shelf) -> Run:
        """The live run of a response, or what is left of it. One that nobody carries out any more is ended as interrupted."""
        if run := self._runs.get(response.id):
            return run
        if response.status == "in_progress":  # it may have ended since its record was read
            response = await shelf.store.response(response.id) or response
        items = await shelf.store.items(response.conversation)
        if response.output not in items:
            raise NotFoundError(f"response {shown(response.id)} does not exist any more", "response_id", "response_not_found")
        run = Run(response, items[response.output], await shelf.store.entries(response.id))
        if not run.finished:
            run.finish(*interrupted(run))
            await shelf.store.finish(run.response, run.reply)
        return run

    async def input_items(self, owner: str, response_id: str, scratch: Shelf | None = None) -> list[Item]:
        """What a response's turn brought in, oldest first. Raises: NotFoundError, StoreError"""
        for shelf in (scratch, self._durable):
            response = await shelf.store.response(response_id) if shelf else None
            if shelf and response and response.owner == owner:
                found = await shelf.store.items(response.conversation)
                return [found[id] for id in response.input if id in found and not found[id].deleted]
        raise NotFoundError(f"response {shown(response_id)} does not exist", "response_id", "response_not_found")

    async def delete_response(self, owner: str, response_id: str) -> None:
        """End it if it runs and forget it. What was said stays in its conversation, if that is listed or has other responses.

        Raises: NotFoundError, StoreError
        """
        run = await self.cancel(owner, response_id)
        await run.done()
        await self._durable.store.delete_response(run.response)

    async def _forget_expired(self) -> None:
        for response in await self._durable.store.expired(time.time(), MOST_FORGOTTEN):
            if response.id not in self._runs:
                await self._durable.store.delete_response(response)

    def running(self, conversation: str) -> list[Run]:
        return [run for run in self._runs.values() if run.response.conversation == conversation and not run.settled]

    # Beginning and end of the process

    async def recover(self) -> int:
        """Close what a process that died left open: each reply keeps what was logged of it and is marked incomplete. Returns how many."""
        left = await self._durable.store.open_responses()
        for response in left:
            await self._run_of(response, self._durable)
        await self._forget_expired()
        return len(left)

    async def close(self) -> None:
        """Take no more turns, and end every run, each with its terminal state in the log. It may be asked for again."""
        self._closed.set()
        while self._tasks:
            for run in list(self._runs.values()):
                run.cancel("server_shutdown")
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on when whoever waits for it is gone."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it too, and if nobody did, nobody needs it


def _limited(turn: Turn, context_length: int) -> SamplingParams:
    """Its sampling, with a limit: without one a reply may fill the context. Where there is to be no reply, one token is dropped."""
    if not turn.generate:
        return dataclasses.replace(turn.sampling, max_tokens=1, grammar=None)
    return turn.sampling if turn.sampling.max_tokens else dataclasses.replace(turn.sampling, max_tokens=context_length)


def _closing() -> ClosingError:
    return ClosingError("the server is shutting down: try again in a moment, when it may be back", None, "server_shutdown")


def _gone(turn: Turn) -> NotFoundError:
    """What a turn follows was deleted while the turn was being tokenised: it is as if it had come after that."""
    return _unknown_previous(turn.previous) if turn.previous else unknown_conversation(turn.conversation or "")


def _unknown_previous(id: str) -> NotFoundError:
    return NotFoundError(f"response {shown(id)} does not exist", "previous_response_id", "previous_response_not_found")


def _forget(_: Item) -> None:
    """Of a reply that no later chat can bring back."""
