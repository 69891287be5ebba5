"""Packs a checkpoint's weights for the CPU kernels: which tensors become which products, in which format and where in the file.

Owns the plan, which follows from the checkpoint and the wanted format alone, and the writing, which happens once in a child process
(`python -m engine.weights.packing CHECKPOINT TARGET WEIGHTS`). Knows no kernels, and neither torch nor transformers nor gguf.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import ModelConfig, ModelError
from engine.weights import blocks, child
from engine.weights import config as hf_config
from engine.weights import safetensors as st
from engine.weights.blocks import Array, Groups
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import GROUP, KINDS, LANES, VALUE_BYTES, tile_bytes

PACKED_VERSION = 1  # of the layout and of what is packed; another version is packed again
WEIGHTS = ("auto", "int8", "float32", "bfloat16")
DATA, MANIFEST = "packed.bin", "packed.json"
PAIRED = 2 * LANES  # rows of gate, and of up, in one unit of their product

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_SLAB_ROWS = 1024  # a multiple of PAIRED: rows packed at once, which bounds the memory that takes
_DTYPE_FORMATS = {"F32": "float32", "F16": "float32", "BF16": "bfloat16"}


@dataclass(slots=True, frozen=True)
class Item:
    """One product's weights (or one vector: a product of one input) in the packed file."""

    parts: tuple[str, ...]  # the tensors whose rows it has, by Hugging Face name
    paired: bool  # of two parts, each padded to a multiple of 32 rows: two tiles of the first, two of the second, and so on
    format: str  # see `formats`
    outputs: int  # rows that are not padding at the end
    padded_outputs: int  # a multiple of 16
    inputs: int  # matrices: padded to a multiple of 32
    offset: int  # bytes from the start of the file, a multiple of 64

    @property
    def size(self) -> int:
        """Bytes."""
        return self.padded_outputs // LANES * tile_bytes(self.format, self.inputs)


@dataclass(slots=True, frozen=True)
class Plan:
    """Everything about a packed file but its bytes."""

    fingerprint: str  # of the checkpoint
    weights: str
    items: dict[str, Item]  # "layers.0.qkv", "layers.0.qkv_bias", "norm", "head", ...; in the file's order
    size: int  # bytes of the file

    def to_json(self) -> dict[str, Any]:
        """What identifies a file as made to this plan."""
        items = {
            key: [list(item.parts), item.paired, item.format, item.outputs, item.padded_outputs, item.inputs, item.offset]
            for key, item in self.items.items()
        }
        return {
            "version": PACKED_VERSION,
            "fingerprint": self.fingerprint,
            "weights": self.weights,
            "size": self.size,
            "items": items,
        }


def plan(checkpoint: Checkpoint, weights: str) -> Plan:
    """How `checkpoint` is packed as `weights` (see `packed.prepare_packed`).

    Raises:
        ModelError: the CPU kernels cannot run the model, or the checkpoint is damaged.
    """
    if weights not in WEIGHTS:
        raise ModelError(f"weights: expected one of {', '.join(WEIGHTS)}, got {weights!r}")
    config = checkpoint.config
    for field, number, multiple in (("hidden_size", config.hidden_size, GROUP), ("head_dim", config.head_dim, LANES)):
        if number % multiple:
            raise ModelError(
                f"{checkpoint.name}: {field}: the CPU kernels need a multiple of {multiple}, got {number}; `kernels reference` runs it"
            )
    entries, shapes = checkpoint.entries(), hf_config.tensor_shapes(config)
    items: dict[str, Item] = {}
    end = 0
    for key, parts, paired in _products(config):
        rows = [shapes[part][0] for part in parts]
        if paired:
            outputs = padded = len(rows) * _up(rows[0], PAIRED)
        else:
            outputs, padded = sum(rows), _up(sum(rows), LANES)
        if len(shapes[parts[0]]) == 1:
            item = Item(parts, paired, "float32", outputs, padded, 1, end)
        else:
            format_ = _common([_format(checkpoint, entries, part, weights) for part in parts])
            item = Item(parts, paired, format_, outputs, padded, _up(shapes[parts[0]][1], GROUP), end)
        items[key] = item
        end = _up(end + item.size, _ALIGNMENT)
    return Plan(checkpoint.fingerprint, weights, items, end)


def _products(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Key, tensors and pairing of all that is packed, in the order in which a step reads it."""
    yield "embedding" if not config.tied_head else "head", ("model.embed_tokens.weight",), False
    fused = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    for layer in range(config.layers):
        prefix, key = f"model.layers.{layer}", f"layers.{layer}"
        for norm, tensor, part, products, biased in (
            ("input_norm", "input_layernorm", "self_attn", ("qkv", "out"), config.attention_bias),
            ("mlp_norm", "post_attention_layernorm", "mlp", ("gate_up", "down"), config.mlp_bias),
        ):
            yield f"{key}.{norm}", (f"{prefix}.{tensor}.weight",), False
            for product in products:
                tensors = [f"{prefix}.{part}.{name}" for name in fused[product]]
                yield f"{key}.{product}", tuple(f"{each}.weight" for each in tensors), product == "gate_up"
                if biased:
                    yield f"{key}.{product}_bias", tuple(f"{each}.bias" for each in tensors), product == "gate_up"
    yield "norm", ("model.norm.weight",), False
    if not config.tied_head:
        yield "head", ("lm_head.weight",), False


def _format(checkpoint: Checkpoint, entries: dict[str, st.Entry], name: str, weights: str) -> str:
    if weights in VALUE_BYTES:
        return weights
    if name in checkpoint.quantised:
        return KINDS[checkpoint.quantised[name]]
    if weights == "int8" or name in checkpoint.requantise:
        return "q8_0"
    return _DTYPE_FORMATS[entries[name].dtype]


def _common(formats: Sequence[str]) -> str:
    """The format of a product whose parts would have `formats`."""
    if len(set(formats)) == 1:
        return formats[0]
    return "float32" if set(formats) <= VALUE_BYTES.keys() else "q8_0"


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Rows:
    """Reads rows of a checkpoint's tensors from the memory-mapped file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._quantised = checkpoint.quantised
        self._entries = checkpoint.entries()
        self._data: Array = np.memmap(next(iter(self._entries.values())).file, mode="r")

    def count(self, name: str) -> int:
        return self._entries[name].shape[0]

    def read(self, name: str, start: int, stop: int) -> Groups | Array:
        """Rows [start, stop): blocks, or float32 [rows, inputs] (a vector's numbers are rows of one input)."""
        entry = self._entries[name]
        size = entry.size // entry.shape[0]
        raw = self._data[entry.offset + start * size : entry.offset + stop * size].reshape(stop - start, size)
        if name in self._quantised:
            return blocks.split(self._quantised[name], raw)
        if entry.dtype == "BF16":
            return blocks.from_bfloat16(raw.view("<u2"))
        return raw.view("<f2" if entry.dtype == "F16" else "<f4").astype(np.float32)


def pack(checkpoint: Checkpoint, target: Path, weights: str, report: Callable[[float], None]) -> None:
    """Write the packed file and its manifest into the empty folder `target`; `report` gets the fraction done.

    Raises:
        ModelError: as `plan`, or a weight that is not finite or that the format cannot hold.
    """
    made, rows, digest, written = plan(checkpoint, weights), _Rows(checkpoint), hashlib.sha256(), 0
    with (target / DATA).open("wb") as file:

        def write(piece: bytes | memoryview) -> None:
            nonlocal written
            file.write(piece)
            digest.update(piece)
            written += len(piece)

        for item in made.items.values():
            for piece in _pieces(item, rows):
                write(piece.data)
                report(written / made.size)
            write(bytes(_up(written, _ALIGNMENT) - written))
    (target / MANIFEST).write_text(json.dumps(made.to_json() | {"sha256": digest.hexdigest()}))


def _pieces(item: Item, rows: _Rows) -> Iterator[Array]:
    """The item's bytes (uint8, flat), those of some rows at a time."""
    counts = [rows.count(part) for part in item.parts]
    if item.paired:
        for start in range(0, _up(counts[0], PAIRED), _SLAB_ROWS):
            stop = min(start + _SLAB_ROWS, _up(counts[0], PAIRED))
            units = [_tiles(item, rows, part, start, stop).reshape((stop - start) // PAIRED, -1) for part in item.parts]
            yield np.concatenate(units, axis=1).reshape(-1)
        return
    for part, count in zip(item.parts, counts, strict=True):
        for start in range(0, _up(count, LANES), _SLAB_ROWS):
            yield _tiles(item, rows, part, start, min(start + _SLAB_ROWS, _up(count, LANES))).reshape(-1)


def _tiles(item: Item, rows: _Rows, part: str, start: int, stop: int) -> Array:
    """uint8 [tiles, bytes per tile]: rows [start, stop) of a tensor in the item's format; those past its end are zeros."""
    read = rows.read(part, min(start, rows.count(part)), min(stop, rows.count(part)))
    if isinstance(read, Groups):
        if item.format == read.format:
            return blocks.tiles(read.padded(stop - start))
        read = blocks.dequantised(read)
    if not np.isfinite(read).all():
        raise ModelError(f"tensor {part}: holds values that are not finite: damaged")
    values = np.pad(read, ((0, stop - start - len(read)), (0, item.inputs - read.shape[1])))
    try:
        if item.format == "q8_0":
            return blocks.tiles(blocks.quantised(values))
        return blocks.tiles(blocks.to_bfloat16(values) if item.format == "bfloat16" else values)
    except OverflowError as error:
        others = "float32 weights hold it" if item.format == "bfloat16" else "float32 and bfloat16 weights hold it"
        raise ModelError(f"tensor {part}: {error}; {others}") from error


def main(arguments: list[str]) -> int:
    """The child's life; its exit code."""
    path, target, weights = arguments
    return child.answer(lambda report: pack(Checkpoint(Path(path)), Path(target), weights, report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
