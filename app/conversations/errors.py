"""What can be wrong with what was asked, in the domain's words. `app.api.errors` gives each its shape on the wire."""

from __future__ import annotations


class ConversationError(Exception):
    """Refused: nothing was written and nobody else is affected. `str()` says what was expected and what came."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFoundError(ConversationError):
    """No such thing, or another owner's: the two look the same to whoever asks."""


class ConflictError(ConversationError):
    """Not now: something else has to end first."""


class ClosingError(ConversationError):
    """Not any more: the server is about to end."""


def shown(id: str) -> str:
    """A client's id as an error repeats it: in full, unless it is none of ours."""
    return repr(id if len(id) <= 80 else f"{id[:80]}...")
