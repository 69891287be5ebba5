"""Groups of 32 weights that share a scale, as a GGUF has them and as the CPU kernels read them; and bfloat16.

Owns the bytes of both layouts and the arithmetic between them and float32, in numpy. Knows no file, no tensor's name and no model.

A GGUF's row is a run of blocks, one for each 32 inputs: float16 scale d, float16 minimum m (Q4_1 only), then the quantised values q.
Q4_0 is d * (q - 8) and Q4_1 d * q + m with q from 0 to 15: byte i of 16 holds input i in its low half, input 16 + i in its high half.
Q8_0 is d * q with q from -128 to 127, a byte each. (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)

A kernel's tile is 16 outputs, one for each lane of a vector; groups follow each other along the inputs. A group of a tile is its
quantised values in vectors of 64 bytes (byte 4 * lane + i of vector j: that lane's byte 4 * j + i; Q8_0's as q + 128, unsigned), then
16 scales, then 16 minima. Tiles of plain floats are [inputs, 16].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.weights.formats import GROUP, HALVES, KINDS, LANES, QUANT_BYTES, VALUE_BYTES, tile_bytes

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True, frozen=True)
class Groups:
    """Quantised rows, their blocks taken apart."""

    format: str  # "q4_0" | "q4_1" | "q8_0"
    quants: Array  # uint8 [rows, groups, 16 or 32], each group's bytes as in a GGUF block
    scales: Array  # float16 [rows, groups]
    minima: Array | None  # float16 [rows, groups]; q4_1 only

    def padded(self, rows: int) -> Groups:
        """The same with rows of zero weights added, up to `rows`."""
        missing = rows - len(self.scales)
        if not missing:
            return self
        quants, scales = (np.concatenate([each, np.zeros((missing, *each.shape[1:]), each.dtype)]) for each in (self.quants, self.scales))
        return Groups(self.format, quants, scales, None if self.minima is None else np.pad(self.minima, ((0, missing), (0, 0))))


def split(kind: str, rows: Array) -> Groups:
    """Take the blocks of GGUF rows (uint8 [rows, bytes per row]) apart."""
    format_ = KINDS[kind]
    head = 2 * HALVES[format_]
    blocks = rows.reshape(len(rows), -1, head + QUANT_BYTES[format_])
    halves = np.ascontiguousarray(blocks[..., :head]).view("<f2")
    return Groups(format_, blocks[..., head:], halves[..., 0], halves[..., 1] if HALVES[format_] == 2 else None)


def dequantised(groups: Groups) -> Array:
    """float32 [rows, inputs]: each weight is its scale times its quantised value (plus the minimum), rounded after each step."""
    scales = groups.scales.astype(np.float32)[..., None]
    if groups.format == "q8_0":
        values = scales * groups.quants.view(np.int8).astype(np.float32)
    else:
        nibbles = np.concatenate([groups.quants & 0x0F, groups.quants >> 4], axis=-1).astype(np.float32)
        values = scales * (nibbles - 8) if groups.minima is None else scales * nibbles + groups.minima.astype(np.float32)[..., None]
    return values.reshape(len(values), -1)


def quantised(values: Array) -> Groups:
    """float32 [rows, inputs] (inputs a multiple of 32) to q8_0, the nearest of 255 even steps in each group.

    A scale is absmax / 127 rounded to float16, or the next float16 above where the rounding (a large one only below float16's normal
    range) would take the largest quantised value past 127. A group of zeros has scale 0.

    Raises:
        OverflowError: a group's scale is beyond float16.
    """
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(127)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise OverflowError(f"{largest.max():g} is too large for an int8 group, whose scale is a float16 (at most {127 * 65504})")
    with np.errstate(all="ignore"):  # 0 / 0 is not above 127; the next above the largest float16 is not taken
        too_small = np.rint(largest / scales.astype(np.float32)) > 127
        scales = np.where(too_small, np.nextafter(scales, np.float16(np.inf)), scales)
    divisors = np.where(scales == 0, np.float16(1), scales).astype(np.float32)[..., None]
    return Groups("q8_0", np.rint(groups / divisors).astype(np.int8).view(np.uint8), scales, None)


def to_bfloat16(values: Array) -> Array:
    """float32 to the nearest bfloat16 (ties to even), as uint16 bits.

    Raises:
        OverflowError: a value is beyond bfloat16's largest.
    """
    bits = values.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    if (beyond := (rounded & 0x7FFF) >= 0x7F80).any():
        raise OverflowError(f"{values[beyond][0]:g} is beyond bfloat16")
    return rounded


def from_bfloat16(bits: Array) -> Array:
    """bfloat16 (uint16 bits) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tiles(rows: Groups | Array) -> Array:
    """uint8 [tiles, bytes per tile] of quantised rows, or of float32 or bfloat16 (uint16) rows; their count is a multiple of 16."""
    if not isinstance(rows, Groups):
        across = rows.reshape(-1, LANES, rows.shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(across).reshape(len(across), -1).view(np.uint8)
    groups = rows.scales.shape[1]
    quants = rows.quants ^ 0x80 if rows.format == "q8_0" else rows.quants
    vectors = quants.reshape(-1, LANES, groups, quants.shape[-1] // 4, 4).transpose(0, 2, 3, 1, 4)
    parts = [vectors.reshape(len(vectors), groups, -1)]
    for halves in (rows.scales, rows.minima):
        if halves is not None:
            parts.append(np.ascontiguousarray(halves.reshape(-1, LANES, groups).swapaxes(1, 2), "<f2").view(np.uint8))
    return np.concatenate(parts, axis=-1).reshape(len(vectors), -1)


def untiled(format_: str, data: Array, inputs: int) -> Array:
    """float32 [16 * tiles, inputs]: what tiles (uint8, any shape) hold."""
    if format_ in VALUE_BYTES:
        values = data.view(np.uint16 if format_ == "bfloat16" else np.float32).reshape(-1, inputs, LANES)
        rows = np.ascontiguousarray(values.swapaxes(1, 2)).reshape(-1, inputs)
        return from_bfloat16(rows) if format_ == "bfloat16" else rows
    size, groups = QUANT_BYTES[format_], inputs // GROUP
    blocks = data.reshape(-1, groups, tile_bytes(format_, GROUP))
    vectors, halves = blocks[..., : LANES * size], np.ascontiguousarray(blocks[..., LANES * size :]).view("<f2")
    quants = vectors.reshape(-1, groups, size // 4, LANES, 4).transpose(0, 3, 1, 2, 4).reshape(-1, groups, size)
    scales, *minima = (halves[..., at : at + LANES].swapaxes(1, 2).reshape(-1, groups) for at in range(0, halves.shape[-1], LANES))
    return dequantised(Groups(format_, quants ^ 0x80 if format_ == "q8_0" else quants, scales, minima[0] if minima else None))
