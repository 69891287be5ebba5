"""The durable log behind one protocol class.

`Store` says what a log must do; `valkey.py` does it on Redis or Valkey, `memory.py` in this process alone, `embedded.py`
runs the bundled server. A store knows records, not protocols, engines or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.store.records import Conversation, Entry, Item, Response


class StoreError(Exception):
    """The log could not be read or written. What was acknowledged before is unharmed."""


class Store(Protocol):
    """Every write has happened (as durably as the backend can) when its coroutine returns; every method raises StoreError."""

    async def create_conversation(self, conversation: Conversation) -> None: ...

    async def conversation(self, id: str) -> Conversation | None: ...

    async def update_conversation(self, conversation: Conversation) -> None:
        """Replace an existing conversation's record (title, metadata, leaf, updated_at)."""

    async def conversations(self, owner: str, limit: int, after: str | None = None) -> list[Conversation]:
        """The owner's listed conversations, the last updated first; `after` names the last one of the page before."""
        ...

    async def delete_conversation(self, conversation: Conversation) -> None:
        """Remove it with everything of it: items, responses, logs, idempotency keys."""

    async def items(self, conversation: str) -> dict[str, Item]:
        """Every item of a conversation, by id."""
        ...

    async def accept(self, conversation: Conversation, response: Response, items: Sequence[Item]) -> Response | None:
        """Write a turn in one transaction: conversation (created or updated), response (now open) and its input items.

        When `response.client_message_id` is set and the same owner's earlier response (younger than 24 h) carries the same one,
        nothing is written and that earlier response is returned.
        """
        ...

    async def append(self, batch: Sequence[tuple[str, int, Entry]]) -> None:
        """Append (response id, index, entry) to the responses' logs, pipelined. Indices of one response count up from 1."""

    async def entries(self, response: str, after: int = 0) -> list[Entry]:
        """A response's log entries of index > after, in order."""
        ...

    async def finish(self, response: Response, reply: Item, conversation: Conversation) -> None:
        """Write a response's end in one transaction: its record (now closed), its reply, and the conversation."""

    async def response(self, id: str) -> Response | None: ...

    async def open_responses(self) -> list[Response]:
        """Responses that were accepted and not finished, oldest first: what a dead process left behind."""
        ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...
