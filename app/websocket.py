"""The server's WebSocket connection: uvicorn's own, with three of its edges rounded.

Owns what happens on the wire below ASGI. Knows no routes and no messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

LINGER_SECONDS = 5.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Gives a client that broke the protocol (a message too long, say) the time to read why.

    Closing a TCP connection on which unread bytes wait resets it, and the reset takes the close frame with it. So what still comes
    after such a fault is read and dropped, until the client closes or LINGER_SECONDS have passed. (RFC 9112, section 9.6, on the same
    hazard in HTTP)

    An app that is sending while the connection is closed below it (that fault, or a ping without an answer) has lost its client, and is
    told so as of any other; it did nothing wrong.

    A client that answers no ping may be one that reads nothing. Closing its connection waits until what was written is sent, which it never
    is: so the app is told at once, and what is not sent after LINGER_SECONDS is given up, and the connection with it.
    """

    _lingering = False
    _lost = False  # closed here, not by the app

    def data_received(self, data: bytes) -> None:
        if not self._lingering:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        fault = self.conn.close_sent
        assert fault is not None
        self._lingering = self._lost = self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": fault.code, "reason": fault.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._give_up_later()

    def keepalive_timeout(self) -> None:
        open_before = not self.close_sent
        super().keepalive_timeout()
        if open_before and self.close_sent:
            self._lost = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1011, "reason": "keepalive ping timeout"})
            self.writable.set()  # whoever waits to send has nobody to send to
            self._give_up_later()

    def _give_up_later(self) -> None:
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    async def send(self, message: ASGISendEvent) -> None:
        if not self._lost:
            await super().send(message)
        elif message["type"] != "websocket.close":  # which it is
            raise ClientDisconnected
