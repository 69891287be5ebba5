"""The durable log behind one protocol class.

`Store` says what a log must do; `valkey.py` does it on Redis or Valkey, `memory.py` in this process alone, `embedded.py`
runs the bundled server. A store knows records, not protocols, engines or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.store.records import Conversation, Entry, Item, Response

IDEMPOTENCY_SECONDS = 24 * 3600  # how long a client's message id names the response it was first sent for


class StoreError(Exception):
    """The log could not be read or written. What was acknowledged before is unharmed.

    After a failed write nothing says whether it happened: a connection can be lost between the write and its answer.
    """


class RefusedError(StoreError):
    """Log entries that were refused: their index was not above the last one, or their response is not (or no longer) there.

    The other responses' entries of the same batch are written.
    """

    def __init__(self, message: str, responses: frozenset[str]) -> None:
        super().__init__(message)
        self.responses = responses  # ids of the responses that had an entry refused


class GoneError(StoreError):
    """A turn was not written, since what it follows is not there any more: it was deleted meanwhile."""


class Store(Protocol):
    """Every write has happened (as durably as the backend can) when its coroutine returns; every method raises StoreError."""

    async def create_conversation(self, conversation: Conversation, items: Sequence[Item] = ()) -> None:
        """Write a conversation with the items it begins with, in one transaction."""

    async def conversation(self, id: str) -> Conversation | None: ...

    async def update_conversation(self, conversation: Conversation) -> None:
        """Replace an existing conversation's record (title, metadata, leaf, updated_at). A deleted one stays deleted."""

    async def conversations(self, owner: str, limit: int, after: str | None = None) -> list[Conversation]:
        """The owner's listed conversations, the last updated first; `after` names the last one of the page before.

        An `after` that is not in the list gives an empty page.
        """
        ...

    async def delete_conversation(self, conversation: Conversation) -> None:
        """Remove it with everything of it: items, responses, logs, idempotency keys."""

    async def items(self, conversation: str) -> dict[str, Item]:
        """Every item of a conversation, by id."""
        ...

    async def put_items(self, conversation: Conversation, items: Sequence[Item], unsaid: Sequence[str] = ()) -> None:
        """Write items of an existing conversation, new or changed, and its record, in one transaction. A deleted one stays deleted.

        `unsaid`: responses whose log entries are forgotten, since their replies are no longer what they were.
        """

    async def accept(
        self, conversation: Conversation, response: Response, items: Sequence[Item], existing: bool = False
    ) -> Response | None:
        """Write a turn in one transaction: conversation (created or updated), response (now open), its input items, and its reply as begun.

        `existing`: the turn goes on with a conversation of this store, which must still be there, and so must the response before it.

        When `response.client_message_id` is set and the same owner's earlier response (younger than 24 h) carries the same one,
        nothing is written and that earlier response is returned.
        Raises: GoneError
        """
        ...

    async def append(self, batch: Sequence[tuple[str, int, Entry]]) -> None:
        """Append (response id, index, entry) to the responses' logs, pipelined. Indices of one response count up from 1.

        Raises: RefusedError naming the responses whose entries the log refused; the others' are written.
        """

    async def entries(self, response: str, after: int = 0) -> list[Entry]:
        """A response's log entries of index > after, in order."""
        ...

    async def repeated(self, owner: str, client_message_id: str) -> Response | None:
        """The owner's response (younger than 24 h) that carries this client message id."""
        ...

    async def finish(self, response: Response, reply: Item) -> None:
        """Write a response's end in one transaction: its record (now closed) and its reply.

        Nothing is written when the response is no longer there: its conversation was deleted while it ran.
        """

    async def response(self, id: str) -> Response | None: ...

    async def delete_response(self, response: Response) -> None:
        """Remove its record, log and idempotency key. The items stay; a conversation that is not listed goes with its last one."""

    async def expired(self, now: float, limit: int) -> list[Response]:
        """Responses that were to be kept until before `now`, those of the earliest time first."""
        ...

    async def open_responses(self) -> list[Response]:
        """Responses that were accepted and not finished, oldest first: what a dead process left behind."""
        ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...
