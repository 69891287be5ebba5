"""The paged KV cache: its layout, and how rows get into it.

Owns the pages. A page holds 16 positions of every layer, one layer after the other, and in a layer those of every KV head: for each the
keys [head_dim, 16], the values [16, head_dim], and with int8 the 16 scales of the keys and the 16 of the values, float32. A KV block is
block_size / 16 pages in a row; slot s (block * block_size + offset) is position s % 16 of page s // 16. Keys lie so that 16 positions are
scored at once, values so that 16 numbers of a head are mixed at once. Knows nothing of attention beyond that.

Sources: PagedAttention (Kwon et al., 2023), rotary positions (Su et al., 2021).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels.cpu.rows import POSITIONS, SLOTS
from engine.kernels.cpu.simd import (
    add,
    f32_zero,
    get,
    larger_magnitude,
    largest_magnitude,
    ld_f32,
    load_f32,
    mul,
    put_bf16,
    put_f32,
    put_i8,
    round_i32,
    splat,
    st_f32,
    store_bf16,
    store_f32,
    store_i8,
    sub,
)
from engine.kernels.cpu.stage import Stage, stage

PAGE = 16  # positions
FLOAT32, BFLOAT16, INT8 = range(3)
KV_TYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}
ITEM_BYTES = (4, 2, 1)  # by KV type

_MOST = np.float32(3.3961775e38)  # from here on, bfloat16 rounds to infinity

# The table of a layer's attention and its cache: int64. Addresses unless said otherwise.
QKV, QKV_STRIDE, HEADS, KV_HEADS, HEAD_DIM, CACHE, PAGE_STRIDE, COS, SIN = range(9)
OUT, OUT_STRIDE, PARTS, SCRATCH, SCRATCH_STRIDE, TARGET, ATTENTION_FIELDS = range(9, 16)
#   QKV: float32 rows of queries, keys, values, QKV_STRIDE bytes apart; CACHE: the layer's part of page 0, PAGE_STRIDE bytes from page to
#   page; COS, SIN: float32 [positions, head_dim / 2]; OUT: float32 rows, OUT_STRIDE bytes apart; PARTS: states of tiles that wait for
#   `merge`; SCRATCH: SCRATCH_STRIDE bytes for each thread; TARGET: the input's table that `merge` writes


def page_bytes(kind: int, kv_heads: int, head_dim: int) -> int:
    """Of a page of one layer."""
    return kv_heads * int(head_bytes.py_func(kind, head_dim))


@njit(nogil=True, error_model="numpy")
def head_bytes(kind, head_dim):
    """Of one head in a page."""
    return 2 * PAGE * head_dim * ITEM_BYTES[kind] + (2 * PAGE * 4 if kind == INT8 else 0)


@njit(nogil=True, error_model="numpy")
def _peak(x, head_dim):
    """The largest magnitude of a head's numbers; NaN if one is."""
    peak = f32_zero()
    for i in range(0, 4 * head_dim, 64):
        peak = larger_magnitude(peak, load_f32(x + i))
    return largest_magnitude(peak, peak)


@njit(nogil=True, error_model="numpy")
def _scaled(peak, scale):
    """Write the scale of numbers up to `peak` as int8 to address `scale`; returns its inverse."""
    st_f32(scale, peak / np.float32(127.0))
    return np.float32(127.0) / peak if peak > np.float32(1e-30) else np.float32(0.0)


def _writer(kind: int) -> Any:
    """write(head, head_dim, slot, key, value): one position of one head into its page at address `head`."""
    size = ITEM_BYTES[kind]

    @njit(nogil=True, error_model="numpy")
    def write(head, head_dim, slot, key, value):
        values = head + PAGE * head_dim * size + slot * head_dim * size
        key_peak, value_peak = _peak(key, head_dim), _peak(value, head_dim)
        # A row of no numbers is seen by itself and by later rows, whose scores are none; not by earlier ones, which take it 0 times.
        broken = not (key_peak < _MOST and value_peak < _MOST)
        if broken:
            key_peak, value_peak = np.float32(np.nan), np.float32(0.0)
        if kind == INT8:
            scales = head + 2 * PAGE * head_dim
            key_inverse = splat(_scaled(key_peak, scales + 4 * slot))
            value_inverse = splat(_scaled(value_peak, scales + 4 * PAGE + 4 * slot))
        for i in range(0, head_dim, 16):
            k = splat(np.float32(np.nan)) if broken else load_f32(key + 4 * i)
            v = f32_zero() if broken else load_f32(value + 4 * i)
            column = head + (PAGE * i + slot) * size
            if kind == INT8:
                put_i8(column, PAGE, round_i32(mul(k, key_inverse)))
                store_i8(values + i, round_i32(mul(v, value_inverse)))
            elif kind == BFLOAT16:
                put_bf16(column, 2 * PAGE, k)
                store_bf16(values + 2 * i, v)
            else:
                put_f32(column, 4 * PAGE, k)
                store_f32(values + 4 * i, v)

    return write


@njit(nogil=True, error_model="numpy")
def _rotate(x, head_dim, cos, sin):
    """A head in place; a pair is (i, i + head_dim / 2)."""
    half = 2 * head_dim  # bytes
    for i in range(0, half // 64 * 64, 64):
        left, right, c, s = load_f32(x + i), load_f32(x + half + i), load_f32(cos + i), load_f32(sin + i)
        store_f32(x + i, sub(mul(left, c), mul(right, s)))
        store_f32(x + half + i, add(mul(right, c), mul(left, s)))
    for i in range(half // 64 * 64, half, 4):
        a, b, c, s = ld_f32(x + i), ld_f32(x + half + i), ld_f32(cos + i), ld_f32(sin + i)
        st_f32(x + i, a * c - b * s)
        st_f32(x + half + i, b * c + a * s)


def _storing(kind: int) -> Any:
    write = _writer(kind)

    @njit(nogil=True, error_model="numpy")
    def store(table, step, first, last, thread):
        """Rotate the queries and keys of rows, and put keys and values into their pages."""
        heads, kv_heads, head_dim = get(table, HEADS), get(table, KV_HEADS), get(table, HEAD_DIM)
        size, of_head = 4 * head_dim, head_bytes(kind, head_dim)
        for row in range(first, last):
            at = 2 * head_dim * get(get(step, POSITIONS), row)
            cos, sin = get(table, COS) + at, get(table, SIN) + at
            x = get(table, QKV) + row * get(table, QKV_STRIDE)
            for head in range(heads + kv_heads):
                _rotate(x + head * size, head_dim, cos, sin)
            slot = get(get(step, SLOTS), row)
            page = get(table, CACHE) + slot // PAGE * get(table, PAGE_STRIDE)
            for head in range(kv_heads):
                key = x + (heads + head) * size
                write(page + head * of_head, head_dim, slot % PAGE, key, key + kv_heads * size)

    return store


_store_float32 = _storing(FLOAT32)
_store_bfloat16 = _storing(BFLOAT16)
_store_int8 = _storing(INT8)


@stage
def store_float32(table, step, first, last, thread):
    """Items are rows."""
    _store_float32(table, step, first, last, thread)


@stage
def store_bfloat16(table, step, first, last, thread):
    """Items are rows."""
    _store_bfloat16(table, step, first, last, thread)


@stage
def store_int8(table, step, first, last, thread):
    """Items are rows."""
    _store_int8(table, step, first, last, thread)


def store_stage(kind: str) -> Stage:
    """For a KV type: "float32", "bfloat16" or "int8"."""
    return {"float32": store_float32, "bfloat16": store_bfloat16, "int8": store_int8}[kind]
