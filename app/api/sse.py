"""Server-sent events for both HTTP protocols. (WHATWG HTML, section 9.2)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


def stream(events: AsyncIterator[dict[str, Any]], named: bool) -> StreamingResponse:
    """Each event as one `data:` line, after an `event:` line with its type if `named`; `[DONE]` at the end."""

    async def body() -> AsyncIterator[bytes]:
        async for event in events:
            name = f"event: {event['type']}\n".encode() if named else b""
            yield name + b"data: " + msgspec.json.encode(event) + b"\n\n"
        yield DONE

    return StreamingResponse(body(), media_type="text/event-stream", headers=HEADERS)
