"""What happens to one row of activations at a time: embedding, norms, quantising.

Owns the form in which a row enters a linear layer (an "input" table). Knows no threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.cpu import tiles
from engine.kernels.cpu.simd import (
    bf16_at,
    f32_zero,
    fma,
    get,
    half_at,
    largest_magnitude,
    ld_f32,
    ld_u8,
    load_f32,
    mul,
    reduce_add,
    reduce_sum_i32,
    round_i32,
    splat,
    st_f32,
    st_i32,
    store_f32,
    store_i8,
    store_split,
)
from engine.kernels.cpu.stage import stage
from engine.kernels.cpu.tiles import AT_ONCE, BLOCK

# A step's table: int64. Addresses unless said otherwise.
ROWS, SHARES, TOKENS, POSITIONS, SLOTS, BLOCKS, PART_ROWS, SAMPLES, SAMPLE_ROWS, CHOICES, CHOSEN, STEP_FIELDS = range(12)
#   ROWS: how many; SHARES: into how many a linear layer parts them; TOKENS, POSITIONS, SLOTS: int64 [rows]; BLOCKS, PART_ROWS: see
#   attention.py; SAMPLES: how many; SAMPLE_ROWS: int64 [samples]; CHOICES: a record of choices.py for each sample, 0: no token is chosen;
#   CHOSEN: int64 [samples], the tokens

# An input's table: where rows of activations go, and in which form.
FORM, X, SCALE, TOTAL, OFFSET, GROUPS, INPUT_FIELDS = range(7)
#   FORM: one of the next three. Rows come in blocks of 16, which hold a group of 32 numbers of each row, then the next group. X: float32
#   or int8 [blocks, groups, 16, 32], or int8 [blocks, groups, 16, 2, 32], high and low bytes; SCALE: float32 by eights of rows [eights,
#   groups, 8]; TOTAL: likewise, float32 scale * sum where OFFSET is 0, else int32 OFFSET * sum
PLAIN, COARSE, FINE = range(3)

_TINY = np.float32(1e-30)  # a group this small is all zero: the inverse of its scale would overflow


@njit(nogil=True, error_model="numpy")
def put_group(target, row, group, a, b):
    """Write 32 activations, in two vectors, as group `group` of row `row` of an input."""
    form, groups = get(target, FORM), get(target, GROUPS)
    at = (row // BLOCK * groups + group) * BLOCK + row % BLOCK
    if form == PLAIN:
        x = get(target, X) + 128 * at
        store_f32(x, a)
        store_f32(x + 64, b)
        return
    limit = np.float32(127.0) if form == COARSE else np.float32(127 * 16 + 7)
    peak = largest_magnitude(a, b)
    inverse = limit / peak if peak > _TINY else np.float32(0.0)
    scale = (
        np.float32(0.0) if peak <= _TINY else peak * (np.float32(1.0) / limit)
    )  # NaN stays NaN, so that a broken row is seen in its logits
    p, q = round_i32(mul(a, splat(inverse))), round_i32(mul(b, splat(inverse)))
    if form == COARSE:
        x = get(target, X) + 32 * at
        store_i8(x, p)
        store_i8(x + 16, q)
    else:
        x = get(target, X) + 64 * at
        store_split(x, x + 32, p)
        store_split(x + 16, x + 48, q)
    total = reduce_sum_i32(p, q)
    at = (row // AT_ONCE * groups + group) * AT_ONCE + row % AT_ONCE
    st_f32(get(target, SCALE) + 4 * at, scale)
    offset = get(target, OFFSET)
    if offset:
        st_i32(get(target, TOTAL) + 4 * at, np.int32(offset * total))
    else:
        st_f32(get(target, TOTAL) + 4 * at, scale * np.float32(total))


# rms_norm: the rows of HIDDEN that SOURCE_ROWS names (0: all), scaled, into an input
NORM_X, NORM_WEIGHT, NORM_SIZE, NORM_EPS, NORM_TARGET, NORM_SAMPLES, NORM_FIELDS = range(7)
#   NORM_X: float32 [rows, size]; NORM_EPS: address of a float32; NORM_TARGET: an input's table; NORM_SAMPLES: 1 for the sampled rows only


@stage
def rms_norm(table, step, first, last, thread):
    """Items are rows. (Zhang and Sennrich, 2019)"""
    size = get(table, NORM_SIZE)
    weight = get(table, NORM_WEIGHT)
    target = get(table, NORM_TARGET)
    eps = ld_f32(get(table, NORM_EPS))
    for item in range(first, last):
        row = get(get(step, SAMPLE_ROWS), item) if get(table, NORM_SAMPLES) else item
        x = get(table, NORM_X) + 4 * size * row
        left, right = f32_zero(), f32_zero()
        for i in range(0, 4 * size, 128):
            a, b = load_f32(x + i), load_f32(x + i + 64)
            left, right = fma(a, a, left), fma(b, b, right)
        mean = (reduce_add(left) + reduce_add(right)) / np.float32(size)
        factor = splat(np.float32(1.0) / np.sqrt(mean + eps))
        for group in range(size // 32):
            at = 128 * group
            a = mul(mul(load_f32(x + at), factor), load_f32(weight + at))
            b = mul(mul(load_f32(x + at + 64), factor), load_f32(weight + at + 64))
            put_group(target, item, group, a, b)


EMBED_WEIGHTS, EMBED_KIND, EMBED_GROUPS, EMBED_X, EMBED_FIELDS = range(5)


@njit(nogil=True, error_model="numpy")
def weight_at(kind, group, lane, i):
    """Input i of output `lane` in a packed group at address `group`, as float32."""
    if kind == tiles.FLOAT32:
        return ld_f32(group + 64 * i + 4 * lane)
    if kind == tiles.BFLOAT16:
        return bf16_at(group + 32 * i + 2 * lane)
    byte = 64 * (i % 16 // 4) + 4 * lane + i % 4
    if kind == tiles.Q8_0:
        return half_at(group + 512, lane) * np.float32(ld_u8(group + 64 * (i // 4) + 4 * lane + i % 4) - 128)
    q = (ld_u8(group + byte) >> (4 * (i // 16))) & 15
    scale = half_at(group + 256, lane)
    if kind == tiles.Q4_0:
        return scale * np.float32(q - 8)
    return scale * np.float32(q) + half_at(group + 288, lane)


@stage
def embed(table, step, first, last, thread):
    """Items are rows: each token's row of the embedding, from its packed form, into the residual stream."""
    kind, groups = get(table, EMBED_KIND), get(table, EMBED_GROUPS)
    size = tiles.group_bytes(kind)
    for row in range(first, last):
        token = get(get(step, TOKENS), row)
        group = get(table, EMBED_WEIGHTS) + (token // 16) * groups * size
        x = get(table, EMBED_X) + 128 * groups * row
        for _ in range(groups):
            for i in range(32):
                st_f32(x + 4 * i, weight_at(kind, group, token % 16, i))
            group += size
            x += 128
