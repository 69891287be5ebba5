"""OpenAI Conversations over HTTP, and Hocket's listing of them.

`GET /v1/conversations` and the fields `title`, `updated_at` and `running` are extensions; the rest is the public protocol.
(OpenAI API reference: Conversations)
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.decoding import Metadata, body_of, decode, whole_number
from app.api.errors import ApiError
from app.api.responses.events import message_item
from app.conversations.service import Conversations
from app.refusal import json_response
from app.security import owner_of
from app.store.records import Conversation

MOST = 100


class ConversationCreate(msgspec.Struct, forbid_unknown_fields=True):
    metadata: Metadata | None = None
    items: list[Any] | None = None


class ConversationUpdate(msgspec.Struct, forbid_unknown_fields=True):
    metadata: Metadata


class ConversationsApi:
    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self.routes = [
            Route("/v1/conversations", self._create, methods=["POST"]),
            Route("/v1/conversations", self._list, methods=["GET"]),
            Route("/v1/conversations/{id}", self._one, methods=["GET"]),
            Route("/v1/conversations/{id}", self._update, methods=["POST"]),
            Route("/v1/conversations/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/conversations/{id}/items", self._items, methods=["GET"]),
        ]

    async def _create(self, request: Request) -> Response:
        asked = decode(await body_of(request) or b"{}", ConversationCreate)
        if asked.items:
            raise ApiError("items is supported only as an empty list, got something else", "items", "unsupported_value")
        return json_response(self._object(await self._conversations.create(owner_of(request.scope), asked.metadata or {})))

    async def _list(self, request: Request) -> Response:
        limit = _limit(request, 20)
        found = await self._conversations.listed(owner_of(request.scope), limit + 1, request.query_params.get("after"))
        return json_response(_page([self._object(conversation) for conversation in found], limit))

    async def _one(self, request: Request) -> Response:
        return json_response(self._object(await self._conversations.conversation(owner_of(request.scope), request.path_params["id"])))

    async def _update(self, request: Request) -> Response:
        asked = decode(await body_of(request), ConversationUpdate)
        return json_response(
            self._object(await self._conversations.update(owner_of(request.scope), request.path_params["id"], asked.metadata))
        )

    async def _delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._conversations.delete(owner_of(request.scope), id)
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def _items(self, request: Request) -> Response:
        limit, query = _limit(request, 20), request.query_params
        order, after = query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(f"expected order asc or desc, got {order[:80]!r}", "order")
        items = await self._conversations.items(owner_of(request.scope), request.path_params["id"])
        if order == "desc":
            items.reverse()
        ids = [item.id for item in items]
        if after is not None and after not in ids:
            raise ApiError(f"expected after to be an item of this conversation, got {after[:80]!r}", "after")
        start = ids.index(after) + 1 if after is not None else 0
        chosen = items[start : start + limit + 1]
        return json_response(_page([message_item(item) | {"response_id": item.response} for item in chosen], limit))

    def _object(self, conversation: Conversation) -> dict[str, Any]:
        return {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created_at),
            "updated_at": int(conversation.updated_at),
            "title": conversation.title,
            "metadata": conversation.metadata,
            "running": [run.id for run in self._conversations.running(conversation.id)],
        }


def _limit(request: Request, default: int) -> int:
    limit = whole_number(request.query_params, "limit", default, MOST)
    if limit == 0:
        raise ApiError(f"expected a limit of 1 to {MOST}, got 0", "limit")
    return limit


def _page(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list of which one more than `limit` was fetched, to see whether there is more."""
    data = found[:limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(found) > limit, **ends}
