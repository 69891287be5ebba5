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
    """A message in a conversation's tree. A reply keeps the exact tokens it was generated from and as."""

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
    version: int = VERSION


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from KV that already existed
    completion_tokens: int = 0


class Response(msgspec.Struct, kw_only=True):
    """One run of the model: what was asked, and how it ended."""

    id: str
    owner: str
    conversation: str
    previous: str | None  # response id
    input: list[str]  # item ids it brought in
    output: str  # item id of its reply, named before it exists
    created_at: float
    request: dict[str, Any]  # the adapter's own echo of the request's settings, returned as it came
    status: Status = "in_progress"
    completed_at: float | None = None
    reason: str | None = None  # why it is incomplete
    error: str | None = None
    usage: Usage = msgspec.field(default_factory=Usage)
    client_message_id: str | None = None
    version: int = VERSION


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One visible piece of a running reply, appended to its log before anyone sees it."""

    ids: list[int]
    text: str
    exact: bool = True  # the ids up to here decode to the text up to here


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
