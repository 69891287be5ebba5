"""Responses over HTTP: create and retrieve (JSON, or SSE, from a sequence number on), cancel, delete, input items and their tokens.

A create whose client disconnects is cancelled, unless someone may come back for it: it asked for `background`, or carries an
idempotency key. A retrieve that disconnects stops nothing.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from app.api import sse
from app.api.choices import renaming
from app.api.conversations import item_page
from app.api.decoding import body_of, decode, shown, whole_number
from app.api.disconnect import begun, run_out, until_gone
from app.api.errors import ApiError
from app.api.models import Models
from app.api.responses.events import follow, response_object
from app.api.responses.references import dereferenced
from app.api.responses.schema import InputTokenCount, ResponseCreate, read_create
from app.api.responses.socket import ResponsesSocket
from app.conversations.service import Conversations
from app.conversations.turn import Turn
from app.refusal import json_response
from app.security import chosen_subprotocol, owner_of


class Responses:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models
        self.routes = [
            WebSocketRoute("/v1/responses", self._socket),
            Route("/v1/responses", self._create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self._count, methods=["POST"]),
            Route("/v1/responses/{id}", self._retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self._cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self._input_items, methods=["GET"]),
        ]

    async def _socket(self, socket: WebSocket) -> None:
        await socket.accept(subprotocol=chosen_subprotocol(socket.scope))
        await ResponsesSocket(socket, owner_of(socket.scope), self._conversations, self._models).serve()

    async def _create(self, request: Request) -> Response:
        asked = read_create(await body_of(request))
        turn = await self._turn(asked, request)
        if asked.background and not turn.stored:
            raise ApiError("expected store: true for a background response, got store: false", "store")
        with renaming(asked.params):
            run = await begun(self._conversations.submit(turn), request, cancel=not turn.stored)
        lasting = bool(asked.background or turn.client_message_id)
        if asked.stream:
            return sse.stream(until_gone(follow(run), run, cancel=not lasting), named=True)
        if not asked.background:
            await run_out(run, request, cancel=not lasting)
        return json_response(response_object(run))

    async def _count(self, request: Request) -> Response:
        asked = decode(await body_of(request), InputTokenCount)
        turn = await self._turn(asked, request)
        with renaming(asked.params):
            return json_response({"object": "response.input_tokens", "input_tokens": await self._conversations.count(turn)})

    async def _turn(self, asked: ResponseCreate, request: Request) -> Turn:
        if asked.stream_id is not None:
            raise ApiError("expected stream_id on a WebSocket only, where there are lanes, got it over HTTP", "stream_id")
        owner = owner_of(request.scope)
        asked.input = await dereferenced(asked.input, owner, self._conversations)
        return asked.turn(owner, self._models.served(asked.model), request.headers.get("idempotency-key"))

    async def _retrieve(self, request: Request) -> Response:
        query = request.query_params
        run = await self._conversations.attach(owner_of(request.scope), request.path_params["id"])
        match query.get("stream", "false").lower():
            case "false" | "0":
                return json_response(response_object(run))
            case "true" | "1":
                pass
            case other:
                raise ApiError(f"expected stream to be true or false, got {shown(other)}", "stream")
        return sse.stream(follow(run, whole_number(query, "starting_after", -1)), named=True)

    async def _delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._conversations.delete_response(owner_of(request.scope), id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def _input_items(self, request: Request) -> Response:
        """What the request itself brought in; what it follows is in the responses before it."""
        items = await self._conversations.input_items(owner_of(request.scope), request.path_params["id"])
        return json_response(item_page(request, items))

    async def _cancel(self, request: Request) -> Response:
        run = await self._conversations.cancel(owner_of(request.scope), request.path_params["id"])
        await run.done()
        return json_response(response_object(run))
