"""How much of what a client sends may become objects, measured before any of it does.

JSON is passed over many times faster than it becomes objects, and the event loop waits for either. So a field that may hold many values has
a bound in bytes, and a long message is passed over once, its fields kept as they stand, before it is decoded. Text is one object however
long it is, and fields that nobody knows never become any.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Meta, inspect

from app.api.errors import ApiError

MOST_BYTES = 1 << 17  # of a field that may hold many values, unless it says otherwise
FORM_BYTES = 1 << 19  # of all tools, and of a format

ABSENT = msgspec.Raw(b"null")


def bounded(most_bytes: int | None, **bounds: Any) -> Meta:
    """The annotation of a field with a bound of its own. None: it has none, since its values are few, or cost no more than text does."""
    return Meta(extra={"most_bytes": most_bytes}, **bounds)


@dataclass(slots=True, frozen=True)
class Field:
    name: str
    most_bytes: int | None  # None: any
    inner: type[msgspec.Struct] | None  # it is an object of this type, whose fields have bounds


def check_sizes(data: bytes | str | msgspec.Raw, kind: type[msgspec.Struct], where: str = "") -> None:
    """Raises: ApiError, naming the field that is too long; msgspec.MsgspecError, UnicodeError, RecursionError"""
    outline, fields = _outline(kind)
    read = msgspec.json.decode(data, type=outline)
    for field in fields:
        raw: msgspec.Raw = getattr(read, field.name)
        view = memoryview(raw)
        start = bytes(view[:1])
        if len(view) <= MOST_BYTES or start not in (b"{", b"["):
            continue
        path = f"{where}{field.name}"
        if field.inner and start == b"{":
            check_sizes(raw, field.inner, f"{path}.")
        elif field.most_bytes is not None and len(view) > field.most_bytes:
            raise ApiError(f"expected at most {field.most_bytes} bytes of JSON in {path}, got {len(view)}", path)


@functools.cache
def _outline(kind: type[msgspec.Struct]) -> tuple[type[msgspec.Struct], list[Field]]:
    """A type with the same fields, which reads none of them; and what they are."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    fields = [_field(field.encode_name, field.type) for field in info.fields]
    return msgspec.defstruct(kind.__name__, [(field.name, msgspec.Raw, ABSENT) for field in fields]), fields


def _field(name: str, kind: inspect.Type) -> Field:
    most_bytes: int | None = None
    inner: type[msgspec.Struct] | None = None
    for one, bound in _kinds(kind):
        match one:
            case inspect.StructType(cls=cls) if bound == MOST_BYTES:
                inner = cls
            case inspect.AnyType() | inspect.DictType() | inspect.ListType() | inspect.StructType():
                most_bytes = bound
    return Field(name, most_bytes, inner)


def _kinds(kind: inspect.Type, bound: int | None = MOST_BYTES) -> Iterable[tuple[inspect.Type, int | None]]:
    """What a field may be, and the bound of each."""
    match kind:
        case inspect.Metadata(type=inside, extra=extra):
            yield from _kinds(inside, (extra or {}).get("most_bytes", bound))
        case inspect.UnionType(types=types):
            for one in types:
                yield from _kinds(one, bound)
        case _:
            yield kind, bound
