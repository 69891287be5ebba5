"""The log in this process's memory: for unit tests, `--store memory`, and the state that lives and dies with a connection.

Keeps records in their encoded form, as the durable log does: what a caller changes in a record after writing it is not
written, and what cannot be encoded is refused in the same way. Knows nothing of files, sockets or other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from app.store import IDEMPOTENCY_SECONDS, GoneError, RefusedError, StoreError
from app.store.records import Conversation, Entry, Item, Record, RecordError, Response, decode, encode


@dataclass(slots=True)
class _Thread:
    """A conversation and what belongs to it."""

    record: bytes
    items: dict[str, bytes] = field(default_factory=dict)
    responses: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Log:
    """A response's entries; `last` is the highest index written."""

    last: int = 0
    entries: list[tuple[int, bytes]] = field(default_factory=list)


class MemoryStore:
    """The `Store` protocol in dictionaries. No method gives up control midway, so each one is a transaction."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  # seconds; only differences matter
        self._threads: dict[str, _Thread] = {}
        self._listed: dict[str, dict[str, float]] = {}  # owner -> conversation id -> updated_at
        self._responses: dict[str, bytes] = {}
        self._logs: dict[str, _Log] = {}
        self._open: dict[str, float] = {}  # response id -> created_at
        self._expiring: dict[str, float] = {}  # response id -> expires_at
        self._once: dict[tuple[str, str], tuple[float, str]] = {}  # (owner, message id) -> (expiry, response id), in order of expiry

    @property
    def size(self) -> int:
        """Bytes of its records."""
        threads = sum(len(thread.record) + sum(map(len, thread.items.values())) for thread in self._threads.values())
        entries = sum(len(record) for log in self._logs.values() for _, record in log.entries)
        return threads + entries + sum(map(len, self._responses.values()))

    async def create_conversation(self, conversation: Conversation, items: Sequence[Item] = ()) -> None:
        record, item_records = _encoded(conversation), {item.id: _encoded(item) for item in items}
        self._put(conversation, record).items.update(item_records)

    async def conversation(self, id: str) -> Conversation | None:
        thread = self._threads.get(id)
        return None if thread is None else _decoded(thread.record, Conversation)

    async def update_conversation(self, conversation: Conversation) -> None:
        record = _encoded(conversation)
        if conversation.id in self._threads:
            self._put(conversation, record)

    async def conversations(self, owner: str, limit: int, after: str | None = None) -> list[Conversation]:
        scores = self._listed.get(owner, {})
        newest_first = sorted(scores, key=lambda id: (scores[id], id), reverse=True)
        start = 0
        if after is not None:
            start = newest_first.index(after) + 1 if after in scores else len(newest_first)
        page = newest_first[start : start + max(0, limit)]
        return [_decoded(self._threads[id].record, Conversation) for id in page]

    async def delete_conversation(self, conversation: Conversation) -> None:
        thread = self._threads.pop(conversation.id, None)
        self._listed.get(conversation.owner, {}).pop(conversation.id, None)
        if thread is None:
            return
        self._forget(thread.responses)

    async def items(self, conversation: str) -> dict[str, Item]:
        thread = self._threads.get(conversation)
        return {} if thread is None else {id: _decoded(record, Item) for id, record in thread.items.items()}

    async def put_items(self, conversation: Conversation, items: Sequence[Item], unsaid: Sequence[str] = ()) -> None:
        record, item_records = _encoded(conversation), {item.id: _encoded(item) for item in items}
        if conversation.id in self._threads:
            self._put(conversation, record).items.update(item_records)
            for response in unsaid:
                if log := self._logs.get(response):
                    log.entries.clear()

    async def accept(
        self, conversation: Conversation, response: Response, items: Sequence[Item], existing: bool = False
    ) -> Response | None:
        key = None if response.client_message_id is None else (response.owner, response.client_message_id)
        if key is not None and (earlier := await self.repeated(*key)):
            return earlier
        thread_record, response_record = _encoded(conversation), _encoded(response)
        item_records = {item.id: _encoded(item) for item in items}

        followed = self._responses if response.previous else self._threads
        if existing and (response.previous or conversation.id) not in followed:
            raise GoneError("what the turn follows was deleted meanwhile")
        thread = self._put(conversation, thread_record)
        thread.items.update(item_records)
        thread.responses.add(response.id)
        self._responses[response.id] = response_record
        self._logs[response.id] = _Log()
        self._open[response.id] = response.created_at
        if response.expires_at is not None:
            self._expiring[response.id] = response.expires_at
        if key is not None:
            self._once[key] = (self._clock() + IDEMPOTENCY_SECONDS, response.id)
        return None

    async def repeated(self, owner: str, client_message_id: str) -> Response | None:
        self._forget_expired()
        once = self._once.get((owner, client_message_id))
        return None if once is None else _decoded(self._responses[once[1]], Response)

    async def append(self, batch: Sequence[tuple[str, int, Entry]]) -> None:
        encoded = [(response, index, _encoded(entry)) for response, index, entry in batch]
        refused = {}
        for response, index, record in encoded:
            log = self._logs.get(response)
            if log is None:
                refused[response] = f"{response} is not in the log"
            elif index <= log.last:
                refused[response] = f"{response}: expected an index above {log.last}, got {index}"
            else:
                log.entries.append((index, record))
                log.last = index
        if refused:
            raise RefusedError("; ".join(refused.values()), frozenset(refused))

    async def entries(self, response: str, after: int = 0) -> list[Entry]:
        log = self._logs.get(response)
        return [] if log is None else [_decoded(record, Entry) for index, record in log.entries if index > after]

    async def finish(self, response: Response, reply: Item) -> None:
        response_record, reply_record = _encoded(response), _encoded(reply)
        if response.id not in self._responses:
            return
        self._threads[response.conversation].items[reply.id] = reply_record
        self._responses[response.id] = response_record
        self._open.pop(response.id, None)

    async def response(self, id: str) -> Response | None:
        record = self._responses.get(id)
        return None if record is None else _decoded(record, Response)

    async def delete_response(self, response: Response) -> None:
        thread = self._threads.get(response.conversation)
        if thread is None or response.id not in thread.responses:
            return
        if thread.responses == {response.id} and not (conversation := _decoded(thread.record, Conversation)).listed:
            await self.delete_conversation(conversation)
            return
        thread.responses.remove(response.id)
        self._forget([response.id])

    async def expired(self, now: float, limit: int) -> list[Response]:
        earliest_first = sorted((at, id) for id, at in self._expiring.items() if at < now)
        return [_decoded(self._responses[id], Response) for _, id in earliest_first[:limit]]

    async def open_responses(self) -> list[Response]:
        oldest_first = sorted(self._open, key=lambda id: (self._open[id], id))
        return [_decoded(self._responses[id], Response) for id in oldest_first]

    async def ping(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _put(self, conversation: Conversation, record: bytes) -> _Thread:
        thread = self._threads.setdefault(conversation.id, _Thread(record))
        thread.record = record
        if conversation.listed:
            self._listed.setdefault(conversation.owner, {})[conversation.id] = conversation.updated_at
        return thread

    def _forget(self, responses: Collection[str]) -> None:
        for id in responses:
            del self._responses[id]
            del self._logs[id]
            self._open.pop(id, None)
            self._expiring.pop(id, None)
        self._once = {key: entry for key, entry in self._once.items() if entry[1] not in responses}

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._once:
            key = next(iter(self._once))
            if self._once[key][0] > now:
                break
            del self._once[key]


def _encoded(record: Conversation | Item | Response | Entry) -> bytes:
    try:
        return encode(record)
    except RecordError as fault:
        raise StoreError(str(fault)) from fault


def _decoded(record: bytes, kind: type[Record]) -> Record:
    try:
        return decode(record, kind)
    except RecordError as fault:
        raise StoreError(str(fault)) from fault
