"""A conversation's tree of items, and the chat that one path through it spells.

Owns the way from stored items to the engine's messages. Each reply keeps the exact token ids it was run and generated as; they are
used only under the fingerprint (tokenizer and template) they were made with, and the text is rendered anew under any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.conversations.errors import NotFoundError, shown
from app.store.records import Item
from engine.core import Message


def path(items: Mapping[str, Item], leaf: str | None) -> list[Item]:
    """The items from the root to `leaf`, oldest first. Raises: NotFoundError when a parent is missing."""
    walked: list[Item] = []
    while leaf is not None:
        item = items.get(leaf)
        if item is None:
            raise NotFoundError(f"item {shown(leaf)} of this conversation does not exist", "previous_response_id")
        walked.append(item)
        leaf = item.parent
    return walked[::-1]


def led_by(item: Item, items: Mapping[str, Item]) -> list[Item]:
    """The replies whose `lead_ids` may have what the item says: the next ones after it that have tokens, in every branch."""
    found = []
    for reply in items.values():
        at = reply.parent if reply.lead_ids else None
        while at is not None and at in items and at != item.id and (items[at].ids is None or items[at].fingerprint != reply.fingerprint):
            at = items[at].parent
        if at == item.id:
            found.append(reply)
    return found


def messages(instructions: str | None, items: Sequence[Item], fingerprint: str) -> list[Message]:
    """The chat to run: instructions in front, then those of the items that are messages."""
    front = [Message("system", instructions)] if instructions else []
    return front + [_message(item, fingerprint) for item in items if item.spoken]


def _message(item: Item, fingerprint: str) -> Message:
    if item.role != "assistant" or item.ids is None or item.fingerprint != fingerprint:
        return Message(item.role, item.text)
    return Message(item.role, item.text, tuple(item.lead_ids), item.lead_digest, tuple(item.ids))
