"""Realtime's routes: the WebSocket, and over HTTP the keys for pages that should not hold one that lasts."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from app.api.channel import Channel
from app.api.decoding import body_of, decode, refuse_unless, within
from app.api.errors import ApiError, realtime_error, refusal
from app.api.models import Models
from app.api.realtime.default import DefaultConversation
from app.api.realtime.schema import Session, SessionFields
from app.api.realtime.socket import SESSION_SECONDS, RealtimeSocket
from app.conversations.service import Conversations
from app.conversations.turn import new_id
from app.ephemeral import EphemeralKeys
from app.refusal import json_response
from app.security import accept, ephemeral_key_of, owner_of

KEY_SECONDS = 600  # unless another time is asked for
POLICY, TRY_AGAIN = 1008, 1013  # close codes

Seconds = Annotated[int, Meta(ge=10, le=7200)]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"] = "created_at"
    seconds: Seconds | None = None


class ClientSecretCreate(msgspec.Struct, forbid_unknown_fields=True):
    expires_after: ExpiresAfter | None = None
    session: SessionFields | None = None


class Realtime:
    def __init__(self, conversations: Conversations, models: Models, keys: EphemeralKeys) -> None:
        self._conversations = conversations
        self._models = models
        self._keys = keys
        self.routes = [
            WebSocketRoute("/v1/realtime", self._socket),
            Route("/v1/realtime/client_secrets", self._client_secret, methods=["POST"]),
        ]

    async def _socket(self, socket: WebSocket) -> None:
        await accept(socket)
        channel = Channel(socket)
        try:
            session, conversation = await self._opened(socket)
        except Exception as fault:
            refused = refusal(fault)
            event = {"event_id": new_id("event"), **realtime_error(refused, None)}
            await channel.part(event, TRY_AGAIN if "retry_after" in event["error"] else POLICY, refused.code or "")
            return
        await RealtimeSocket(channel, owner_of(socket.scope), session, conversation, self._conversations).serve()

    async def _opened(self, socket: WebSocket) -> tuple[Session, DefaultConversation]:
        """Raises: ApiError, NotReadyError, ConversationError, StoreError"""
        query, owner, key = socket.query_params, owner_of(socket.scope), ephemeral_key_of(socket.scope)
        for name in ("call_id", "intent"):
            if name in query:
                raise ApiError(f"{name} is not supported: a session here is one of text, over this WebSocket", name, "unsupported_value")
        settings = msgspec.convert(key.session, SessionFields) if key else SessionFields()
        named = query.get("conversation")
        if named is not None:
            await self._conversations.threads.conversation(owner, named)
        conversation = DefaultConversation(self._conversations.threads, owner, named or new_id("conv"), exists=named is not None)
        asked = query.get("model") or settings.model
        expires_at = int(time.time()) + SESSION_SECONDS
        return Session(new_id("sess"), self._models.served(asked), asked, conversation.id, expires_at, settings), conversation

    async def _client_secret(self, request: Request) -> Response:
        asked = decode(await body_of(request) or b"{}", ClientSecretCreate)
        settings = asked.session or SessionFields()
        with within("session"):
            refuse_unless((("conversation_id", settings.conversation_id is None, "null: ?conversation= names one where the key is used"),))
            shown = Session(new_id("sess"), self._models.served(settings.model), None, None, None, settings).shown()
        seconds = asked.expires_after.seconds if asked.expires_after else None
        key = self._keys.issue(owner_of(request.scope), _given(settings), seconds or KEY_SECONDS)
        return json_response({"value": key.value, "expires_at": key.expires_at, "session": shown})


def _given(settings: SessionFields) -> dict[str, Any]:
    """The settings that were given, as a key keeps them."""
    given: dict[str, Any] = msgspec.to_builtins(settings)
    return {name: value for name, value in given.items() if value is not None}
