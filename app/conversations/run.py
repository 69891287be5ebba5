"""A response in the making, or finished: what those who follow it see.

Owns the visible part of a run's log in memory and the waking of its followers. An entry is published only after the journal has
written it, so nobody sees text that a crash could take back. Knows neither who follows nor how far they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from app.store.records import Entry, Item, Response
from engine.batcher import Generation
from engine.core import TokenLogprob


class Run:
    def __init__(self, response: Response, reply: Item, entries: Sequence[Entry] = ()) -> None:
        self.response = response
        self.reply = reply  # its text and tokens are complete once `finished`
        self.generation: Generation | None = None  # once the engine works on it
        self.written = True  # its end, once it has one, is in the log
        self.stopped_because: str | None = None  # why it was cancelled, if it was
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # of each token of the prompt, if they were asked for
        self._entries = list(entries)
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def finished(self) -> bool:
        return self.response.status != "in_progress"

    @property
    def settled(self) -> bool:
        """Finished, and the log knows it: what follows can be built on what the log holds."""
        return self.finished and self.written

    @property
    def logged(self) -> Sequence[Entry]:
        """The visible entries so far."""
        return self._entries

    def begin(self, generation: Generation) -> None:
        """The engine works on it from now on."""
        self.generation = generation
        if self.stopped_because:  # while it was being accepted
            generation.cancel()

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask for the end; followers still get what was generated until then, and the terminal state."""
        if not self.finished and not self.stopped_because:
            self.stopped_because = reason
            if self.generation:
                self.generation.cancel()

    def publish(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._wake()

    def finish(self, response: Response, reply: Item) -> None:
        self.response, self.reply = response, reply
        self._wake()

    async def entries(self, after: int = 0) -> AsyncIterator[tuple[int, Entry]]:
        """(index, entry) for each visible entry of index > after, live until the run has finished. Indices start at 1."""
        at = after
        while True:
            changed = self._changed
            while at < len(self._entries):
                at += 1
                yield at, self._entries[at - 1]
            if self.finished and at >= len(self._entries):
                return
            await changed.wait()

    async def done(self) -> Response:
        while not self.finished:
            await self._changed.wait()
        return self.response

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
