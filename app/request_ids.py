"""A name for each request: in the reply's `x-request-id`, and in every line that is logged while it is served.

Owns making it and where it is kept. A client's own `X-Client-Request-Id` goes into the lines beside it and nowhere else. What a task
started for a request logs later, such as its run, has the name too; a task that serves everyone is to be started in a context of its own.
(OpenAI API reference: debugging requests)
"""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
CLIENT_HEADER = b"x-client-request-id"
MAX_CLIENT_ID = 128  # characters of a client's own that are logged

_UNSAFE = re.compile(r"[^A-Za-z0-9_.:/+=@-]", re.ASCII)  # what could end a line, or colour or forge one
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")

_request: ContextVar[str] = ContextVar("request")  # as log lines show it


class RequestIds:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        name = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = name
        # Never reset: the server has a task for each request, and logs in it what the app raises.
        _request.set(name + _clients_own(scope))

        async def send_named(message: Message) -> None:
            if message["type"] in _STARTS:
                headers = [header for header in message.get("headers", ()) if header[0].lower() != HEADER]
                message = {**message, "headers": [*headers, (HEADER, name.encode())]}
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(scope: Scope) -> str | None:
    name: str | None = scope.get("state", {}).get("request_id")
    return name


class NamesRequests(logging.Filter):
    """Gives each record `request`: ` [req_...]` with the client's own id, or nothing outside any request."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = _request.get("")
        record.request = f" [{name}]" if name else ""
        return True


def _clients_own(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name.lower() == CLIENT_HEADER), b"")
    return f" client={_UNSAFE.sub('_', given.decode('latin-1')[:MAX_CLIENT_ID])}" if given else ""
