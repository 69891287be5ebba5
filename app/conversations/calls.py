"""The calls in a conversation: how each is named and written, and that what answers one answers one that was made.

Pure. Knows the ledger's items; the markup of calls is `engine.tool_calls`'.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.conversations.errors import ConversationError, shown
from app.store.records import Item
from engine.tool_calls import CallArguments, CallBegun, Said, call_text, parse


def call_id(reply: Item, index: int) -> str:
    """The name of a reply's call: the one its client brought, or one that is made from the reply's own."""
    return reply.call_ids[index] if index < len(reply.call_ids) else f"call_{reply.id.partition('_')[2]}_{index}"


def call_ids(reply: Item) -> list[str]:
    """The names of a reply's calls, in order, those that were broken off among them."""
    if reply.call_ids or not reply.calls:
        return list(reply.call_ids)
    return [call_id(reply, piece.index) for piece in parse(reply.text) if isinstance(piece, CallBegun)]


def written(name: str, arguments: str) -> str:
    """A call as text, of which a client knows the name and the arguments. Those that were broken off are left so."""
    return call_text(name, arguments) if is_object(arguments) else call_text(name, "\0").partition("\0")[0] + arguments


class _AnyObject(msgspec.Struct):
    """Of which no field is looked at."""


def is_object(arguments: str) -> bool:
    if not arguments.strip():  # as those write it who have no arguments
        return True
    try:
        msgspec.json.decode(arguments, type=_AnyObject)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def as_told(reply: Item) -> str:
    """A reply as it is put together by who was told what it says, and beside that what it calls: not which blanks are between the two."""
    if not reply.calls or reply.call_ids:  # one that a client brought is put together like this
        return reply.text
    said: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for piece in parse(reply.text):
        match piece:
            case Said(text):
                said.append(text)
            case CallBegun(name=name):
                calls.append((name, []))
            case CallArguments(index, text):
                calls[index][1].append(text)
    return "\n".join([*said, *(written(name, "".join(arguments)) for name, arguments in calls)])


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
