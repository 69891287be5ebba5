"""A refusal and the two shapes it takes on the wire: HTTP body, WebSocket event. (OpenAI API reference: error codes)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

RETRY_AFTER_SECONDS = 2


@dataclass(slots=True, frozen=True)
class Refusal:
    status: int  # HTTP
    message: str
    code: str | None = None
    param: str | None = None

    @property
    def error(self) -> dict[str, Any]:
        return {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}

    @property
    def event(self) -> dict[str, Any]:
        """The `error` event of a WebSocket."""
        return {"type": "error", "status": self.status, "error": self.error}

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}
        return json_response({"error": self.error}, self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
