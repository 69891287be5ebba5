"""Attention over the paged KV cache, for decode and prefill rows alike.

Owns the order of it: tiles of 128 positions, each softmaxed by itself, merged in order. Tiles lie at multiples of 128, whatever the batch,
the chunk or the block size, so a row's result has the same bits in all of them. Knows the cache's pages, and no linear layer.

Sources: grouped queries (Ainslie et al., 2023), online softmax (Milakov and Gimelshein, 2018), splitting over KV (Flash-Decoding, 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels.cpu.kv import (
    BFLOAT16,
    CACHE,
    FLOAT32,
    HEAD_DIM,
    HEADS,
    INT8,
    ITEM_BYTES,
    KV_HEADS,
    OUT,
    OUT_STRIDE,
    PAGE,
    PAGE_STRIDE,
    PARTS,
    QKV,
    QKV_STRIDE,
    SCRATCH,
    SCRATCH_STRIDE,
    TARGET,
    head_bytes,
)
from engine.kernels.cpu.rows import BLOCKS, PART_ROWS, POSITIONS, put_group
from engine.kernels.cpu.simd import (
    add,
    f32_zero,
    fma,
    get,
    keep_lanes,
    ld_f32,
    load_bf16,
    load_f32,
    load_i8,
    mul,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    sub,
    vexp,
    vmax,
)
from engine.kernels.cpu.simd_rows import fma_rows, rows_f32, store_rows
from engine.kernels.cpu.stage import Stage, stage

SPAN = 128  # positions of a tile

# A block of rows of one sequence, int64: an item of attention is a block and a KV head.
BLOCK_ROW, BLOCK_ROWS, BLOCK_PAGES, BLOCK_TILE, BLOCK_TILES, BLOCK_PART, BLOCK_FIELDS = range(7)
#   BLOCK_PAGES: address of the sequence's pages, int64; BLOCK_TILE, BLOCK_TILES: the tiles to go through; BLOCK_PART: -1 to finish the
#   rows, else where in PARTS to leave the state of the one row after the one tile

# A state: the softmax of some positions for one query, float32: the largest score in 16 lanes, the sum of exponentials in 16 lanes, the
# mix [head_dim].
STATE_HEAD = 128  # bytes before the mix
QUERIES = 24  # that a block should have: enough to make a tile of keys worth its load, few enough for the first-level cache

_NONE = np.float32(-np.inf)


def scratch_bytes(head_dim: int, group: int) -> int:
    """What a thread needs for blocks of up to max(QUERIES, group) queries: the queries, their scores, two states for each."""
    return max(QUERIES, group) * (4 * head_dim + 4 * SPAN + 2 * (STATE_HEAD + 4 * head_dim))


def _strips(kind: int, rows: int) -> tuple[Any, Any]:
    """(scores, mix) for `rows` queries at a time."""
    zeros = rows_f32(rows)
    size = ITEM_BYTES[kind]
    load = (load_f32, load_bf16, load_i8)[kind]

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def product(a, b, c, d, p, q, r, s, step, x, stride, count):
        """Accumulators += x[rows, count] times four vectors at p, q, r and s, `step` bytes further each time."""
        for _ in range(count):
            a = fma_rows(a, load(p), x, stride)
            b = fma_rows(b, load(q), x, stride)
            c = fma_rows(c, load(r), x, stride)
            d = fma_rows(d, load(s), x, stride)
            p += step
            q += step
            r += step
            s += step
            x += 4
        return a, b, c, d

    @njit(nogil=True, error_model="numpy")
    def scores(queries, head_dim, pages, kv, page_stride, count, out):
        """Queries [rows, head_dim] times the keys of `count` pages, into out [rows, SPAN]."""
        index = 0
        step = PAGE * size
        while count - index >= 4:
            p = kv + get(pages, index) * page_stride
            q = kv + get(pages, index + 1) * page_stride
            r = kv + get(pages, index + 2) * page_stride
            s = kv + get(pages, index + 3) * page_stride
            a, b, c, d = product(zeros(), zeros(), zeros(), zeros(), p, q, r, s, step, queries, 4 * head_dim, head_dim)
            at = out + 4 * PAGE * index
            store_rows(a, at, 4 * SPAN)
            store_rows(b, at + 64, 4 * SPAN)
            store_rows(c, at + 128, 4 * SPAN)
            store_rows(d, at + 192, 4 * SPAN)
            index += 4
        while index < count:
            p = kv + get(pages, index) * page_stride
            a = zeros()
            for i in range(head_dim):
                a = fma_rows(a, load(p + i * step), queries + 4 * i, 4 * head_dim)
            store_rows(a, out + 4 * PAGE * index, 4 * SPAN)
            index += 1

    @njit(nogil=True, error_model="numpy")
    def mix(weights, head_dim, pages, kv, page_stride, count, out, out_stride):
        """Weights [rows, SPAN] times the values of the first `count` positions, into out [rows, head_dim]."""
        values = kv + PAGE * head_dim * size
        step = head_dim * size
        chunk = 0
        while head_dim - chunk >= 64:
            a, b, c, d = zeros(), zeros(), zeros(), zeros()
            for index in range(0, count, PAGE):
                p = values + get(pages, index // PAGE) * page_stride + chunk * size
                x = weights + 4 * index
                a, b, c, d = product(
                    a, b, c, d, p, p + 16 * size, p + 32 * size, p + 48 * size, step, x, 4 * SPAN, min(PAGE, count - index)
                )
            store_rows(a, out + 4 * chunk, out_stride)
            store_rows(b, out + 4 * chunk + 64, out_stride)
            store_rows(c, out + 4 * chunk + 128, out_stride)
            store_rows(d, out + 4 * chunk + 192, out_stride)
            chunk += 64
        while chunk < head_dim:
            a = zeros()
            for index in range(0, count, PAGE):
                p = values + get(pages, index // PAGE) * page_stride + chunk * size
                for i in range(min(PAGE, count - index)):
                    a = fma_rows(a, load(p + i * step), weights + 4 * (index + i), 4 * SPAN)
            store_rows(a, out + 4 * chunk, out_stride)
            chunk += 16

    return scores, mix


def _kernels(kind: int) -> tuple[Any, Any]:
    """(all_scores, all_mixes): strips for any number of queries, as many at a time as registers hold."""
    (s1, m1), (s2, m2), (s3, m3), (s4, m4), (s6, m6) = (_strips(kind, rows) for rows in (1, 2, 3, 4, 6))

    @njit(nogil=True, error_model="numpy")
    def all_scores(queries, total, head_dim, pages, kv, page_stride, count, out):
        done = 0
        while done < total:
            x, y = queries + 4 * head_dim * done, out + 4 * SPAN * done
            left = total - done
            if left >= 6:
                s6(x, head_dim, pages, kv, page_stride, count, y)
                done += 6
            elif left >= 4:
                s4(x, head_dim, pages, kv, page_stride, count, y)
                done += 4
            elif left == 3:
                s3(x, head_dim, pages, kv, page_stride, count, y)
                done += 3
            elif left == 2:
                s2(x, head_dim, pages, kv, page_stride, count, y)
                done += 2
            else:
                s1(x, head_dim, pages, kv, page_stride, count, y)
                done += 1

    @njit(nogil=True, error_model="numpy")
    def all_mixes(weights, total, head_dim, pages, kv, page_stride, count, out, out_stride):
        done = 0
        while done < total:
            x, y = weights + 4 * SPAN * done, out + out_stride * done
            left = total - done
            if left >= 6:
                m6(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 6
            elif left >= 4:
                m4(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 4
            elif left == 3:
                m3(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 3
            elif left == 2:
                m2(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 2
            else:
                m1(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 1

    return all_scores, all_mixes


@njit(nogil=True, error_model="numpy")
def _scale_scores(scores, scales, pages, page_stride, count):
    """scores [SPAN] of `count` pages times each position's scale (int8)."""
    for index in range(count):
        at = scores + 64 * index
        store_f32(at, mul(load_f32(at), load_f32(scales + get(pages, index) * page_stride)))


@njit(nogil=True, error_model="numpy")
def _softmax(scores, valid, count, state):
    """Turn the first `valid` of `count` pages of scores into exponentials, the others into 0; the largest and the sum go to the state."""
    largest = splat(_NONE)
    for index in range((valid + PAGE - 1) // PAGE):
        largest = vmax(keep_lanes(load_f32(scores + 64 * index), valid - PAGE * index, _NONE), largest)
    largest = splat(reduce_max(largest))
    total = f32_zero()
    for index in range(count):
        at = scores + 64 * index
        left = valid - PAGE * index
        p = keep_lanes(vexp(sub(load_f32(at), largest)), left, np.float32(0.0)) if left > 0 else f32_zero()
        total = add(total, p)
        store_f32(at, p)
    store_f32(state, largest)
    store_f32(state + 64, splat(reduce_add(total)))


@njit(nogil=True, error_model="numpy")
def _merge_state(total, other, head_dim):
    """total += other; both are states. One that saw no position changes nothing."""
    if ld_f32(other + 64) == np.float32(0.0):
        return
    if ld_f32(total + 64) == np.float32(0.0):
        for i in range(0, STATE_HEAD + 4 * head_dim, 64):
            store_f32(total + i, load_f32(other + i))
        return
    before, came = load_f32(total), load_f32(other)
    largest = vmax(before, came)
    keep, take = vexp(sub(before, largest)), vexp(sub(came, largest))
    store_f32(total, largest)
    for i in range(64, STATE_HEAD + 4 * head_dim, 64):
        store_f32(total + i, fma(load_f32(other + i), take, mul(load_f32(total + i), keep)))


@njit(nogil=True, error_model="numpy")
def _finish(state, head_dim, out):
    inverse = splat(np.float32(1.0) / ld_f32(state + 64))
    for i in range(0, 4 * head_dim, 64):
        store_f32(out + i, mul(load_f32(state + STATE_HEAD + i), inverse))


def _attending(kind: int) -> Any:
    all_scores, all_mixes = _kernels(kind)

    @njit(nogil=True, error_model="numpy")
    def attend(per_head, scale_bytes, table, step, block, head, thread):
        """Rows of one block against one KV head, tile by tile. scale_bytes: where in a head's page the int8 scales are; 0: none."""
        heads, kv_heads, head_dim = get(table, HEADS), get(table, KV_HEADS), get(table, HEAD_DIM)
        group, rows, first_row = heads // kv_heads, get(block, BLOCK_ROWS), get(block, BLOCK_ROW)
        position = get(get(step, POSITIONS), first_row)
        kv = get(table, CACHE) + head * per_head
        page_stride = get(table, PAGE_STRIDE)
        part = get(block, BLOCK_PART)
        state_bytes = STATE_HEAD + 4 * head_dim
        total = rows * group
        queries = get(table, SCRATCH) + thread * get(table, SCRATCH_STRIDE)
        scores = queries + total * 4 * head_dim
        sums = scores + total * 4 * SPAN
        tiles = get(table, PARTS) + (part * heads + head * group) * state_bytes if part >= 0 else sums + total * state_bytes
        factor = splat(np.float32(1.0) / np.sqrt(np.float32(head_dim)))
        for row in range(rows):
            source = get(table, QKV) + (first_row + row) * get(table, QKV_STRIDE) + head * group * 4 * head_dim
            for i in range(0, group * 4 * head_dim, 64):
                store_f32(queries + row * group * 4 * head_dim + i, mul(load_f32(source + i), factor))
        for query in range(total):
            store_f32(sums + query * state_bytes + 64, f32_zero())
        for tile in range(get(block, BLOCK_TILE), get(block, BLOCK_TILE) + get(block, BLOCK_TILES)):
            seen = position + 1 - tile * SPAN  # positions of the tile that the first row sees
            count = min(SPAN, seen + rows - 1)
            pages, page_count = get(block, BLOCK_PAGES) + tile * (SPAN // PAGE) * 8, (count + PAGE - 1) // PAGE
            all_scores(queries, total, head_dim, pages, kv, page_stride, page_count, scores)
            for query in range(total):
                mine, state = scores + query * 4 * SPAN, tiles + query * state_bytes
                if scale_bytes:
                    _scale_scores(mine, kv + scale_bytes, pages, page_stride, page_count)
                _softmax(mine, min(SPAN, seen + query // group), page_count, state)
                if scale_bytes:
                    _scale_scores(mine, kv + scale_bytes + 4 * PAGE, pages, page_stride, page_count)
            all_mixes(scores, total, head_dim, pages, kv, page_stride, count, tiles + STATE_HEAD, state_bytes)
            if part < 0:
                for query in range(total):
                    _merge_state(sums + query * state_bytes, tiles + query * state_bytes, head_dim)
        if part < 0:
            for query in range(total):
                out = get(table, OUT) + (first_row + query // group) * get(table, OUT_STRIDE)
                _finish(sums + query * state_bytes, head_dim, out + (head * group + query % group) * 4 * head_dim)

    @njit(nogil=True, error_model="numpy")
    def attention(table, step, first, last, thread):
        kv_heads, head_dim = get(table, KV_HEADS), get(table, HEAD_DIM)
        per_head = head_bytes(kind, head_dim)
        scale_bytes = 2 * PAGE * head_dim if kind == INT8 else 0
        for item in range(first, last):
            block = get(step, BLOCKS) + item // kv_heads * 8 * BLOCK_FIELDS
            attend(per_head, scale_bytes, table, step, block, item % kv_heads, thread)

    return attention


@stage
def merge(table, step, first, last, thread):
    """Items are rows: their parts merged in order, if they have any, and the row into the next layer's input."""
    heads, head_dim = get(table, HEADS), get(table, HEAD_DIM)
    state_bytes = STATE_HEAD + 4 * head_dim
    target = get(table, TARGET)
    for row in range(first, last):
        out = get(table, OUT) + row * get(table, OUT_STRIDE)
        part, count = get(get(step, PART_ROWS), 2 * row), get(get(step, PART_ROWS), 2 * row + 1)
        if count:
            for head in range(heads):
                state = get(table, PARTS) + (part * heads + head) * state_bytes
                for other in range(1, count):
                    _merge_state(state, state + other * heads * state_bytes, head_dim)
                _finish(state, head_dim, out + 4 * head_dim * head)
        for g in range(heads * head_dim // 32):
            put_group(target, row, g, load_f32(out + 128 * g), load_f32(out + 128 * g + 64))


_attend_float32 = _attending(FLOAT32)


@stage
def attend_float32(table, step, first, last, thread):
    """Items are blocks of rows and KV heads."""
    _attend_float32(table, step, first, last, thread)


_attend_bfloat16 = _attending(BFLOAT16)


@stage
def attend_bfloat16(table, step, first, last, thread):
    """Items are blocks of rows and KV heads."""
    _attend_bfloat16(table, step, first, last, thread)


_attend_int8 = _attending(INT8)


@stage
def attend_int8(table, step, first, last, thread):
    """Items are blocks of rows and KV heads."""
    _attend_int8(table, step, first, last, thread)


def attend_stage(kind: str) -> Stage:
    """For a KV type: "float32", "bfloat16" or "int8"."""
    return {"float32": attend_float32, "bfloat16": attend_bfloat16, "int8": attend_int8}[kind]
