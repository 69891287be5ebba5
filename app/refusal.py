"""A refusal and the two shapes it takes on the wire: HTTP answer, WebSocket event. (OpenAI API reference: error codes)"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

RETRY_AFTER_SECONDS = 2.0  # where nothing better is known


@dataclass(slots=True, frozen=True)
class Refusal:
    status: int  # HTTP
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None  # seconds until it is worth trying again; None: not known

    @property
    def error(self) -> dict[str, Any]:
        return {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}

    @property
    def event(self) -> dict[str, Any]:
        """The `error` event of a WebSocket."""
        hint = self._hint
        return {"type": "error", "status": self.status, "error": self.error | ({"retry_after": hint} if hint else {})}

    def response(self, request_id: str | None = None) -> Response:
        """request_id: to be told in the body too."""
        hint = self._hint
        # Whole seconds are the standard; the official SDKs prefer the finer one. (RFC 9110, section 10.2.3)
        headers = {"retry-after": str(math.ceil(hint)), "retry-after-ms": str(math.ceil(1000 * hint))} if hint else {}
        named = {"request_id": request_id} if request_id else {}
        return json_response({"error": self.error, **named}, self.status, headers)

    @property
    def _hint(self) -> float | None:
        """Seconds after which to try again, where that can help: a model that could not be loaded stays so."""
        helps = self.status == 429 or (self.status == 503 and self.code != "model_failed")
        return (self.retry_after or RETRY_AFTER_SECONDS) if helps else None


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
