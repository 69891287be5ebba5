"""One tile of a linear layer: 16 outputs for 1 to 8 rows, all inputs.

Owns the arithmetic of quantised and plain weights. A row's operations are the same, in the same order, however many rows share the tile,
so a row's result has the same bits in every batch. Knows neither threads nor what the outputs are for.

Packed weights, for each tile of 16 outputs, groups of 32 inputs in order (`engine/weights/blocks.py` makes them):

| format | bytes of a group | weight |
| --- | --- | --- |
| q4_1 | 256 of nibbles, 16 float16 scales, 16 float16 minima | d * q + m, q in 0 .. 15 |
| q4_0 | 256 of nibbles, 16 float16 scales | d * (q - 8) |
| q8_0 | 512, q + 128 unsigned, 16 float16 scales | d * q |
| float32, bfloat16 | 32 inputs x 16 outputs | as it is |

Rows of activations come in blocks of 16, group by group. They are float32, or int8 in groups of 32 with a float32 scale and the integers'
sum (GGUF's own arithmetic). A "fine" row has a second byte for each number: 16 * high + low, 12 bits in all, for inputs whose rounding
costs the most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels.cpu.simd import (
    fma,
    high_nibbles,
    keep_order,
    load_bf16,
    load_bytes,
    load_f32,
    load_field,
    load_half,
    low_nibbles,
    mul,
    prefetch_lines,
    splat,
    sub,
)
from engine.kernels.cpu.simd_rows import (
    add_rows,
    dot_rows,
    fma_rows,
    high_and_low,
    rows_f32,
    scale_rows,
    splat_rows_i32,
    store_rows,
    zero_rows_i32,
)

GROUP = 32  # inputs that share a scale
TILE = 16  # outputs
BLOCK = 16  # rows of activations that lie together: group by group, row by row
AT_ONCE = 8  # rows that registers have room for

Q4_1, Q4_0, Q8_0, FLOAT32, BFLOAT16 = range(5)
FORMATS = {"q4_1": Q4_1, "q4_0": Q4_0, "q8_0": Q8_0, "float32": FLOAT32, "bfloat16": BFLOAT16}
GROUP_BYTES = (320, 288, 544, 2048, 1024)  # by format


@njit(nogil=True, error_model="numpy")
def group_bytes(kind):
    return GROUP_BYTES[kind]


def integer_tile(kind: int, fine: bool, rows: int) -> Any:
    """tile(w, groups, x, scale, total, y, y_stride) for int8 rows.

    w: the tile's weights; x: the first row's bytes, the low ones of a fine row after the high ones; scale: its float32 scales; total: its
    float32 scale * sum (q4_1) or int32 offset * sum (the others). y: float32, rows `y_stride` bytes apart.
    """
    zeros = rows_f32(rows)
    nibbles = kind in (Q4_0, Q4_1)
    minima = kind == Q4_1
    vectors = 4 if nibbles else 8
    scales = 64 * vectors  # where they begin
    size = GROUP_BYTES[kind]
    many = rows >= AT_ONCE
    row_bytes = 64 if fine else 32
    prefetch = prefetch_lines(-(-size // 64))

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def products(sums, w, x):
        for j in range(vectors):
            v = load_bytes(w + 64 * j)
            if nibbles:
                sums = dot_rows(sums, low_nibbles(v), x + 4 * j, row_bytes)
                if many:
                    keep_order()
                sums = dot_rows(sums, high_nibbles(v), x + 16 + 4 * j, row_bytes)
            else:
                sums = dot_rows(sums, v, x + 4 * j, row_bytes)
            if many:
                keep_order()
        return sums

    @njit(nogil=True, error_model="numpy")
    def tile(w, groups, x, scale, total, y, y_stride):
        result = zeros()
        for _ in range(groups):
            prefetch(w + groups * size)  # the next tile's
            sums = zero_rows_i32(result) if minima else splat_rows_i32(result, total, 4)
            if fine:
                high = products(zero_rows_i32(result), w, x)
                sums = high_and_low(high, products(sums, w, x + 32))
            else:
                sums = products(sums, w, x)
            result = scale_rows(result, sums, load_half(w + scales), scale, 4)
            if minima:
                result = fma_rows(result, load_half(w + scales + 32), total, 4)
            w += size
            x += row_bytes * BLOCK
            scale += 4 * AT_ONCE
            total += 4 * AT_ONCE
        store_rows(result, y, y_stride)

    return tile


def float_tile(kind: int, rows: int) -> Any:
    """tile(w, groups, x, y, y_stride) for float32 rows, 128 bytes apart: weights are widened to float32 as they are read."""
    zeros = rows_f32(rows)
    size = GROUP_BYTES[kind]

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def plain_group(even, odd, w, x):
        for k in range(0, 32, 2):
            at = x + 4 * k
            if kind == FLOAT32:
                even = fma_rows(even, load_f32(w + 64 * k), at, 128)
                odd = fma_rows(odd, load_f32(w + 64 * k + 64), at + 4, 128)
            else:
                even = fma_rows(even, load_bf16(w + 32 * k), at, 128)
                odd = fma_rows(odd, load_bf16(w + 32 * k + 32), at + 4, 128)
        return even, odd

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def nibble_group(even, odd, w, x):
        scale = load_half(w + 256)
        offset = load_half(w + 288) if kind == Q4_1 else mul(scale, splat(np.float32(-8.0)))
        for j in range(4):
            for i in range(4):
                at = x + 16 * j + 4 * i
                even = fma_rows(even, fma(load_field(w + 64 * j, 8 * i, 15), scale, offset), at, 128)
                odd = fma_rows(odd, fma(load_field(w + 64 * j, 8 * i + 4, 15), scale, offset), at + 64, 128)
        return even, odd

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def byte_group(even, odd, w, x):
        scale, zero = load_half(w + 512), splat(np.float32(128.0))
        for j in range(8):
            for i in range(0, 4, 2):
                at = x + 16 * j + 4 * i
                even = fma_rows(even, mul(sub(load_field(w + 64 * j, 8 * i, 255), zero), scale), at, 128)
                odd = fma_rows(odd, mul(sub(load_field(w + 64 * j, 8 * i + 8, 255), zero), scale), at + 4, 128)
        return even, odd

    group = byte_group if kind == Q8_0 else nibble_group if kind in (Q4_0, Q4_1) else plain_group

    @njit(nogil=True, error_model="numpy")
    def tile(w, groups, x, y, y_stride):
        even, odd = zeros(), zeros()
        for _ in range(groups):
            even, odd = group(even, odd, w, x)
            w += size
            x += 128 * BLOCK
        store_rows(add_rows(even, odd), y, y_stride)

    return tile
