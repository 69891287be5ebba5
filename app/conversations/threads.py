"""Named conversations: the ones that are listed, looked up, changed and deleted by their id.

Owns who may see one, and that one change of a conversation is made at a time. Knows no runs but to end those of a conversation that is
deleted, and no wire format. Owners never learn of each other: what is another's does not exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from msgspec.structs import replace

from app.conversations import calls, ledger
from app.conversations.errors import ConflictError, NotFoundError, shown
from app.conversations.run import Run
from app.conversations.turn import Said, new_conversation, new_items, title_of
from app.store import Store
from app.store.records import Conversation, Item


class Threads:
    def __init__(self, store: Store, running: Callable[[str], list[Run]]) -> None:
        """`running`: the runs of a conversation that have not ended."""
        self._store = store
        self._running = running
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # conversations being written to

    async def create(self, owner: str, metadata: dict[str, str], said: Sequence[Said] = (), id: str | None = None) -> Conversation:
        """`id`: a new one, if it has been told already. Raises: ConversationError, StoreError"""
        conversation = new_conversation(owner, listed=True, metadata=metadata, id=id)
        items = new_items(said, None)
        calls.check_answers([], items)
        if items:
            conversation = replace(conversation, leaf=items[-1].id, title=title_of(said))
        await self._store.create_conversation(conversation, items)
        return conversation

    async def add_items(self, owner: str, id: str, said: Sequence[Said], after: str | None = None) -> list[Item]:
        """Add items at the end of a conversation, or `after` one of its items ("": in front). Returns them.

        Raises: ConversationError, StoreError
        """
        async with self.alone_with(owner, id):
            conversation = await self.conversation(owner, id)
            path = ledger.path(await self._store.items(id), conversation.leaf)
            at = len(path) if after is None else _place_of(after, path) + 1 if after else 0
            items = new_items(said, path[at - 1].id if at else None)
            calls.check_answers(path[:at], items)
            written = list(items)
            if at < len(path):
                if path[at].status == "in_progress":
                    raise ConflictError("expected items to be added after the reply that is being made, or before what it answers", "after")
                written.append(replace(path[at], parent=items[-1].id))
            else:
                conversation = replace(conversation, leaf=items[-1].id)
            conversation = replace(conversation, updated_at=time.time(), title=conversation.title or title_of(said))
            await self._store.put_items(conversation, written)
            return items

    async def change_item(self, owner: str, id: str, item_id: str, text: str | None) -> Item:
        """Cut an item's text down to `text`, a beginning of it; None: delete it. Raises: ConversationError, StoreError

        What is cut is gone from the log: also from the tokens that later replies were read after, and from the title. What the cache
        and `segments.py` know of it is pushed out by what comes after.
        """
        async with self.alone_with(owner, id):
            conversation = await self.conversation(owner, id)
            items = await self._store.items(id)
            path = ledger.path(items, conversation.leaf)
            item = path[_place_of(item_id, path)]
            after = ledger.led_by(item, items)
            if any(one.status == "in_progress" for one in (item, *after)):
                raise ConflictError(f"item {shown(item_id)} is in use by a reply that is being made: wait for it or cancel it", "item_id")
            call_ids = item.call_ids if text else []
            changed = replace(item, text=text or "", ids=None, lead_ids=[], call_ids=call_ids, deleted=text is None)
            if conversation.title == title_of([Said(item.role, item.text)]):
                rest = [Said(one.role, one.text) for one in path if one is not item and one.spoken]
                conversation = replace(conversation, title=title_of(rest))
            unread = [replace(one, lead_ids=[], lead_digest=b"") for one in after]
            unsaid = [item.response] if item.role == "assistant" and item.response else []
            await self._store.put_items(replace(conversation, updated_at=time.time()), [changed, *unread], unsaid)
            return changed

    async def conversation(self, owner: str, id: str) -> Conversation:
        """Raises: NotFoundError, StoreError"""
        conversation = await self._store.conversation(id)
        if conversation is None or conversation.owner != owner or not conversation.listed:
            raise unknown_conversation(id)
        return conversation

    async def update(self, owner: str, id: str, metadata: dict[str, str]) -> Conversation:
        """Replace a conversation's metadata. Raises: NotFoundError, StoreError"""
        async with self.alone_with(owner, id):
            conversation = replace(await self.conversation(owner, id), metadata=metadata)
            await self._store.update_conversation(conversation)
            return conversation

    async def listed(self, owner: str, limit: int, after: str | None = None) -> list[Conversation]:
        """The last updated first. Raises: NotFoundError when `after` is not one of them, StoreError"""
        if after is not None:
            await self.conversation(owner, after)
        return await self._store.conversations(owner, limit, after)

    async def items(self, owner: str, id: str) -> list[Item]:
        """The conversation's current path, oldest first; a reply in the making without its text. Raises: NotFoundError, StoreError"""
        conversation = await self.conversation(owner, id)
        return [item for item in ledger.path(await self._store.items(id), conversation.leaf) if not item.deleted]

    async def delete(self, owner: str, id: str) -> None:
        """End its runs and remove everything of it. Raises: NotFoundError, StoreError"""
        async with self.alone_with(owner, id):
            conversation = await self.conversation(owner, id)
            for run in self._running(id):
                run.cancel()
                await run.done()
            await self._store.delete_conversation(conversation)

    @asynccontextmanager
    async def alone_with(self, owner: str, conversation: str | None) -> AsyncIterator[None]:
        """Nobody else adds a turn to a listed conversation, changes or deletes it meanwhile. Raises: NotFoundError, StoreError"""
        if conversation is None:
            yield
            return
        await self.conversation(owner, conversation)  # before anyone else's could be waited for
        async with self._changing.setdefault(conversation, asyncio.Lock()):
            yield


def _place_of(item_id: str, path: Sequence[Item]) -> int:
    for at, item in enumerate(path):
        if item.id == item_id and not item.deleted:
            return at
    raise NotFoundError(f"item {shown(item_id)} does not exist in this conversation", "item_id", "item_not_found")


def unknown_conversation(id: str) -> NotFoundError:
    return NotFoundError(f"conversation {shown(id)} does not exist", "conversation", "conversation_not_found")
