"""The ledger's items as OpenAI's protocols show them, and back: messages, function calls and their outputs.

Responses, Conversations and Realtime share these shapes. One ledger item may be several on the wire: a reply's text, then each call in it.
Their ids are made from the item's own, so that the same item is shown the same by any process.
(OpenAI API reference: Responses, input and output items)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from app.api.decoding import MAX_CALL_ID, Content, message_of, shown
from app.api.errors import ApiError
from app.api.telling import Teller, message_item
from app.api.wire import Wire
from app.conversations.calls import is_object, written
from app.conversations.turn import Said
from app.store.records import Item
from engine.json_object import BLANKS
from engine.tool_calls import OPEN, CallBegun, parse

LONGEST_UNSURE = 1 << 16  # characters of arguments that are read for calls of their own


class InputItem(msgspec.Struct):
    """An item as a client sends it. Ids and statuses that clients send back with an earlier reply are not needed."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID)] | None = None
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")] | None = None
    arguments: str | None = None
    output: Content | None = None
    id: str | None = None


def said_of(items: Iterable[InputItem], param: str) -> list[Said]:
    """What a client says, in the ledger's words. A message and the calls after it are one reply. Raises: ApiError"""
    said: list[Said] = []
    for at, item in enumerate(items):
        add_said(said, item, f"{param}.{at}")
    return said


def add_said(said: list[Said], item: InputItem, where: str) -> None:
    """One more item, as `said_of` takes them. Raises: ApiError"""
    match item.type:
        case "message":
            role, text = message_of(item.role, item.content, where)
            said.append(Said(role, text))
        case "function_call":
            if item.call_id is None or item.name is None or item.arguments is None:
                raise ApiError(f"expected call_id, name and arguments in {where}, got a function_call without one of them", where)
            joins = said and said[-1].role == "assistant"
            before = said.pop() if joins else Said("assistant", "")
            said.append(with_call(before, item.call_id, item.name, item.arguments, where))
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise ApiError(f"expected call_id and output in {where}, got a function_call_output without one of them", where)
            said.append(Said("tool", message_of("user", item.output, where)[1], call_id=item.call_id))
        case "reasoning":  # other models' thoughts, which clients send back with the rest
            pass
        case _:
            raise ApiError(
                f"expected items of type message, function_call or function_call_output, got {shown(item.type)} in {where}",
                where,
                "unsupported_item",
            )


def with_call(reply: Said, id: str, name: str, arguments: str, where: str) -> Said:
    """A reply with one more call in it. Raises: ApiError for arguments that are neither a JSON object nor how one begins

    A call that was broken off, as by the end of its tokens, is kept as it was said: what brought it is to be told again.
    """
    call = written(name, arguments)
    if not (is_object(arguments) or _is_one_call(call, arguments)):
        raise ApiError(f"expected arguments to be a JSON object, got {shown(arguments)} in {where}", f"{where}.arguments")
    return Said("assistant", "\n".join(filter(None, (reply.text, call))), (*reply.call_ids, id))


def _is_one_call(call: str, arguments: str) -> bool:
    """The text is that of a call whose arguments have begun, and of no other one."""
    if OPEN in arguments and len(arguments) > LONGEST_UNSURE:
        return False
    return arguments.lstrip(BLANKS).startswith("{") and (
        OPEN not in arguments or sum(isinstance(piece, CallBegun) for piece in parse(call)) == 1
    )


def wire_items(item: Item) -> list[Wire]:
    """A ledger item as the protocol's items, in order."""
    if item.role == "tool":
        answer = {"call_id": item.call_id, "output": item.text, "status": "completed"}
        return [{"id": item.id, "type": "function_call_output", **answer}]
    if item.role != "assistant" or item.status == "in_progress":
        return [message_item(item.id, item.role, item.status, item.text)]
    teller = Teller(item)
    teller.tell(item.text)
    teller.end()
    return teller.items


def ledger_id(id: str) -> str:
    """The ledger's item that one of the protocol's is of."""
    kind, _, rest = id.partition("_")
    return f"msg_{rest.partition('_')[0]}" if kind in ("msg", "fc") else id
