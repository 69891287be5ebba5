"""Whose turn it is, where there are few places and many who want one.

Owns the order: owners take turns, however many of one's are waiting. Knows nothing of what is done in a place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()  # by owner, the next first

    def waiting(self, owner: bytes) -> int:
        """How many of an owner's."""
        return len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def place(self, owner: bytes) -> AsyncIterator[None]:
        """Wait for a place, and have it."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: bytes) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has a place already, that nobody will give back
                self._pass_on()
            elif turn in (turns := self._waiting.get(owner, deque())):  # or it would cost its owner a turn
                turns.remove(turn)
                if not turns:
                    del self._waiting[owner]
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
