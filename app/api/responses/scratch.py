"""What `store: false` leaves on a connection: its latest responses, in memory, until it ends.

Owns how much that is, and which response is forgotten when. Knows no wire format and no socket.
(OpenAI guide: WebSocket mode, "How continuation works")
"""

from __future__ import annotations

from app.conversations.run import Run
from app.conversations.service import Shelf
from app.store.memory import MemoryStore

MOST_RESPONSES = 256
MOST_BYTES = 32 << 20  # of records


class Scratch:
    """Keeps the latest response of each lane for as long as it can, and as many of the others as there is room for."""

    def __init__(self, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most_responses = most_responses
        self._most_bytes = most_bytes
        self._store = MemoryStore()
        self._made_on: dict[str, str | None] = {}  # response id -> the lane that made it, oldest first
        self.shelf = Shelf(self._store)

    async def keep(self, run: Run, lane: str | None) -> None:
        """A response that is not stored has ended on `lane`."""
        self._made_on[run.id] = lane
        while len(self._made_on) > self._most_responses or (self._made_on and self._store.size > self._most_bytes):
            await self._forget(self._least_missed())

    async def evict(self, response_id: str, lane: str | None) -> None:
        """A continuation of it on `lane` failed: there it is not to be continued again. Another lane's fork that failed leaves it alone."""
        if response_id in self._made_on and self._made_on[response_id] == lane:
            await self._forget(response_id)

    def _least_missed(self) -> str:
        latest = {lane: id for id, lane in self._made_on.items()}
        return next((id for id, lane in self._made_on.items() if latest[lane] != id), next(iter(self._made_on)))

    async def _forget(self, response_id: str) -> None:
        del self._made_on[response_id]
        if response := await self._store.response(response_id):
            await self._store.delete_response(response)
