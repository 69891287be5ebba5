"""The calls in a conversation: how each is named, and that what answers one answers one that was made.

Pure. Knows the ledger's items; the markup of calls is `engine.tool_calls`'.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.conversations.errors import ConversationError, shown
from app.store.records import Item
from engine.tool_calls import CallBegun, parse


def call_id(reply: Item, index: int) -> str:
    """The name of a reply's call: the one its client brought, or one that is made from the reply's own."""
    return reply.call_ids[index] if index < len(reply.call_ids) else f"call_{reply.id.partition('_')[2]}_{index}"


def call_ids(reply: Item) -> list[str]:
    """The names of a reply's calls, in order, those that were broken off among them."""
    if reply.call_ids or not reply.calls:
        return list(reply.call_ids)
    return [call_id(reply, piece.index) for piece in parse(reply.text) if isinstance(piece, CallBegun)]


def check_answers(path: Sequence[Item], new: Sequence[Item]) -> None:
    """Each tool item among `new` answers a call that was made before it, and no two the same. Raises: ConversationError

    One that was broken off can be answered too: clients then say what was wrong with it.
    """
    if not any(item.role == "tool" for item in new):
        return
    open_calls: set[str] = set()
    for at, item in enumerate([*path, *new], -len(path)):
        if item.role == "assistant" and not item.deleted:
            open_calls.update(call_ids(item))
        elif item.role == "tool" and item.call_id is not None and not item.deleted:
            if item.call_id not in open_calls and at >= 0:
                raise ConversationError(f"expected the call_id of a call that waits for its output, got {shown(item.call_id)}", "input")
            open_calls.discard(item.call_id)
