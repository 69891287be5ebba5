"""A WebSocket as adapters use one: frames in, JSON events out one at a time, and last words that nobody needs to take.

Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.wire import Wire

PARTING_SECONDS = 5.0  # for a client to take the last words


class Channel:
    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._sending = asyncio.Lock()

    async def frames(self) -> AsyncIterator[str | bytes]:
        """What the client sends, until it goes."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            yield message.get("text") or message.get("bytes") or ""

    async def send(self, event: Wire) -> None:
        """Raises: WebSocketDisconnect when the client is gone"""
        async with self._sending:
            try:
                await self._socket.send_text(msgspec.json.encode(event).decode())
            except RuntimeError as fault:  # what starlette has for all sends but the first that finds the client gone
                raise WebSocketDisconnect(1006) from fault

    async def part(self, event: Wire, code: int, reason: str) -> None:
        """Say why, and close. A client that does not listen is not waited for."""
        try:
            async with asyncio.timeout(PARTING_SECONDS):
                await self.send(event)
                await self._socket.close(code, reason)
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            pass  # gone, or not listening
