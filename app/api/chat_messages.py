"""The messages of chat completions, in the ledger's words.

Owns what each role may carry: text, a reply's calls, a tool's answer. (OpenAI API reference: Chat, messages)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from app.api.decoding import MAX_CALL_ID, ROLES, Content, message_of, shown, text_of
from app.api.errors import ApiError
from app.api.items import with_call
from app.api.sizes import ABSENT
from app.conversations.turn import Said

MAX_CALLS = 128  # of one message


class CalledFunction(msgspec.Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    arguments: str = ""


class ToolCall(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID)]
    function: CalledFunction | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """As clients send it, also a reply as they got it: with nulls, and empty lists."""

    role: str
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID)] | None = None
    function_call: msgspec.Raw = ABSENT


def said_of(messages: Sequence[ChatMessage]) -> list[Said]:
    """Raises: ApiError, naming the message that cannot be understood"""
    return [_said(message, f"messages.{at}") for at, message in enumerate(messages)]


def _said(message: ChatMessage, where: str) -> Said:
    if bytes(message.function_call) != b"null":
        raise ApiError(f"expected calls in tool_calls, got function_call in {where}", f"{where}.function_call", "unsupported_value")
    if message.tool_calls and message.role != "assistant":
        raise ApiError(
            f"expected tool_calls in assistant messages only, got a role of {shown(message.role)} in {where}", f"{where}.tool_calls"
        )
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ApiError(f"expected tool_call_id in {where}, got a tool message without it", f"{where}.tool_call_id")
        return Said("tool", text_of(message.content, f"{where}.content"), call_id=message.tool_call_id)
    if message.role not in ROLES:
        raise ApiError(f"expected a role of {', '.join(ROLES)} or tool, got {shown(message.role)} in {where}", f"{where}.role")
    said = Said(*message_of(message.role, message.content, where))
    for at, call in enumerate(message.tool_calls or ()):
        here = f"{where}.tool_calls.{at}"
        if call.type != "function" or call.function is None:
            raise ApiError(f"expected calls of type function, got {shown(call.type)} in {here}", here, "unsupported_value")
        said = with_call(said, call.id, call.function.name, call.function.arguments, here)
    return said
