"""Attention over the paged KV cache, for decode and prefill rows alike.

Owns the order of it: tiles of 128 positions, each softmaxed by itself, merged in order. Tiles lie at multiples of 128, whatever the batch,
the chunk or the block size, so a row's result has the same bits in all of them. With a bfloat16 cache, queries and softmax weights are
rounded to bfloat16 too, so that a matrix unit can multiply them. Knows the cache's pages, and no linear layer.

Sources: grouped queries (Ainslie et al., 2023), online softmax (Milakov and Gimelshein, 2018), splitting over KV (Flash-Decoding, 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels.cpu import attention_matrix, matrix
from engine.kernels.cpu.features import MATRIX
from engine.kernels.cpu.kv import (
    BFLOAT16,
    CACHE,
    FLOAT32,
    HEAD_DIM,
    HEADS,
    INT8,
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
    load_f32,
    mul,
    reduce_add,
    reduce_max,
    round_bf16,
    round_weight,
    splat,
    store_bf16,
    store_f32,
    store_upper,
    sub,
    vexp,
    vmax,
)
from engine.kernels.cpu.stage import Stage, stage
from engine.kernels.cpu.strips import SPAN, strips
from engine.kernels.cpu.tiles import BLOCK

# A block of rows of one sequence, int64: an item of attention is a block and a KV head.
BLOCK_ROW, BLOCK_ROWS, BLOCK_PAGES, BLOCK_TILE, BLOCK_TILES, BLOCK_PART, BLOCK_FIELDS = range(7)
#   BLOCK_PAGES: address of the sequence's pages, int64; BLOCK_TILE, BLOCK_TILES: the tiles to go through; BLOCK_PART: -1 to finish the
#   rows, else where in PARTS to leave the state of the one row after the one tile

# A state: the softmax of some positions for one query, float32: the largest score in 16 lanes, the sum of exponentials in 16 lanes, the
# mix [head_dim].
STATE_HEAD = 128  # bytes before the mix
# Queries that a block should have: enough to make a tile of keys worth its load (and its way into the matrix unit), few enough for the
# caches.
QUERIES = 48 if MATRIX else 24
MATRIX_LEAST = 12  # queries that make a block worth the matrix unit

_NONE = np.float32(-np.inf)


def scratch_bytes(head_dim: int, group: int) -> int:
    """What a thread needs for blocks of up to max(QUERIES, group) queries: the queries, their scores, two states for each, and what the
    matrix unit reads."""
    queries = -(-max(QUERIES, group) // BLOCK) * BLOCK
    size = queries * (4 * head_dim + 4 * SPAN + 2 * (STATE_HEAD + 4 * head_dim))
    return size + (queries * (2 * head_dim + 2 * SPAN) + 2 * SPAN * head_dim if MATRIX else 0)


@njit(nogil=True, error_model="numpy")
def _scale_scores(scores, scales, pages, page_stride, count):
    """scores [SPAN] of `count` pages times each position's scale (int8)."""
    for index in range(count):
        at = scores + 64 * index
        store_f32(at, mul(load_f32(at), load_f32(scales + get(pages, index) * page_stride)))


def _softmaxing(narrow: bool) -> Any:
    """softmax(scores, valid, count, weights, state): the first `valid` of `count` pages of scores to exponentials, the others to 0.

    They take the scores' place; narrow: as bfloat16 has them, and as such to `weights` if that is not 0. The largest score and the sum go
    to the state.
    """

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def put(p, scores, weights, index):
        if narrow and weights:
            store_upper(weights + 32 * index, p)
        else:
            store_f32(scores + 64 * index, p)

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def exponential(score, largest):
        p = vexp(sub(score, largest))
        return round_weight(p) if narrow else p

    @njit(nogil=True, error_model="numpy")
    def softmax(scores, valid, count, weights, state):
        full, rest = max(valid, 0) // PAGE, max(valid, 0) % PAGE
        largest = splat(_NONE)
        for index in range(full):
            largest = vmax(load_f32(scores + 64 * index), largest)
        if rest:
            largest = vmax(keep_lanes(load_f32(scores + 64 * full), rest, _NONE), largest)
        largest = splat(reduce_max(largest))
        total = f32_zero()
        for index in range(full):
            p = exponential(load_f32(scores + 64 * index), largest)
            total = add(total, p)
            put(p, scores, weights, index)
        if rest:
            p = keep_lanes(exponential(load_f32(scores + 64 * full), largest), rest, np.float32(0.0))
            total = add(total, p)
            put(p, scores, weights, full)
            full += 1
        for index in range(full, count):
            put(f32_zero(), scores, weights, index)
        store_f32(state, largest)
        store_f32(state + 64, splat(reduce_add(total)))

    return softmax


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
    all_scores, all_mixes = strips(kind)
    narrow = kind == BFLOAT16
    softmax = _softmaxing(narrow)
    by_matrix = MATRIX and narrow

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
        padded = (total + BLOCK - 1) // BLOCK * BLOCK
        queries = get(table, SCRATCH) + thread * get(table, SCRATCH_STRIDE)
        scores = queries + padded * 4 * head_dim
        sums = scores + padded * 4 * SPAN
        own = sums + padded * state_bytes
        tiles = get(table, PARTS) + (part * heads + head * group) * state_bytes if part >= 0 else own
        narrow_queries = own + padded * state_bytes
        narrow_weights = narrow_queries + padded * 2 * head_dim
        room = narrow_weights + padded * 2 * SPAN
        through_matrix = by_matrix and part < 0 and total >= MATRIX_LEAST and head_dim % 32 == 0
        if through_matrix:
            matrix.matrix_begin()
        factor = splat(np.float32(1.0) / np.sqrt(np.float32(head_dim)))
        for row in range(rows):
            source = get(table, QKV) + (first_row + row) * get(table, QKV_STRIDE) + head * group * 4 * head_dim
            for i in range(0, group * 4 * head_dim, 64):
                at, q = row * group * 4 * head_dim + i, mul(load_f32(source + i), factor)
                store_f32(queries + at, round_bf16(q) if narrow else q)
                if through_matrix:
                    store_bf16(narrow_queries + at // 2, q)
        for query in range(total):
            store_f32(sums + query * state_bytes + 64, f32_zero())
        for tile in range(get(block, BLOCK_TILE), get(block, BLOCK_TILE) + get(block, BLOCK_TILES)):
            seen = position + 1 - tile * SPAN  # positions of the tile that the first row sees
            count = min(SPAN, seen + rows - 1)
            pages, page_count = get(block, BLOCK_PAGES) + tile * (SPAN // PAGE) * 8, (count + PAGE - 1) // PAGE
            if through_matrix:
                attention_matrix.scores(narrow_queries, total, head_dim, pages, kv, page_stride, page_count, room, scores)
            else:
                all_scores(queries, total, head_dim, pages, kv, page_stride, page_count, scores)
            for query in range(total):
                mine, state = scores + query * 4 * SPAN, tiles + query * state_bytes
                if scale_bytes:
                    _scale_scores(mine, kv + scale_bytes, pages, page_stride, page_count)
                weights = narrow_weights + query * 2 * SPAN if through_matrix else 0
                softmax(mine, min(SPAN, seen + query // group), page_count, weights, state)
                if scale_bytes:
                    _scale_scores(mine, kv + scale_bytes + 4 * PAGE, pages, page_stride, page_count)
            mixed = tiles + STATE_HEAD
            if through_matrix:
                attention_matrix.mix(narrow_weights, total, head_dim, pages, kv, page_stride, count, room, mixed, state_bytes)
            else:
                all_mixes(scores, total, head_dim, pages, kv, page_stride, count, mixed, state_bytes)
            if part < 0:
                for query in range(total):
                    _merge_state(sums + query * state_bytes, tiles + query * state_bytes, head_dim)
        if through_matrix:
            matrix.matrix_end()
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
