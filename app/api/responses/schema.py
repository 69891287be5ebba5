"""Requests of the Responses protocol, read and turned into turns.

Owns which fields are understood, which are accepted only with their neutral value, and which are refused. No field that could change a
reply is silently ignored; fields that only describe the caller, or the transport, are.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app.api.decoding import MAX_MESSAGES, Content, Metadata, SamplingFields, decode, message_of, refuse_unless, tier_used
from app.api.errors import ApiError
from app.conversations.turn import Turn
from app.store.records import Role

StreamId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,256}$")]


class InputItem(msgspec.Struct):
    """A message. Ids and statuses that clients send back with an earlier reply are not needed."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None


class ConversationName(msgspec.Struct):
    id: str


class TextFormat(msgspec.Struct):
    type: str


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseCreate(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The create body, also the `response.create` event."""

    type: str | None = None  # WebSocket
    stream_id: str | None = None  # WebSocket: the lane; checked before this is read
    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None

    # Understood with their neutral value only.
    generate: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    prompt: Any = None
    context_management: Any = None

    service_tier: str | None = None
    background: bool | None = None  # over HTTP; a run begun on a WebSocket goes on without it anyway

    # About the caller or the transport.
    stream: bool | None = None
    stream_options: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def turn(self, owner: str, model: str, client_message_id: str | None = None) -> Turn:
        """`model` is the name served. Raises: ApiError for what cannot be honoured"""
        self._refuse_unsupported()
        conversation = self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation
        return Turn(
            owner=owner,
            items=self._items(),
            sampling=self.sampling(self.max_output_tokens),
            instructions=self.instructions,
            previous=self.previous_response_id,
            conversation=conversation,
            client_message_id=(self.metadata or {}).get("client_message_id") or client_message_id,
            stored=self.store is not False,
            truncation="auto" if self.truncation == "auto" else "disabled",
            background=bool(self.background) or tier_used(self.service_tier) == "flex",
            request=self._echo(model, conversation),
        )

    def _items(self) -> list[tuple[Role, str]]:
        if self.input is None or isinstance(self.input, str):
            return [("user", self.input)] if self.input else []
        items = []
        for at, item in enumerate(self.input):
            if item.type != "message":
                raise ApiError(f"expected items of type message, got {item.type!r} in input.{at}", f"input.{at}", "unsupported_item")
            items.append(message_of(item.role, item.content, f"input.{at}"))
        return items

    def _refuse_unsupported(self) -> None:
        format = self.text.format.type if self.text and self.text.format else "text"
        choice = self.tool_choice if isinstance(self.tool_choice, str | None) else "a tool"
        reasoning = self.reasoning.effort if self.reasoning else None
        refuse_unless(
            (
                ("generate", self.generate is not False, "true or none"),
                ("tools", not self.tools, "an empty list or none"),
                ("tool_choice", choice in (None, "auto", "none"), "auto or none"),
                ("text.verbosity", not self.text or self.text.verbosity in (None, "medium"), "medium"),
                ("text.format", format == "text", "type text"),
                ("reasoning.effort", reasoning in (None, "none"), "none"),
                ("truncation", self.truncation in (None, "auto", "disabled"), "auto or disabled"),
                ("top_logprobs", not self.top_logprobs, "0"),
                ("include", not set(self.include or ()) - {"reasoning.encrypted_content"}, "an empty list"),
                ("prompt", self.prompt is None, "none"),
                ("context_management", not self.context_management, "none"),
            )
        )

    def _echo(self, model: str, conversation: str | None) -> dict[str, Any]:
        """The request's settings as the response object shows them."""
        return {
            "model": model,
            "instructions": self.instructions,
            "conversation": conversation,
            **self.shown_settings(),
            "max_output_tokens": self.max_output_tokens,
            "truncation": self.truncation or "disabled",
            "metadata": self.metadata or {},
            "store": self.store is not False,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "max_tool_calls": self.max_tool_calls,
            "background": bool(self.background),
            "service_tier": tier_used(self.service_tier),
        }


class ClientEvent(msgspec.Struct):
    """What every WebSocket frame has; its other fields are read once the type is known."""

    type: str
    stream_id: Any = None


class ResponseCancel(msgspec.Struct):
    type: str
    response_id: str | None = None  # None: the one in progress on the lane
    stream_id: str | None = None


def read_create(data: bytes | str) -> ResponseCreate:
    """Raises: ApiError"""
    return decode(data, ResponseCreate)
