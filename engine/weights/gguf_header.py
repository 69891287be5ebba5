"""Parses and checks the header of a GGUF file, believing nothing in it.

Owns the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): every length and count is held against the
bytes that are left before anything is read or looped over, so that a lying header costs neither memory nor time. Knows nothing of Llama.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.core import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_KEY = 65535  # bytes, from the format
_MAX_STRING = 1 << 24  # bytes
_MAX_NAME = 255  # bytes; llama.cpp itself allows 63
_MAX_ELEMENTS = 1 << 22  # of all arrays together; the largest vocabularies are some 260,000 tokens
_MAX_DIMS = 4
_MIN_PAIR, _MIN_TENSOR = 13, 33  # bytes that the shortest entry takes

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "B",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """Where a tensor's blocks are and what they hold."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first (the file has the innermost first)
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


@dataclass(slots=True, frozen=True)
class Header:
    """What a GGUF says of itself, checked against its size."""

    metadata: dict[str, Any]  # int, float, bool, str, or a list of one of them
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """The header of the GGUF file `path`.

    Raises:
        ModelError: not a GGUF (version 2 or 3, little endian), or one whose header does not fit the file; names the field.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read as GGUF: {error}") from error


class _Parser:
    """A position in the file that only moves forward, and never past the end."""

    __slots__ = ("data", "elements", "path", "position")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.elements = 0  # array elements read so far

    def header(self) -> Header:
        if (magic := self.data[:4]) != _MAGIC:
            raise self.error("magic", f"expected {_MAGIC!r}, got {magic!r}")
        self.position = 4
        version = self.scalar(GGUFValueType.UINT32, "version")
        if version not in _VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
            raise self.error("version", f"expected 2 or 3, got {version}{hint}")
        tensor_count = self.count("tensor_count", _MIN_TENSOR, _MAX_TENSORS)
        pair_count = self.count("metadata_kv_count", _MIN_PAIR, _MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for index in range(pair_count):
            key = self.string(f"metadata key {index}", _MAX_KEY)
            if not key or key in metadata or key.startswith("GGUF."):  # the gguf library keeps its own fields under "GGUF."
                raise self.error(f"metadata key {index}", f"expected a new name, got {key!r}")
            metadata[key] = self.value(self.type(key), key)
        infos = [self.tensor(index) for index in range(tensor_count)]
        return Header(metadata, self.placed(infos, metadata.get("general.alignment", _DEFAULT_ALIGNMENT)))

    def error(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: GGUF {field}: {problem}")

    def take(self, size: int, field: str) -> int:
        """Move over `size` bytes and return where they start."""
        start, left = self.position, len(self.data) - self.position
        if size > left:
            raise self.error(field, f"needs {size} bytes at offset {start}, the file has {left} left")
        self.position += size
        return start

    def scalar(self, kind: GGUFValueType, field: str) -> Any:
        code = "<" + _SCALARS[kind]
        value = struct.unpack_from(code, self.data, self.take(struct.calcsize(code), field))[0]
        return self.boolean(value, field) if kind == GGUFValueType.BOOL else value

    def boolean(self, value: int, field: str) -> bool:
        if value not in (0, 1):
            raise self.error(field, f"expected a bool (0 or 1), got {value}")
        return bool(value)

    def count(self, field: str, least: int, most: int) -> int:
        """A count of entries that take `least` bytes each or more."""
        value = int(self.scalar(GGUFValueType.UINT64, field))
        possible = min(most, (len(self.data) - self.position) // least)
        if value > possible:
            raise self.error(field, f"{value} entries cannot be: at most {possible} in a file of {len(self.data)} bytes")
        return value

    def string(self, field: str, most: int = _MAX_STRING) -> str:
        length = int(self.scalar(GGUFValueType.UINT64, f"{field} (length)"))
        if length > most:
            raise self.error(field, f"expected at most {most} bytes, got {length}")
        start = self.take(length, field)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(field, f"expected UTF-8: {error}") from error

    def type(self, field: str) -> GGUFValueType:
        code = self.scalar(GGUFValueType.UINT32, f"{field} (type)")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self.error(field, f"expected a value type from 0 to {max(GGUFValueType)}, got {code}") from None

    def value(self, kind: GGUFValueType, field: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string(field)
        if kind != GGUFValueType.ARRAY:
            return self.scalar(kind, field)
        element = self.type(f"{field} (elements)")
        if element == GGUFValueType.ARRAY:
            raise self.error(field, "arrays of arrays are not supported")
        size = 8 if element == GGUFValueType.STRING else struct.calcsize("<" + _SCALARS[element])
        length = self.count(f"{field} (length)", size, _MAX_ELEMENTS - self.elements)
        self.elements += length
        if element == GGUFValueType.STRING:
            return [self.string(f"{field}[{index}]") for index in range(length)]
        values = list(struct.unpack_from(f"<{length}{_SCALARS[element]}", self.data, self.take(length * size, field)))
        return [self.boolean(value, field) for value in values] if element == GGUFValueType.BOOL else values

    def tensor(self, index: int) -> TensorInfo:
        """The index-th tensor, its offset still relative to the data section."""
        name = self.string(f"tensor {index} (name)", _MAX_NAME)
        field = f"tensor {name!r}"
        dims = self.scalar(GGUFValueType.UINT32, f"{field} (dimensions)")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.error(field, f"expected 1 to {_MAX_DIMS} dimensions, got {dims}")
        shape = tuple(int(self.scalar(GGUFValueType.UINT64, f"{field} (shape)")) for _ in range(dims))
        code = self.scalar(GGUFValueType.UINT32, f"{field} (type)")
        offset = int(self.scalar(GGUFValueType.UINT64, f"{field} (offset)"))
        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.error(field, f"unknown tensor type {code}") from None
        if min(shape) < 1 or (elements := math.prod(shape)) > len(self.data) * block:
            raise self.error(field, f"shape {list(reversed(shape))} cannot be in a file of {len(self.data)} bytes")
        if shape[0] % block:
            raise self.error(field, f"{kind.name} rows hold blocks of {block} values, got rows of {shape[0]}")
        return TensorInfo(name, tuple(reversed(shape)), kind, offset, elements // block * block_bytes)

    def placed(self, infos: list[TensorInfo], alignment: Any) -> dict[str, TensorInfo]:
        """The tensors by name, their offsets absolute; each must lie in the file, aligned, over no other."""
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.error("general.alignment", f"expected a power of two from 8 on, got {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end, before = start, "the header"
        for info in sorted(infos, key=lambda info: info.offset):
            offset = start + info.offset
            if info.name in tensors:
                raise self.error(f"tensor {info.name!r}", "is there twice")
            if info.offset % alignment:
                raise self.error(f"tensor {info.name!r}", f"offset {info.offset} is not a multiple of the alignment, {alignment}")
            if offset < end:
                raise self.error(f"tensor {info.name!r}", f"at offset {info.offset} it lies over {before}")
            if offset + info.size > len(self.data):
                raise self.error(
                    f"tensor {info.name!r}",
                    f"{info.size} bytes at {offset} expected, the file ends at {len(self.data)}: truncated, or its header lies",
                )
            tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, offset, info.size)
            end, before = offset + info.size, f"tensor {info.name!r}"
        return tensors
