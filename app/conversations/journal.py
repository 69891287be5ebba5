"""Writing runs to the log: entries first, visibility after.

Owns the order of a run's entries in the store and their retry. One pipeline is under way at a time for each store; what a run
gains meanwhile is merged into one entry, so the log keeps up however slow it is, and a lone stream is never delayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from app.conversations.run import Run
from app.store import RefusedError, Store, StoreError
from app.store.records import Entry, Item, Logprob, Response
from engine.core import Delta, TokenLogprob

log = logging.getLogger(__name__)

Write = Callable[[], Coroutine[Any, Any, None]]

PATIENCE_SECONDS = 30.0  # how long a store may be gone before the runs that wait for it fail
RETRY_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Pending:
    """What a run has gained and not yet logged."""

    run: Run
    index: int = 0  # of its last entry in the log
    ids: list[int] = field(default_factory=list)
    text: str = ""
    exact: bool = True
    logprobs: list[Logprob] = field(default_factory=list)
    failed: StoreError | None = None
    written: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is left to write


class Journal:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: dict[str, _Pending] = {}
        self._dirty: dict[str, _Pending] = {}
        self._writer: asyncio.Task[None] | None = None

    def add(self, run: Run, delta: Delta) -> None:
        """Take in what a run gained. It is logged with the next piece of visible text, and then published."""
        pending = self._pending.setdefault(run.id, _Pending(run))
        pending.ids += delta.ids
        pending.text += delta.text
        pending.exact = delta.exact
        pending.logprobs += map(_logprob, delta.logprobs)
        if pending.text and not pending.failed:
            self._dirty[run.id] = pending
            pending.written.clear()
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write(), context=Context())  # everyone's, not the request's that starts it

    async def finish(self, run: Run, response: Response, reply: Item) -> None:
        """Log what is left, then the end; publish it. Raises: StoreError when the log stayed out of reach."""
        pending = self._pending.get(run.id)
        try:
            if pending and run.id in self._dirty:
                await pending.written.wait()
            if pending and pending.failed:
                raise pending.failed

            async def end() -> None:
                await self._store.finish(response, reply)

            await _patiently(end, end)
            run.finish(response, reply)
        finally:
            self._pending.pop(run.id, None)

    async def _write(self) -> None:
        while self._dirty:
            batch = [self._take(pending) for pending in self._dirty.values()]
            faults = await self._append([(run.id, index, entry) for run, index, entry in batch])
            for run, _, entry in batch:
                pending = self._pending[run.id]
                pending.failed = faults.get(run.id)
                if pending.failed:
                    run.cancel("log_unavailable")
                else:
                    run.publish(entry)
                if pending.failed or not pending.text:
                    del self._dirty[run.id]
                    pending.written.set()

    @staticmethod
    def _take(pending: _Pending) -> tuple[Run, int, Entry]:
        pending.index += 1
        entry = Entry(pending.ids, pending.text, pending.exact, pending.logprobs)
        pending.ids, pending.text, pending.logprobs = [], "", []
        return pending.run, pending.index, entry

    async def _append(self, batch: list[tuple[str, int, Entry]]) -> dict[str, StoreError]:
        """Returns what went wrong, by response."""

        async def what_is_missing() -> None:  # a write that failed may have been done all the same
            await self._store.append([(id, index, entry) for id, index, entry in batch if not await self._store.entries(id, index - 1)])

        try:
            await _patiently(lambda: self._store.append(batch), what_is_missing)
        except RefusedError as refused:
            return dict.fromkeys(refused.responses, refused)
        except StoreError as fault:
            return {id: fault for id, _, _ in batch}
        except Exception as fault:  # the writer must outlive whatever one batch does
            log.exception("the log could not be written")
            return {id: StoreError(f"unexpected: {fault}") for id, _, _ in batch}
        return {}


def _logprob(token: TokenLogprob) -> Logprob:
    return Logprob(token.piece, token.logprob, [Logprob(other.piece, other.logprob) for other in token.top])


async def _patiently(write: Write, again: Write) -> None:
    """Try to write; when the store fails, try `again` until it works or PATIENCE_SECONDS have passed. Raises: StoreError"""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        try:
            return await write()
        except RefusedError:
            raise
        except StoreError as fault:
            if asyncio.get_running_loop().time() > deadline:
                raise
            log.warning("the log does not answer, trying again: %s", fault)
            await asyncio.sleep(RETRY_SECONDS)
            write = again
