"""Submit, attach to, cancel and look up: everything a protocol adapter may ask of conversations.

Owns the rules: who may see what, what a turn follows, that a repeated client message id runs once, and that a turn is in the log
before it is acknowledged. Knows no wire format: adapters in `app.api` translate. Owners never learn of each other: what is
another's does not exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from app.conversations import ledger
from app.conversations.errors import ConflictError, ConversationError, NotFoundError
from app.conversations.journal import Journal
from app.conversations.pump import ended, interrupted, pump
from app.conversations.run import Run
from app.store import Store
from app.store.memory import MemoryStore
from app.store.records import Conversation, Item, Response, Role
from engine.batcher import Batcher
from engine.core import EngineError, SamplingParams

log = logging.getLogger(__name__)

TITLE_CHARACTERS = 80


@dataclass(slots=True, frozen=True, kw_only=True)
class Turn:
    """What a client asks for: new items after what exists, and how to answer them."""

    owner: str
    items: list[tuple[Role, str]]  # role and text of each new item
    sampling: SamplingParams  # max_tokens 0: to the end of the context
    instructions: str | None = None
    previous: str | None = None  # the response it follows
    conversation: str | None = None  # the conversation it is added to
    client_message_id: str | None = None
    stored: bool = True  # False: its records go to the caller's scratch shelf
    request: dict[str, Any] = field(default_factory=dict)  # the adapter's echo of the request


class Shelf:
    """Where a run's records go: the durable log, or (`store: false`) a memory that lives and dies with a connection."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.journal = Journal(store)

    @classmethod
    def scratch(cls) -> Shelf:
        return cls(MemoryStore())


@dataclass(slots=True, frozen=True)
class _Place:
    """What a turn follows."""

    conversation: Conversation
    path: list[Item]  # oldest first
    copied: bool = False  # the path's items are still to be written to the turn's shelf


class Conversations:
    def __init__(self, store: Store, batcher: Batcher, salt: Callable[[str], bytes]) -> None:
        """`salt` gives the secret that roots an owner's prefix blocks."""
        self._durable = Shelf(store)
        self._batcher = batcher
        self._salt = salt
        self._runs: dict[str, Run] = {}  # in progress, by response id
        self._busy: set[str] = set()  # conversations that a turn is being added to
        self._submitting: dict[tuple[str, str], asyncio.Lock] = {}  # (owner, client message id)
        self._pumps: set[asyncio.Task[None]] = set()

    # Turns

    async def submit(self, turn: Turn, scratch: Shelf | None = None) -> Run:
        """Accept a turn and start its run. When this returns, the turn is in the log, or on `scratch` if it is not to be stored.

        Earlier responses are looked up on `scratch` too.

        A client message id that the same owner used within a day gives the run that exists.
        Raises: ConversationError, StoreError, engine.core.EngineError
        """
        _check(turn)
        if turn.client_message_id is None:
            return await self._submit(turn, scratch)
        async with self._one_at_a_time(turn.owner, turn.client_message_id):
            return await self._submit(turn, scratch)

    async def _submit(self, turn: Turn, scratch: Shelf | None) -> Run:
        if not (turn.stored or scratch):
            scratch = Shelf.scratch()
        shelf = self._durable if turn.stored or scratch is None else scratch
        if turn.client_message_id and (repeated := await shelf.store.repeated(turn.owner, turn.client_message_id)):
            return await self._run_of(repeated, shelf)
        async with self._adding_to(turn.owner, turn.conversation):
            return await self._accept(turn, await self._place(turn, shelf, scratch), shelf)

    async def _accept(self, turn: Turn, place: _Place, shelf: Shelf) -> Run:
        """Tokenise, check, write, start."""
        ready = self._batcher.ready()
        now = time.time()
        response_id = new_id("resp")
        parent = place.path[-1].id if place.path else None
        items: list[Item] = []
        for role, text in turn.items:
            items.append(Item(id=new_id("msg"), parent=parent, role=role, text=text, created_at=now, response=response_id))
            parent = items[-1].id
        prompt = await self._batcher.prompt(ledger.messages(turn.instructions, place.path + items, ready.fingerprint))
        sampling = turn.sampling
        if not sampling.max_tokens:
            sampling = dataclasses.replace(sampling, max_tokens=max(1, ready.context_length - len(prompt.ids)))
        self._batcher.admit(prompt.ids, sampling)
        reply = Item(
            id=new_id("msg"),
            parent=parent,
            role="assistant",
            text="",
            created_at=now,
            response=response_id,
            status="in_progress",
            lead_ids=list(prompt.lead_ids),
            lead_digest=prompt.lead_digest,
            fingerprint=ready.fingerprint,
        )
        response = Response(
            id=response_id,
            owner=turn.owner,
            conversation=place.conversation.id,
            previous=turn.previous,
            input=[item.id for item in items],
            output=reply.id,
            created_at=now,
            request=turn.request,
            client_message_id=turn.client_message_id,
        )
        title = place.conversation.title or _title(turn)
        conversation = replace(place.conversation, leaf=reply.id, updated_at=now, title=title)
        copied = place.path if place.copied else []
        if repeated := await shelf.store.accept(conversation, response, [*copied, *items, reply]):
            return await self._run_of(repeated, shelf)
        return await self._start(Run(response, reply), prompt.ids, sampling, shelf)

    async def _start(self, run: Run, ids: list[int], sampling: SamplingParams, shelf: Shelf) -> Run:
        try:
            run.generation = self._batcher.session(self._salt(run.response.owner)).generate(ids, sampling)
        except EngineError as fault:  # it was accepted, so it must end
            await shelf.journal.finish(run, *ended(run, "failed", error=str(fault)))
            return run
        self._runs[run.id] = run
        task = asyncio.create_task(pump(run, shelf.journal, len(ids)), name=run.id)
        self._pumps.add(task)
        task.add_done_callback(self._pumped)
        return run

    def _pumped(self, task: asyncio.Task[None]) -> None:
        self._pumps.discard(task)
        del self._runs[task.get_name()]

    async def _place(self, turn: Turn, shelf: Shelf, scratch: Shelf | None) -> _Place:
        if turn.previous:
            return await self._after(turn.owner, turn.previous, shelf, scratch)
        if turn.conversation:
            conversation = await self.conversation(turn.owner, turn.conversation)
            return _Place(conversation, ledger.path(await shelf.store.items(conversation.id), conversation.leaf))
        return _Place(_new_conversation(turn.owner, listed=False), [])

    async def _after(self, owner: str, response_id: str, shelf: Shelf, scratch: Shelf | None) -> _Place:
        """The end of an earlier response. A turn that goes to another shelf takes a copy of what it follows."""
        for source in (scratch, self._durable):
            response = await source.store.response(response_id) if source else None
            if not source or response is None or response.owner != owner:
                continue
            if response.status == "in_progress":
                raise ConflictError(f"response {response_id!r} is still in progress", "previous_response_id", "response_in_progress")
            path = ledger.path(await source.store.items(response.conversation), response.output)
            if source is not shelf:
                return _Place(_new_conversation(owner, listed=False), path, copied=True)
            conversation = await source.store.conversation(response.conversation)
            if conversation:
                return _Place(conversation, path)
        raise NotFoundError(f"response {response_id!r} does not exist", "previous_response_id", "previous_response_not_found")

    # Runs

    async def attach(self, owner: str, response_id: str, scratch: Shelf | None = None) -> Run:
        """The run of a response, live or finished. Raises: NotFoundError, StoreError"""
        if (run := self._runs.get(response_id)) and run.response.owner == owner:
            return run
        for shelf in (scratch, self._durable):
            response = await shelf.store.response(response_id) if shelf else None
            if shelf and response and response.owner == owner:
                return await self._run_of(response, shelf)
        raise NotFoundError(f"response {response_id!r} does not exist", "response_id", "response_not_found")

    async def cancel(self, owner: str, response_id: str, scratch: Shelf | None = None) -> Run:
        """Ask a run to end; one that has ended is left as it is. Raises: NotFoundError, StoreError"""
        run = await self.attach(owner, response_id, scratch)
        run.cancel()
        return run

    async def _run_of(self, response: Response, shelf: Shelf) -> Run:
        if run := self._runs.get(response.id):
            return run
        items = await shelf.store.items(response.conversation)
        return Run(response, items[response.output], await shelf.store.entries(response.id))

    # Conversations

    async def create(self, owner: str, metadata: dict[str, str]) -> Conversation:
        conversation = _new_conversation(owner, listed=True, metadata=metadata)
        await self._durable.store.create_conversation(conversation)
        return conversation

    async def conversation(self, owner: str, id: str) -> Conversation:
        """Raises: NotFoundError, StoreError"""
        conversation = await self._durable.store.conversation(id)
        if conversation is None or conversation.owner != owner or not conversation.listed:
            raise NotFoundError(f"conversation {id!r} does not exist", "conversation", "conversation_not_found")
        return conversation

    async def listed(self, owner: str, limit: int, after: str | None = None) -> list[Conversation]:
        """The last updated first. Raises: NotFoundError when `after` is not one of them, StoreError"""
        if after is not None:
            await self.conversation(owner, after)
        return await self._durable.store.conversations(owner, limit, after)

    async def items(self, owner: str, id: str) -> list[Item]:
        """The conversation's current path, oldest first; a reply in the making without its text. Raises: NotFoundError, StoreError"""
        conversation = await self.conversation(owner, id)
        return ledger.path(await self._durable.store.items(id), conversation.leaf)

    async def delete(self, owner: str, id: str) -> None:
        """End its runs and remove everything of it. Raises: NotFoundError, StoreError"""
        conversation = await self.conversation(owner, id)
        for run in self.running(id):
            run.cancel()
            await run.done()
        async with self._adding_to(owner, id):
            await self._durable.store.delete_conversation(conversation)

    def running(self, conversation: str) -> list[Run]:
        return [run for run in self._runs.values() if run.response.conversation == conversation and not run.finished]

    # Beginning and end of the process

    async def recover(self) -> int:
        """Close what a process that died left open: each reply keeps what was logged of it and is marked incomplete. Returns how many."""
        store = self._durable.store
        left = await store.open_responses()
        for response in left:
            run = await self._run_of(response, self._durable)
            await store.finish(*interrupted(run, await store.entries(response.id)))
        return len(left)

    async def close(self) -> None:
        """End every run, each with its terminal state in the log."""
        for run in list(self._runs.values()):
            run.cancel("server_shutdown")
        if self._pumps:
            await asyncio.wait(self._pumps)

    # Turn-taking

    @asynccontextmanager
    async def _adding_to(self, owner: str, conversation: str | None) -> AsyncIterator[None]:
        """One turn of a conversation at a time: its next one must follow the reply."""
        if conversation is None:
            yield
            return
        await self.conversation(owner, conversation)  # before anyone else's could be told to be busy
        if conversation in self._busy or self.running(conversation):
            raise ConflictError(
                f"conversation {conversation!r} has a response in progress: wait for it or cancel it", "conversation", "conversation_locked"
            )
        self._busy.add(conversation)
        try:
            yield
        finally:
            self._busy.discard(conversation)

    @asynccontextmanager
    async def _one_at_a_time(self, owner: str, client_message_id: str) -> AsyncIterator[None]:
        lock = self._submitting.setdefault((owner, client_message_id), asyncio.Lock())
        async with lock:
            yield
        if not lock.locked():
            self._submitting.pop((owner, client_message_id), None)


def _check(turn: Turn) -> None:
    """What is wrong with a turn whatever it follows. Raises: ConversationError"""
    if not turn.items or not all(text for _, text in turn.items):
        raise ConversationError("expected input of at least one message with text, got an empty one", "input")
    if turn.previous and turn.conversation:
        raise ConversationError("expected previous_response_id or conversation, got both", "conversation")
    if turn.conversation and not turn.stored:
        raise ConversationError("expected store: true for a turn of a conversation, got store: false", "store")


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _new_conversation(owner: str, *, listed: bool, metadata: dict[str, str] | None = None) -> Conversation:
    now = time.time()
    return Conversation(id=new_id("conv"), owner=owner, created_at=now, updated_at=now, listed=listed, metadata=metadata or {})


def _title(turn: Turn) -> str:
    text = next((text for role, text in turn.items if role == "user"), "")
    return " ".join(text[: 4 * TITLE_CHARACTERS].split())[:TITLE_CHARACTERS]
