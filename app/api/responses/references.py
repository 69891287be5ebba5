"""Items that a request names in place of bringing them: `item_reference`, which some clients send for every reply of theirs.

Owns finding them among the owner's replies. What a person said is not found by its id alone: clients send it as it is.
(OpenAI API reference: Responses, item reference)
"""

from __future__ import annotations

from app.api.errors import ApiError
from app.api.items import InputItem, ledger_id, wire_items
from app.conversations.errors import ConflictError, NotFoundError, shown
from app.conversations.run import Run
from app.conversations.service import Conversations, Shelf
from app.conversations.turn import response_of

MOST_REPLIES = 1024  # that one request may refer to

Input = str | list[InputItem] | None


async def dereferenced(given: Input, owner: str, conversations: Conversations, scratch: Shelf | None = None) -> Input:
    """`given` with the items themselves in place of references. Raises: ApiError, ConversationError, StoreError"""
    if not isinstance(given, list):
        return given
    runs: dict[str, Run] = {}  # by the response's id
    items: list[InputItem] = []
    for at, item in enumerate(given):
        if item.type != "item_reference":
            items.append(item)
            continue
        where = f"input.{at}"
        if item.id is None:
            raise ApiError(f"expected an id in {where}, got an item_reference without one", where)
        response_id = response_of(ledger_id(item.id))
        if response_id not in runs:
            if len(runs) == MOST_REPLIES:
                raise ApiError(f"expected references to at most {MOST_REPLIES} replies, got more", "input")
            runs[response_id] = await _run(response_id, item.id, where, owner, conversations, scratch)
        items.append(_item_of(runs[response_id], item.id, where))
    return items


async def _run(response_id: str, item_id: str, where: str, owner: str, conversations: Conversations, scratch: Shelf | None) -> Run:
    try:
        run = await conversations.attach(owner, response_id, scratch)
    except NotFoundError:
        raise _unknown(item_id, where) from None
    if not run.settled:
        raise ConflictError(f"item {shown(item_id)} is still being made", where, "response_in_progress")
    return run


def _item_of(run: Run, item_id: str, where: str) -> InputItem:
    for wire in [] if run.reply.deleted else wire_items(run.reply):
        if wire["id"] != item_id:
            continue
        if wire["type"] == "function_call":
            return InputItem("function_call", call_id=wire["call_id"], name=wire["name"], arguments=wire["arguments"])
        return InputItem("message", "assistant", "".join(part["text"] for part in wire["content"]))
    raise _unknown(item_id, where)


def _unknown(item_id: str, where: str) -> NotFoundError:
    return NotFoundError(f"item {shown(item_id)} does not exist among your replies", where, "item_not_found")
