"""OpenAI Conversations over HTTP with their items, and Hocket's listing of them.

`GET /v1/conversations` and the fields `title`, `updated_at`, `running` and an item's `response_id` are extensions; the rest is the public
protocol. (OpenAI API reference: Conversations)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.choices import renaming
from app.api.decoding import Metadata, body_of, decode, whole_number
from app.api.errors import ApiError
from app.api.items import InputItem, ledger_id, said_of, wire_items
from app.api.sizes import bounded
from app.api.wire import Wire
from app.conversations.errors import NotFoundError, shown
from app.conversations.service import Conversations
from app.conversations.turn import Said
from app.refusal import json_response
from app.security import owner_of
from app.store.records import Conversation, Item

MOST = 100
PARAMS = {"input": "items"}  # the domain's names, where this protocol has others

Items = Annotated[list[InputItem], bounded(None, max_length=MOST)]


class ConversationCreate(msgspec.Struct, forbid_unknown_fields=True):
    metadata: Metadata | None = None
    items: Items | None = None


class ConversationUpdate(msgspec.Struct, forbid_unknown_fields=True):
    metadata: Metadata


class ItemsCreate(msgspec.Struct, forbid_unknown_fields=True):
    items: Annotated[list[InputItem], bounded(None, min_length=1, max_length=MOST)]


class ConversationsApi:
    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._threads = conversations.threads
        self.routes = [
            Route("/v1/conversations", self._create, methods=["POST"]),
            Route("/v1/conversations", self._list, methods=["GET"]),
            Route("/v1/conversations/{id}", self._one, methods=["GET"]),
            Route("/v1/conversations/{id}", self._update, methods=["POST"]),
            Route("/v1/conversations/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/conversations/{id}/items", self._items, methods=["GET"]),
            Route("/v1/conversations/{id}/items", self._add_items, methods=["POST"]),
            Route("/v1/conversations/{id}/items/{item}", self._item, methods=["GET"]),
            Route("/v1/conversations/{id}/items/{item}", self._delete_item, methods=["DELETE"]),
        ]

    async def _create(self, request: Request) -> Response:
        asked = decode(await body_of(request) or b"{}", ConversationCreate)
        said = _said(asked.items or ())
        with renaming(PARAMS):
            return json_response(self._object(await self._threads.create(owner_of(request.scope), asked.metadata or {}, said)))

    async def _list(self, request: Request) -> Response:
        limit = page_limit(request)
        found = await self._threads.listed(owner_of(request.scope), limit + 1, request.query_params.get("after"))
        return json_response(_page([self._object(conversation) for conversation in found], limit))

    async def _one(self, request: Request) -> Response:
        return json_response(self._object(await self._threads.conversation(owner_of(request.scope), request.path_params["id"])))

    async def _update(self, request: Request) -> Response:
        asked = decode(await body_of(request), ConversationUpdate)
        changed = await self._threads.update(owner_of(request.scope), request.path_params["id"], asked.metadata)
        return json_response(self._object(changed))

    async def _delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._threads.delete(owner_of(request.scope), id)
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def _items(self, request: Request) -> Response:
        items = await self._threads.items(owner_of(request.scope), request.path_params["id"])
        return json_response(item_page(request, items))

    async def _add_items(self, request: Request) -> Response:
        asked = decode(await body_of(request), ItemsCreate)
        with renaming(PARAMS):
            added = await self._threads.add_items(owner_of(request.scope), request.path_params["id"], _said(asked.items))
        shown_items = _shown(added)
        return json_response(_page(shown_items, len(shown_items)))

    async def _item(self, request: Request) -> Response:
        id = request.path_params["item"]
        items = await self._threads.items(owner_of(request.scope), request.path_params["id"])
        for item in _shown(item for item in items if item.id == ledger_id(id)):
            if item["id"] == id:
                return json_response(item)
        raise NotFoundError(f"item {shown(id)} does not exist in this conversation", "item_id", "item_not_found")

    async def _delete_item(self, request: Request) -> Response:
        """A reply's text and calls are one item of the ledger, so they go together."""
        owner, id = owner_of(request.scope), request.path_params["id"]
        await self._threads.change_item(owner, id, ledger_id(request.path_params["item"]), None)
        return json_response(self._object(await self._threads.conversation(owner, id)))

    def _object(self, conversation: Conversation) -> Wire:
        return {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created_at),
            "updated_at": int(conversation.updated_at),
            "title": conversation.title,
            "metadata": conversation.metadata,
            "running": [run.id for run in self._conversations.running(conversation.id)],
        }


def _said(items: Iterable[InputItem]) -> list[Said]:
    said = said_of(items, "items")
    if not all(one.text for one in said if one.role == "user"):
        raise ApiError("expected messages of a user to have text, got an empty one", "items")
    return said


def page_limit(request: Request) -> int:
    limit = whole_number(request.query_params, "limit", 20, MOST)
    if limit == 0:
        raise ApiError(f"expected a limit of 1 to {MOST}, got 0", "limit")
    return limit


def item_page(request: Request, items: Iterable[Item]) -> Wire:
    """The page of `items`, oldest first, that a request's `limit`, `order` and `after` ask for. Raises: ApiError"""
    limit, query = page_limit(request), request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(f"expected order asc or desc, got {order[:80]!r}", "order")
    found = _shown(items)
    if order == "desc":
        found.reverse()
    ids = [item["id"] for item in found]
    if after is not None and after not in ids:
        raise ApiError(f"expected after to be one of these items, got {after[:80]!r}", "after")
    start = ids.index(after) + 1 if after is not None else 0
    return _page(found[start : start + limit + 1], limit)


def _shown(items: Iterable[Item]) -> list[Wire]:
    return [wire | {"response_id": item.response or None} for item in items for wire in wire_items(item)]


def _page(found: list[Wire], limit: int) -> Wire:
    """A page of a list of which one more than `limit` was fetched, to see whether there is more."""
    data = found[:limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(found) > limit, **ends}
