"""Requests of the Responses protocol, read and turned into turns.

Owns which fields are understood, which are accepted only with their neutral value, and which are refused. No field that could change a
reply is silently ignored; fields that only describe the caller, or the transport, are.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app.api.constraints import Constraints, FormatField, ToolField, constraints
from app.api.decoding import MAX_MESSAGES, MAX_TOP_LOGPROBS, Metadata, SamplingFields, decode, digest_of, refuse_unless, tier_used
from app.api.items import InputItem, said_of
from app.api.sizes import FORM_BYTES, bounded
from app.conversations.turn import Said, Turn
from app.store.records import Asked

LOGPROBS = "message.output_text.logprobs"
INCLUDED = {LOGPROBS, "reasoning.encrypted_content"}  # the latter: clients ask for it of every model, and there is none

MAX_TOKENS = 1 << 48  # no model has so large a context; the engine knows its own


class ConversationName(msgspec.Struct):
    id: str


class TextOptions(msgspec.Struct):
    format: FormatField | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class CacheOptions(msgspec.Struct):
    """What is cached for how long is the server's business; a client can have a prompt read in advance."""

    prewarm: bool | None = None


class ResponseCreate(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The create body, also the `response.create` event."""

    type: str | None = None  # WebSocket
    stream_id: str | None = None  # WebSocket: the lane; checked before this is read
    model: str | None = None
    input: str | Annotated[list[InputItem], bounded(None, max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None

    generate: bool | None = None  # WebSocket; False: the prompt is read for the next turn, and nothing is said
    tools: Annotated[list[ToolField], bounded(FORM_BYTES)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextOptions, bounded(FORM_BYTES)] | None = None
    truncation: str | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None

    # Understood with their neutral value only.
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    background_options: Any = None

    service_tier: str | None = None
    background: bool | None = None  # over HTTP; a run begun on a WebSocket goes on without it anyway

    # About the caller or the transport.
    stream: bool | None = None
    stream_options: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None
    image: Any = None  # how images are read, and there are none

    def turn(self, owner: str, model: str, client_message_id: str | None = None) -> Turn:
        """`model` is the name served. Raises: ApiError for what cannot be honoured"""
        self._refuse_unsupported()
        form = constraints(self.tools, self.tool_choice, self.parallel_tool_calls, self.text.format if self.text else None, "text.format")
        key = (self.metadata or {}).get("client_message_id") or client_message_id
        conversation = self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation
        return Turn(
            owner=owner,
            items=self._said(),
            sampling=self.sampling(self.max_output_tokens, self._logprobs, form.grammar),
            instructions=self.instructions,
            previous=self.previous_response_id,
            conversation=conversation,
            client_message_id=key,
            asked_digest=digest_of(self) if key else b"",
            stored=self.store is not False,
            truncation="auto" if self.truncation == "auto" else "disabled",
            background=bool(self.background) or tier_used(self.service_tier) == "flex",
            tools=form.tools,
            generate=self._generates,
            request=self._asked(model, conversation, form),
        )

    @property
    def params(self) -> dict[str, str]:
        """What the protocol calls the domain's and the engine's fields, where it has other names."""
        formatted = self.text and self.text.format and self.text.format.type != "text"
        return {"grammar": "text.format" if formatted else "tools", "messages": "input"}

    @property
    def _logprobs(self) -> int:
        """As the engine counts them: how many beside each token, or -1."""
        asked = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else -1

    @property
    def _generates(self) -> bool:
        return self.generate is not False and not (self.prompt_cache_options and self.prompt_cache_options.prewarm)

    def _said(self) -> list[Said]:
        if self.input is None or isinstance(self.input, str):
            return [] if self.input is None else [Said("user", self.input)]
        return said_of(self.input, "input")

    def _refuse_unsupported(self) -> None:
        reasoning = self.reasoning.effort if self.reasoning else None
        refuse_unless(
            (
                ("text.verbosity", not self.text or self.text.verbosity in (None, "medium"), "medium"),
                ("reasoning.effort", reasoning in (None, "none"), "none"),
                ("truncation", self.truncation in (None, "auto", "disabled"), "auto or disabled"),
                ("include", set(self.include or ()) <= INCLUDED, " or ".join(sorted(INCLUDED))),
                ("max_tool_calls", self.max_tool_calls is None, "none"),
                ("prompt", self.prompt is None, "none"),
                ("context_management", not self.context_management, "none"),
                ("moderation", self.moderation is None, "none"),
                ("access_programs", self.access_programs is None, "none"),
                ("background_options", not self.background_options, "none"),
            )
        )

    def _asked(self, model: str, conversation: str | None, form: Constraints) -> Asked:
        """The request's settings as the response object shows them."""
        return Asked(
            model=model,
            instructions=self.instructions,
            conversation=conversation,
            **self.shown_settings(),
            top_logprobs=self.top_logprobs or 0,
            shows_logprobs=self._logprobs >= 0,
            max_output_tokens=self.max_output_tokens,
            truncation=self.truncation or "disabled",
            tools=form.shown_tools,
            tool_choice=form.shown_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            text={"format": form.shown_format},
            metadata=self.metadata or {},
            store=self.store is not False,
            background=bool(self.background),
            service_tier=tier_used(self.service_tier),
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
            generate=self._generates,
        )


class InputTokenCount(ResponseCreate, kw_only=True, forbid_unknown_fields=True):
    """The body of a count of input tokens: what a create body says of its input. What it says of its reply changes nothing."""

    personality: str | None = None

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        refuse_unless((("personality", self.personality is None, "none"),))


class ClientEvent(msgspec.Struct):
    """What every WebSocket frame has; its other fields are read once the type is known."""

    type: str
    stream_id: Any = None
    previous_response_id: Any = None  # also of a frame that turns out to be wrong


class ResponseCancel(msgspec.Struct):
    type: str
    response_id: str | None = None  # None: the one in progress on the lane
    stream_id: str | None = None


class ResponseSteer(msgspec.Struct):
    type: str
    previous_response_id: str  # the one in progress
    input: str | list[Any]


def read_create(data: bytes | str) -> ResponseCreate:
    """Raises: ApiError"""
    return decode(data, ResponseCreate)
