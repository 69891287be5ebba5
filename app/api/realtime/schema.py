"""What Realtime clients send, read: events, a session's settings, and what one response changes of them.

Owns which fields are understood, which are accepted only with their neutral value, and which are refused. A field that is null is as one
that is not there, so an update, and a response, changes what it names and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.api.constraints import Constraints, ToolField, constraints
from app.api.decoding import MAX_MESSAGES, Metadata, SamplingFields, decode, refuse_unless, shown
from app.api.errors import ApiError
from app.api.items import InputItem
from app.api.sizes import FORM_BYTES, bounded
from app.conversations.turn import Said, Turn
from app.store.records import Asked

MAX_ID = 256  # characters of an id that a client makes up

ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]


class Reasoning(msgspec.Struct):
    effort: str | None = None


class AudioInput(msgspec.Struct, forbid_unknown_fields=True):
    format: Any = None
    noise_reduction: Any = None
    transcription: Any = None
    turn_detection: Any = None


class AudioOutput(msgspec.Struct, forbid_unknown_fields=True):
    format: Any = None
    speed: Any = None
    voice: Any = None


class Audio(msgspec.Struct, forbid_unknown_fields=True):
    """Without effect, but clients send it whatever they do."""

    input: AudioInput | None = None
    output: AudioOutput | None = None


class Settings(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What a session says of its responses, and a response of itself."""

    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | str | None = None  # or "inf"
    tools: Annotated[list[ToolField], bounded(FORM_BYTES)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    output_modalities: list[str] | None = None

    # Understood with their neutral value only.
    modalities: list[str] | None = None  # as it was called before
    voice: Any = None
    prompt: Any = None
    reasoning: Reasoning | None = None

    audio: Audio | None = None

    def form(self) -> Constraints:
        """Raises: ApiError for what cannot be honoured"""
        self._refuse_unsupported()
        return constraints(self.tools, self.tool_choice, self.parallel_tool_calls, None, "text.format")

    def _refuse_unsupported(self) -> None:
        text, effort = (None, ["text"]), self.reasoning.effort if self.reasoning else None
        refuse_unless(
            (
                ("max_output_tokens", self.max_output_tokens == "inf" or not isinstance(self.max_output_tokens, str), 'a number or "inf"'),
                ("output_modalities", self.output_modalities in text, '["text"]: audio is not supported'),
                ("modalities", self.modalities in text, '["text"]: audio is not supported'),
                ("voice", self.voice is None, "null: audio is not supported"),
                ("prompt", self.prompt is None, "null"),
                ("reasoning.effort", effort in (None, "none"), "none"),
            )
        )


class SessionFields(Settings, kw_only=True, forbid_unknown_fields=True):
    type: str | None = None
    model: str | None = None
    truncation: Any = None

    # Understood with their neutral value only.
    include: list[str] | None = None
    turn_detection: Any = None  # as it was placed before; in `audio` it means nothing

    tracing: Any = None  # where the caller would see traces

    # What a session as it was shown has, too.
    id: str | None = None
    object: str | None = None
    expires_at: int | None = None
    conversation_id: str | None = None

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        refuse_unless(
            (
                ("type", self.type in (None, "realtime"), "realtime"),
                ("truncation", self.truncation in (None, "auto", "disabled"), "auto or disabled"),
                ("include", not self.include, "none"),
                ("turn_detection", self.turn_detection is None, "null: audio is not supported"),
            )
        )


class ResponseFields(Settings, kw_only=True, forbid_unknown_fields=True):
    conversation: str | None = None
    input: Annotated[list[InputItem], bounded(None, max_length=MAX_MESSAGES)] | None = None
    metadata: Metadata | None = None


Fields = TypeVar("Fields", bound=Settings)


def changed(settings: Fields, by: Settings) -> Fields:
    """The settings with what `by` says in place of what they say."""
    news = {name: value for name in settings.__struct_fields__ if (value := getattr(by, name, None)) is not None}
    return msgspec.structs.replace(settings, **news)


@dataclass(slots=True)
class Session:
    id: str
    model: str  # as it is served
    asked: str | None  # the model that was asked for: the same, by whichever of its names
    conversation: str | None  # None: it has not begun, as the next
    expires_at: int | None  # seconds since the epoch
    settings: SessionFields

    def update(self, fields: SessionFields) -> None:
        """Raises: ApiError, and then nothing has changed"""
        if fields.model not in (None, self.model, self.asked):
            raise ApiError(f"the model of a session cannot change: expected {self.model!r}, got {shown(fields.model)}", "model")
        if fields.conversation_id not in (None, self.conversation):
            expected = f"expected {self.conversation!r}, got {shown(fields.conversation_id)}"
            raise ApiError(f"the conversation of a session cannot change: {expected}", "conversation_id")
        settings = changed(self.settings, fields)
        settings.form()
        self.settings = settings

    def shown(self) -> dict[str, Any]:
        settings = self.settings
        form = settings.form()
        sampling = {name: value for name in SamplingFields.__struct_fields__ if (value := getattr(settings, name)) is not None}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "conversation_id": self.conversation,
            "expires_at": self.expires_at,
            "output_modalities": ["text"],
            "instructions": settings.instructions or "",
            "tools": form.shown_tools,
            "tool_choice": form.shown_choice,
            "parallel_tool_calls": settings.parallel_tool_calls is not False,
            "max_output_tokens": settings.max_output_tokens or "inf",
            "truncation": settings.truncation or "auto",
            "temperature": 1.0,
            "include": None,
            "prompt": None,
            "tracing": None,
            **sampling,
        }

    def params(self, response: ResponseFields) -> dict[str, str]:
        """Where the domain's and the engine's fields stand: in the response, or if it says nothing of them, in the session."""
        settings = self.settings

        def place(name: str) -> str:
            return "session" if getattr(response, name) is None and getattr(settings, name) is not None else "response"

        named = {name: f"{place(name)}.{name}" for name in Settings.__struct_fields__}
        return {**named, "grammar": named["tools"], **dict.fromkeys(("input", "messages"), "response.input")}

    def turn(self, owner: str, response: ResponseFields, context: tuple[Said, ...] | None) -> Turn:
        """The turn that a response is; `context` in place of the conversation. Raises: ApiError"""
        settings = changed(self.settings, response)
        form = settings.form()
        stored = response.conversation != "none"
        limit = settings.max_output_tokens if isinstance(settings.max_output_tokens, int) else None
        truncation: Literal["auto", "disabled"] = "disabled" if settings.truncation == "disabled" else "auto"
        return Turn(
            owner=owner,
            items=[],
            context=context,
            conversation=self.conversation if stored else None,
            sampling=settings.sampling(limit, grammar=form.grammar),
            instructions=settings.instructions or None,
            stored=stored,
            truncation=truncation,
            tools=form.tools,
            request=Asked(
                model=self.model,
                instructions=settings.instructions or None,
                conversation=self.conversation if stored else None,
                **settings.shown_settings(),
                max_output_tokens=limit,
                truncation=truncation,
                tools=form.shown_tools,
                tool_choice=form.shown_choice,
                parallel_tool_calls=settings.parallel_tool_calls is not False,
                metadata=response.metadata or {},
                store=stored,
            ),
        )


class Event(msgspec.Struct, kw_only=True):
    type: str
    event_id: Any = None


class Head(msgspec.Struct):
    """What every client event has; its other fields are read once the type is known."""

    type: Any = None
    event_id: Any = None


class SessionUpdate(Event, kw_only=True, forbid_unknown_fields=True):
    session: SessionFields


class ItemCreate(Event, kw_only=True, forbid_unknown_fields=True):
    item: InputItem
    previous_item_id: str | None = None  # "root": in front


class ItemDelete(Event, kw_only=True, forbid_unknown_fields=True):
    item_id: str


class ItemRetrieve(Event, kw_only=True, forbid_unknown_fields=True):
    item_id: str


class ItemTruncate(Event, kw_only=True, forbid_unknown_fields=True):
    item_id: str
    content_index: int = 0
    audio_end_ms: Annotated[int, Meta(ge=0)] | None = None
    text_end: Annotated[int, Meta(ge=0)] | None = None  # characters


class ResponseCreate(Event, kw_only=True, forbid_unknown_fields=True):
    response: ResponseFields | None = None

    @property
    def aside(self) -> bool:
        """It is no part of the conversation."""
        return self.response is not None and self.response.conversation == "none"


class ResponseCancel(Event, kw_only=True, forbid_unknown_fields=True):
    response_id: str | None = None  # None: the one in progress in the conversation


EVENTS: dict[str, type[Event]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.delete": ItemDelete,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


def read_event(frame: str | bytes) -> tuple[Event | ApiError, str | None]:
    """The event, or what is wrong with it; and its client's id for it, if it has one."""
    event_id = None
    try:
        head = decode(frame, Head)
        event_id = head.event_id[:MAX_ID] if isinstance(head.event_id, str) else None
        if isinstance(head.type, str) and head.type.startswith(("input_audio_buffer.", "output_audio_buffer.")):
            raise ApiError(f"audio is not supported: expected an event about text, got {shown(head.type)}", "type", "audio_not_supported")
        if not isinstance(head.type, str) or head.type not in EVENTS:
            raise ApiError(f"expected an event of type {', '.join(EVENTS)}, got {shown(head.type)}", "type")
        return decode(frame, EVENTS[head.type]), event_id
    except ApiError as fault:
        return fault, event_id
