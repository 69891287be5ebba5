"""What is written down: the records of the durable log, and nothing about how or where.

Owns the fields of conversations, items and responses and their versioned encoding. Knows no wire format: adapters in
`app.api` translate. Every record starts with its version, so that a later Hocket can read an earlier one's data.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

VERSION = 1

Role = Literal["system", "user", "assistant", "tool"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Conversation(msgspec.Struct, kw_only=True):
    """A named thread of items. `listed` ones were made by `POST /v1/conversations` and show in its owner's list."""

    id: str
    owner: str
    created_at: float  # seconds since the epoch
    updated_at: float
    listed: bool
    title: str = ""
    metadata: dict[str, str] = {}
    leaf: str | None = None  # the item the next turn follows
    version: int = VERSION


class Item(msgspec.Struct, kw_only=True):
    """A message in a conversation's tree. A reply keeps the exact tokens it was generated from and as.

    What a model says in calling tools is text of its reply, in the markup of `engine.tool_calls`.
    """

    id: str
    parent: str | None  # the item before it; None: the first
    role: Role
    text: str
    created_at: float
    response: str  # the response that brought it in (input) or made it (output)
    status: Status = "completed"
    lead_ids: list[int] = []  # replies: prompt tokens between the reply before and this one, as they were run
    lead_digest: bytes = b""  # replies: digest of the text those tokens encode
    ids: list[int] | None = None  # replies: the generated tokens that make up `text`
    fingerprint: str = ""  # replies: tokenizer and template the ids belong to
    calls: bool = False  # replies: markup of calls in its text is calls, since there were tools
    call_ids: list[str] = []  # replies a client brought: its names for the calls in them
    call_id: str | None = None  # tool: of the call that it answers
    deleted: bool = False  # it holds its place in the tree, and nothing else of it is left
    version: int = VERSION

    @property
    def spoken(self) -> bool:
        """It is a message of the chat: neither deleted nor a reply cut before its first token."""
        return not self.deleted and bool(self.text or self.role == "tool")


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from KV that already existed
    completion_tokens: int = 0


class Asked(msgspec.Struct, kw_only=True):
    """What was asked for, as a response object repeats it."""

    model: str = ""
    instructions: str | None = None
    conversation: str | None = None  # if the request named one
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    shows_logprobs: bool = False
    max_output_tokens: int | None = None
    truncation: str = "disabled"
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    metadata: dict[str, str] = {}
    store: bool = True
    background: bool = False
    service_tier: str = "default"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    generate: bool = True  # False: it only had its prompt read, for the next turn


class Response(msgspec.Struct, kw_only=True):
    """One run of the model: what was asked, and how it ended."""

    id: str
    owner: str
    conversation: str
    previous: str | None  # response id
    input: list[str]  # item ids it brought in
    output: str  # item id of its reply, named before it exists
    created_at: float
    request: Asked
    status: Status = "in_progress"
    completed_at: float | None = None
    reason: str | None = None  # why it is incomplete
    error: str | None = None
    error_code: str = ""  # whose fault the error is, in the words of `app.api.errors`; "": the server's
    usage: Usage = msgspec.field(default_factory=Usage)
    client_message_id: str | None = None
    asked_digest: bytes = b""  # of all that was asked for, if it has a client message id
    expires_at: float | None = None  # when it may be forgotten; None: when someone deletes it
    version: int = VERSION


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """How likely the model found a token."""

    piece: bytes  # what it adds to the text
    logprob: float
    top: list[Logprob] = []  # the likeliest tokens in its place, the likeliest first


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One visible piece of a running reply, appended to its log before anyone sees it."""

    ids: list[int]
    text: str
    exact: bool = True  # the ids up to here decode to the text up to here
    logprobs: list[Logprob] = []  # of each id, if they were asked for


Record = TypeVar("Record", Conversation, Item, Response, Entry)

_encoder = msgspec.msgpack.Encoder()


def encode(record: Conversation | Item | Response | Entry) -> bytes:
    """Raises: RecordError when the record holds what cannot be written down, such as a lone surrogate."""
    try:
        return _encoder.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as fault:
        raise RecordError(f"expected a {type(record).__name__} that can be stored: {fault}") from fault


def decode(data: bytes, kind: type[Record]) -> Record:
    """Raises: RecordError when the bytes are not a record of this kind, or of a version this Hocket does not know."""
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as fault:
        raise RecordError(f"expected a stored {kind.__name__} record, got {data[:40]!r}...: {fault}") from fault
    version = getattr(record, "version", VERSION)
    if version != VERSION:
        raise RecordError(f"expected a {kind.__name__} record of version {VERSION}, got version {version}")
    return record


class RecordError(Exception):
    """A record that cannot be written down, or stored bytes that are not the record they should be."""
