"""Every refusal's shape on the wire.

Owns the one map from the domain's and the engine's errors to status, type and code, and the two shapes they take (HTTP body, WebSocket
event). (OpenAI API reference: error codes)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from app.conversations.errors import ConflictError, ConversationError, NotFoundError
from app.store import StoreError
from engine.core import BusyError, EngineError, NotReadyError, RequestError

RETRY_AFTER_SECONDS = 2


class ApiError(Exception):
    """An adapter refuses a request as it stands."""

    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message, code, param)


@dataclass(slots=True, frozen=True)
class Refusal:
    status: int  # HTTP
    message: str
    code: str | None = None
    param: str | None = None

    @property
    def error(self) -> dict[str, Any]:
        return {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}

    def event(self, stream_id: str | None = None) -> dict[str, Any]:
        """The `error` event of a WebSocket, on its lane."""
        lane = {} if stream_id is None else {"stream_id": stream_id}
        return {"type": "error", "status": self.status, "error": self.error, **lane}

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}
        return json_response(error_body(self.status, self.message, self.code, self.param), self.status, headers)


def refusal(fault: Exception) -> Refusal:
    """What to tell a client of an error. One that nobody foresaw says nothing of the inside."""
    match fault:
        case ApiError():
            return fault.refusal
        case NotFoundError():
            return Refusal(404, str(fault), fault.code, fault.param)
        case ConflictError():
            return Refusal(409, str(fault), fault.code, fault.param)
        case ConversationError() | RequestError():
            return Refusal(400, str(fault), fault.code, fault.param)
        case BusyError():
            return Refusal(429, str(fault), "rate_limit_exceeded")
        case NotReadyError():
            return Refusal(503, str(fault), "model_loading" if fault.loading else "model_failed")
        case StoreError():
            return Refusal(503, f"the conversation log is not available: {fault}", "log_unavailable")
        case EngineError():
            return Refusal(500, str(fault), "engine_error")
    return Refusal(500, "the server met an error it did not expect", "internal_error")


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an HTTP error."""
    return {"error": Refusal(status, message, code, param).error}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
