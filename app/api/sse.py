"""Server-sent events for all protocols over HTTP. (WHATWG HTML, section 9.2)

Owns the end of a stream: `[DONE]` after its last event, an error event where it breaks off, and that its events are closed at once when
its client goes away, also while there is nothing to send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.disconnect import close, disconnected
from app.api.errors import refusal
from app.api.wire import Wire

log = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends until its events end or its client goes."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()
        if not sending.cancelled() and (fault := sending.exception()) and not isinstance(fault, OSError):  # OSError: sent to nobody
            raise fault


def stream(events: AsyncIterator[Wire], named: bool) -> EventStream:
    """Each event as one `data:` line, after an `event:` line with its type if `named`; `[DONE]` at the end."""
    return EventStream(_body(events, named))


async def _body(events: AsyncIterator[Wire], named: bool) -> AsyncGenerator[bytes, None]:
    event: Wire = {}
    try:
        async for event in events:
            yield _lines(event, named)
    except Exception as fault:  # the status has been sent: all that is left to tell is an event
        yield _lines(_error(fault, event if named else None), named)
    finally:
        await close(events)
    yield DONE


def _lines(event: Wire, named: bool) -> bytes:
    name = f"event: {event['type']}\n".encode() if named else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


def _error(fault: Exception, after: Wire | None) -> Wire:
    """`after`: the event before it, of a stream of named ones, which are numbered."""
    refused = refusal(fault)
    if refused.code == "internal_error":
        log.error("a stream broke off", exc_info=fault)
    if after is None:
        return {"error": refused.error}
    number = after.get("sequence_number", -1) + 1
    return {"type": "error", "code": refused.code, "message": refused.message, "param": refused.param, "sequence_number": number}
