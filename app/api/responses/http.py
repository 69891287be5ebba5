"""Responses over HTTP: create (JSON or SSE), retrieve (JSON, or SSE from a sequence number on), cancel.

A create whose client disconnects is cancelled, unless someone may come back for it: it asked for `background`, or carries an
idempotency key. A retrieve that disconnects stops nothing.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from app.api import sse
from app.api.decoding import body_of, whole_number
from app.api.disconnect import run_out, until_gone
from app.api.errors import ApiError
from app.api.models import Models
from app.api.responses.events import follow, response_object
from app.api.responses.schema import read_create
from app.api.responses.socket import ResponsesSocket
from app.conversations.service import Conversations
from app.refusal import json_response
from app.security import chosen_subprotocol, owner_of


class Responses:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models
        self.routes = [
            WebSocketRoute("/v1/responses", self._socket),
            Route("/v1/responses", self._create, methods=["POST"]),
            Route("/v1/responses/{id}", self._retrieve, methods=["GET"]),
            Route("/v1/responses/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _socket(self, socket: WebSocket) -> None:
        await socket.accept(subprotocol=chosen_subprotocol(socket.scope))
        await ResponsesSocket(socket, owner_of(socket.scope), self._conversations, self._models).serve()

    async def _create(self, request: Request) -> Response:
        asked = read_create(await body_of(request))
        turn = asked.turn(owner_of(request.scope), self._models.served(asked.model), request.headers.get("idempotency-key"))
        if asked.background and not turn.stored:
            raise ApiError("expected store: true for a background response, got store: false", "store")
        run = await self._conversations.submit(turn)
        lasting = bool(asked.background or turn.client_message_id)
        if asked.stream:
            return sse.stream(until_gone(follow(run), run, cancel=not lasting), named=True)
        if not asked.background:
            await run_out(run, request, cancel=not lasting)
        return json_response(response_object(run))

    async def _retrieve(self, request: Request) -> Response:
        query = request.query_params
        run = await self._conversations.attach(owner_of(request.scope), request.path_params["id"])
        if query.get("stream", "false").lower() not in ("true", "1"):
            return json_response(response_object(run))
        return sse.stream(follow(run, whole_number(query, "starting_after", -1)), named=True)

    async def _cancel(self, request: Request) -> Response:
        run = await self._conversations.cancel(owner_of(request.scope), request.path_params["id"])
        await run.done()
        return json_response(response_object(run))
