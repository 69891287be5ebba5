"""The conversation that a session speaks in, and its items as the client knows them.

Owns that there is none before its first item or response, and how the client calls the items that it brought with ids of its own: those
names live as long as the session. Every operation returns the events that tell of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.api.errors import ApiError
from app.api.items import InputItem, add_said, said_of, wire_items
from app.api.realtime.events import item_event, realtime_item
from app.api.realtime.schema import MAX_ID, ItemCreate, ItemTruncate
from app.api.wire import Wire
from app.conversations.errors import ConflictError, NotFoundError, shown
from app.conversations.threads import Threads
from app.conversations.turn import Said, said_again
from app.store.records import Item

FRONT = "root"  # in place of the id of the item before

Placed = tuple[Item, Wire]  # an item of the ledger, and one of those that it is on the wire


class DefaultConversation:
    def __init__(self, threads: Threads, owner: str, id: str, exists: bool) -> None:
        self._threads = threads
        self._owner = owner
        self.id = id
        self._exists = exists
        self._named: dict[str, str] = {}  # client's id -> wire id
        self._names: dict[str, str] = {}  # and back

    async def create(self, event: ItemCreate) -> list[Wire]:
        """Raises: ApiError, ConversationError, StoreError, as all of these"""
        said: list[Said] = []
        add_said(said, event.item, "item")
        if not said:
            raise ApiError(f"expected an item that is part of a conversation, got {event.item.type}", "item", "unsupported_item")
        before = await self._placed()
        name = self._free_name(event.item.id, before)
        after = event.previous_item_id
        if after is not None:
            after = "" if after == FRONT else self._find(before, after, "previous_item_id")[0].id
        if self._exists:
            added = (await self._threads.add_items(self._owner, self.id, said, after))[0].id
        else:
            created = await self._threads.create(self._owner, {}, said, self.id)
            assert created.leaf
            self._exists, added = True, created.leaf
        placed = await self._placed()
        at = next(at for at, (item, _) in enumerate(placed) if item.id == added)
        wire = placed[at][1]
        if name is not None:
            self._named[name], self._names[wire["id"]] = wire["id"], name
        previous = self._name(placed[at - 1][1]) if at else None
        return [item_event(change, self._shown(wire), previous) for change in ("added", "done")]

    async def delete(self, item_id: str) -> list[Wire]:
        """A reply's text and calls are one item of the ledger, so they go together."""
        placed = await self._placed()
        item, _ = self._find(placed, item_id, "item_id")
        await self._threads.change_item(self._owner, self.id, item.id, None)
        gone = [self._name(wire) for other, wire in placed if other.id == item.id]
        for id in gone:
            self._names.pop(self._named.pop(id, ""), None)
        return [{"type": "conversation.item.deleted", "item_id": id} for id in gone]

    async def retrieve(self, item_id: str) -> list[Wire]:
        _, wire = self._find(await self._placed(), item_id, "item_id")
        return [{"type": "conversation.item.retrieved", "item": self._shown(wire)}]

    async def truncate(self, event: ItemTruncate) -> list[Wire]:
        """Keep the beginning of a reply that was heard: `text_end` characters, or none."""
        if event.content_index != 0:
            raise ApiError(f"expected content_index 0, got {event.content_index}", "content_index")
        if event.audio_end_ms or (event.audio_end_ms is None and event.text_end is None):
            raise ApiError(
                "a reply of text has no audio to be measured in: expected audio_end_ms 0, which leaves nothing of it, or text_end, "
                "the characters to leave",
                "audio_end_ms",
            )
        placed = await self._placed()
        item, wire = self._find(placed, event.item_id, "item_id")
        if item.role != "assistant" or wire["type"] != "message" or sum(other.id == item.id for other, _ in placed) > 1:
            raise ApiError("expected a message of the assistant without calls after it", "item_id", "cannot_truncate")
        text, end = "".join(part["text"] for part in wire["content"]), event.text_end or 0
        if end > len(text):
            raise ApiError(f"expected a text_end of at most {len(text)}, the characters that there are, got {end}", "text_end")
        await self._threads.change_item(self._owner, self.id, item.id, text[:end])
        cut = {"item_id": event.item_id, "content_index": 0, "audio_end_ms": 0}
        return [{"type": "conversation.item.truncated", **cut, **({} if event.text_end is None else {"text_end": end})}]

    async def begin(self) -> bool:
        """See to it that it exists; returns whether it did not."""
        if self._exists:
            return False
        await self._threads.create(self._owner, {}, id=self.id)
        self._exists = True
        return True

    async def undo(self) -> None:
        """What was begun came to nothing."""
        await self._threads.delete(self._owner, self.id)
        self._exists = False

    async def before(self, reply_id: str) -> str | None:
        """The name of what comes before a reply; None: it is the first item."""
        previous = None
        for item, wire in await self._placed():
            if item.id == reply_id:
                break
            previous = self._name(wire)
        return previous

    async def said(self) -> list[Said]:
        """All of it, to be said in another chat; a reply that is being made is not part of it yet."""
        return [said_again(item) for item in await self._items() if item.spoken and item.status != "in_progress"]

    async def input(self, items: Iterable[InputItem], param: str) -> list[Said]:
        """A response's own input, in which items of the conversation may be referred to by their ids."""
        placed = await self._placed()
        given: list[InputItem] = []
        for at, item in enumerate(items):
            if item.type == "item_reference":
                found, wire = self._find(placed, item.id or "", f"{param}.{at}.id")
                if found.status == "in_progress":
                    raise ConflictError(f"item {shown(item.id or '')} is still being made: wait for it or cancel it", f"{param}.{at}.id")
                item = msgspec.convert(wire, InputItem)
            given.append(item)
        return said_of(given, param)

    async def _items(self) -> list[Item]:
        return await self._threads.items(self._owner, self.id) if self._exists else []

    async def _placed(self) -> list[Placed]:
        return [(item, wire) for item in await self._items() for wire in wire_items(item)]

    def _find(self, placed: Iterable[Placed], name: str, param: str) -> Placed:
        for item, wire in placed:
            if wire["id"] == self._named.get(name, name):
                return item, wire
        raise NotFoundError(f"item {shown(name)} does not exist in this conversation", param, "item_not_found")

    def _free_name(self, name: str | None, placed: Iterable[Placed]) -> str | None:
        if name is None:
            return None
        if not 0 < len(name) <= MAX_ID or name == FRONT:
            raise ApiError(f"expected an id of 1 to {MAX_ID} characters that is not {FRONT!r}, got {shown(name)}", "item.id")
        if name in self._named or any(wire["id"] == name for _, wire in placed):
            raise ApiError(f"expected an id that is not taken, got {shown(name)} again", "item.id", "item_already_exists")
        return name

    def _name(self, wire: Wire) -> str:
        id: str = wire["id"]
        return self._names.get(id, id)

    def _shown(self, wire: Wire) -> Wire:
        return realtime_item(wire, self._name(wire))
