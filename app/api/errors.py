"""Every error's status and code: the one map from the domain's and the engine's errors to what a client is told.

(OpenAI API reference: error codes)
"""

from __future__ import annotations

from app.api.wire import Wire
from app.conversations.errors import ClosingError, ConflictError, ConversationError, NotFoundError
from app.refusal import Refusal
from app.store import StoreError
from app.store.records import Response
from engine.core import BusyError, EngineError, NotReadyError, RequestError


class ApiError(Exception):
    """An adapter refuses a request as it stands."""

    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message, code, param)


class FailedReply(ApiError):
    """A reply was begun, and failed."""

    def __init__(self, response: Response) -> None:
        failed = failure(response)
        super().__init__(failed.message, None, failed.code, failed.status)


def failure(response: Response) -> Refusal:
    """What to tell of a response that failed. What the request brought on is not worth trying again."""
    message = response.error or "the reply could not be finished"
    if response.error_code == "invalid_grammar":
        return Refusal(400, message, response.error_code)
    return Refusal(500, message, "server_error")


RESPONSES_CODES = {"invalid_grammar": "invalid_prompt"}  # of failed responses, where Responses' differ: clients know a list of them


def refusal(fault: Exception) -> Refusal:
    """What to tell a client of an error. One that nobody foresaw says nothing of the inside."""
    match fault:
        case ApiError():
            return fault.refusal
        case NotFoundError(code="previous_response_not_found"):  # a field of the request is wrong: its address is there
            return Refusal(400, str(fault), fault.code, fault.param)
        case NotFoundError():
            return Refusal(404, str(fault), fault.code, fault.param)
        case ConflictError():
            return Refusal(409, str(fault), fault.code, fault.param)
        case ClosingError():
            return Refusal(503, str(fault), fault.code)
        case ConversationError() | RequestError():
            return Refusal(400, str(fault), fault.code, fault.param)
        case BusyError():
            return Refusal(429, str(fault), "rate_limit_exceeded", retry_after=fault.retry_after)
        case NotReadyError():
            return Refusal(503, str(fault), "model_loading" if fault.loading else "model_failed")
        case StoreError():
            return Refusal(503, f"the conversation log is not available: {fault}", "log_unavailable")
        case EngineError():
            return Refusal(500, str(fault), "engine_error")
    return Refusal(500, "the server met an error it did not expect", "internal_error")


REALTIME_CODES = {"conversation_locked": "conversation_already_has_active_response"}  # where Realtime's differ


def realtime_error(refused: Refusal, client_event_id: str | None) -> Wire:
    """The `error` event of Realtime. `client_event_id`: of the event that is refused, if it has one."""
    error = refused.event["error"]
    return {"type": "error", "error": error | {"code": REALTIME_CODES.get(error["code"], error["code"]), "event_id": client_event_id}}
