"""Linear layers over packed weights, each with what comes right after it.

Owns the order of tiles and rows, and the epilogues: keep the outputs, add them to the residual stream, or silu(gate) * up into the next
layer's input. One stage for each weight format and form of input. Knows no attention and no model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels.cpu import matrix
from engine.kernels.cpu.features import MATRIX
from engine.kernels.cpu.rows import COARSE, FINE, PLAIN, ROWS, SAMPLES, SCALE, SHARES, TOTAL, X, put_group
from engine.kernels.cpu.simd import add, f32_zero, get, load_f32, mul, reciprocal, splat, store_f32, sub, vexp
from engine.kernels.cpu.stage import STAGES, Stage, stage
from engine.kernels.cpu.tiles import AT_ONCE, BFLOAT16, BLOCK, FLOAT32, Q4_0, Q4_1, Q8_0, float_tile, group_bytes, integer_tile

# A linear layer's table: int64. Addresses unless said otherwise.
WEIGHTS, KIND, GROUPS, ITEMS, INPUT, OUT, OUT_STRIDE, EPILOGUE, BIAS, SAMPLED, TARGET, SCRATCH, SCRATCH_STRIDE, LINEAR_FIELDS = range(14)
#   KIND: the weights' format; GROUPS: of 32 inputs; ITEMS: how many a share of the rows has; INPUT: an input's table; OUT: float32 [rows,
#   outputs], OUT_STRIDE bytes from row to row; EPILOGUE: one of the next three; BIAS: float32 [outputs], 0: none; SAMPLED: 1 for the
#   sampled rows, in one share; TARGET: SWIGLU's input table; SCRATCH: SCRATCH_STRIDE bytes for each thread
KEEP, ADD, SWIGLU = range(3)

VECTOR_ROWS = 32  # that share a tile while it is in the first-level cache
MATRIX_ROWS = 128  # that share a tile once it is unpacked
MATRIX_LEAST = 24  # rows that are worth unpacking a tile for the matrix unit
MATRIX_LAST = 12  # rows of a block that is not full that are, since it takes as long as a full one
UNIT = 4  # tiles of an item with SWIGLU: two of gate and the two of up that go with them
_UNIT_BYTES = (MATRIX_ROWS if MATRIX else VECTOR_ROWS) * 64 * UNIT  # of a unit's outputs on their way to an epilogue
SCRATCH_BYTES = _UNIT_BYTES + (matrix.SCRATCH_BYTES if MATRIX else 0)


def _multiplier(kind: int, form: int) -> Any:
    """multiply(w, groups, input, row, rows, y, y_stride, scratch): one tile for rows from a block's start on, as many at once as registers
    hold."""
    by_matrix = form != PLAIN and matrix.available(kind, form == FINE)
    blocks: Any = matrix.matrix_tile(kind, form == FINE) if by_matrix else None
    row_bytes = 64 if form == FINE else 32
    if form == PLAIN:
        one, two, four, eight = (float_tile(kind, rows) for rows in (1, 2, 4, 8))
    else:
        one, two, four, eight = (integer_tile(kind, form == FINE, rows) for rows in (1, 2, 4, 8))

    @njit(nogil=True, error_model="numpy")
    def integer(w, groups, source, row, rows, y, y_stride, scratch):
        x, scale, total = get(source, X), get(source, SCALE), get(source, TOTAL)
        end = row + rows
        while row < end:
            at = row // BLOCK * groups * BLOCK + row % BLOCK
            of_row = row // AT_ONCE * groups * AT_ONCE + row % AT_ONCE
            a, b, c = x + row_bytes * at, scale + 4 * of_row, total + 4 * of_row
            if by_matrix and end - row >= MATRIX_LEAST and row % BLOCK == 0:
                count = end - row if (end - row) % BLOCK >= MATRIX_LAST else (end - row) // BLOCK * BLOCK
                blocks(w, groups, a, b, c, count, y, y_stride, scratch)
            elif end - row >= 8:
                eight(w, groups, a, b, c, y, y_stride)
                count = 8
            elif end - row >= 4:
                four(w, groups, a, b, c, y, y_stride)
                count = 4
            elif end - row >= 2:
                two(w, groups, a, b, c, y, y_stride)
                count = 2
            else:
                one(w, groups, a, b, c, y, y_stride)
                count = 1
            row += count
            y += count * y_stride

    @njit(nogil=True, error_model="numpy")
    def plain(w, groups, source, row, rows, y, y_stride, scratch):
        x = get(source, X)
        end = row + rows
        while row < end:
            a = x + 128 * (row // BLOCK * groups * BLOCK + row % BLOCK)
            if end - row >= 8:
                eight(w, groups, a, y, y_stride)
                count = 8
            elif end - row >= 4:
                four(w, groups, a, y, y_stride)
                count = 4
            elif end - row >= 2:
                two(w, groups, a, y, y_stride)
                count = 2
            else:
                one(w, groups, a, y, y_stride)
                count = 1
            row += count
            y += count * y_stride

    return plain if form == PLAIN else integer


@njit(nogil=True, error_model="numpy")
def _add_tile(out, out_stride, tile, rows):
    """out += tile [rows, 16]."""
    for row in range(rows):
        at = out + row * out_stride
        store_f32(at, add(load_f32(at), load_f32(tile + 64 * row)))


@njit(nogil=True, error_model="numpy")
def _add_bias(out, out_stride, bias, rows):
    for row in range(rows):
        at = out + row * out_stride
        store_f32(at, add(load_f32(at), load_f32(bias)))


@njit(nogil=True, error_model="numpy")
def _silu_mul(gate, up):
    return mul(mul(gate, up), reciprocal(add(splat(np.float32(1.0)), vexp(sub(f32_zero(), gate)))))


@njit(nogil=True, error_model="numpy")
def _swiglu(unit, target, first_row, rows, group):
    """unit float32 [rows, 64]: 32 values of gate, 32 of up, into group `group` of the target. (SwiGLU: Shazeer, 2020)"""
    for row in range(rows):
        at = unit + 256 * row
        a = _silu_mul(load_f32(at), load_f32(at + 128))
        b = _silu_mul(load_f32(at + 64), load_f32(at + 192))
        put_group(target, first_row + row, group, a, b)


def _layer(kind: int, form: int) -> Any:
    """A stage's function for one format and form. Items are tiles of 16 outputs, or units of four with SWIGLU, for the
    first share of the rows, then for the next."""
    multiply = _multiplier(kind, form)
    by_matrix = form != PLAIN and matrix.available(kind, form == FINE)
    row_block = MATRIX_ROWS if by_matrix else VECTOR_ROWS

    @njit(nogil=True, error_model="numpy")
    def share(table, source, begin, end, first, last, thread):
        """Items first .. last - 1 for rows begin .. end - 1."""
        groups, weights = get(table, GROUPS), get(table, WEIGHTS)
        tile_bytes = groups * group_bytes(get(table, KIND))
        out, out_stride = get(table, OUT), get(table, OUT_STRIDE)
        epilogue, bias = get(table, EPILOGUE), get(table, BIAS)
        unit = get(table, SCRATCH) + thread * get(table, SCRATCH_STRIDE)
        scratch = unit + _UNIT_BYTES
        tiles = UNIT if epilogue == SWIGLU else 1
        for start in range(begin, end, row_block):
            count = min(row_block, end - start)
            for item in range(first, last):
                kept = out + start * out_stride + 64 * item
                y, y_stride = (kept, out_stride) if epilogue == KEEP else (unit, 64 * tiles)
                for part in range(tiles):
                    tile = tiles * item + part
                    multiply(weights + tile * tile_bytes, groups, source, start, count, y + 64 * part, y_stride, scratch)
                    if bias:
                        _add_bias(y + 64 * part, y_stride, bias + 64 * tile, count)
                if epilogue == ADD:
                    _add_tile(kept, out_stride, unit, count)
                elif epilogue == SWIGLU:
                    _swiglu(unit, get(table, TARGET), start, count, item)

    @njit(nogil=True, error_model="numpy")
    def linear(table, step, first, last, thread):
        items, sampled = get(table, ITEMS), get(table, SAMPLED)
        rows, shares = (get(step, SAMPLES), 1) if sampled else (get(step, ROWS), get(step, SHARES))
        blocks = (rows + BLOCK - 1) // BLOCK
        if by_matrix and rows >= MATRIX_LEAST:
            matrix.matrix_begin()
        while first < last:
            which = first // items
            upto = min(last, (which + 1) * items)
            begin, end = blocks * which // shares * BLOCK, min(rows, blocks * (which + 1) // shares * BLOCK)
            share(table, get(table, INPUT), begin, end, first - which * items, upto - which * items, thread)
            first = upto
        if by_matrix and rows >= MATRIX_LEAST:
            matrix.matrix_end()

    return linear


_q4_1_coarse = _layer(Q4_1, COARSE)
_q4_1_fine = _layer(Q4_1, FINE)
_q4_0_coarse = _layer(Q4_0, COARSE)
_q4_0_fine = _layer(Q4_0, FINE)
_q8_0_coarse = _layer(Q8_0, COARSE)
_q8_0_fine = _layer(Q8_0, FINE)
_q4_1_plain = _layer(Q4_1, PLAIN)
_q4_0_plain = _layer(Q4_0, PLAIN)
_q8_0_plain = _layer(Q8_0, PLAIN)
_float32_plain = _layer(FLOAT32, PLAIN)
_bfloat16_plain = _layer(BFLOAT16, PLAIN)


@stage
def linear_q4_1_coarse(table, step, first, last, thread):
    _q4_1_coarse(table, step, first, last, thread)


@stage
def linear_q4_1_fine(table, step, first, last, thread):
    _q4_1_fine(table, step, first, last, thread)


@stage
def linear_q4_0_coarse(table, step, first, last, thread):
    _q4_0_coarse(table, step, first, last, thread)


@stage
def linear_q4_0_fine(table, step, first, last, thread):
    _q4_0_fine(table, step, first, last, thread)


@stage
def linear_q8_0_coarse(table, step, first, last, thread):
    _q8_0_coarse(table, step, first, last, thread)


@stage
def linear_q8_0_fine(table, step, first, last, thread):
    _q8_0_fine(table, step, first, last, thread)


@stage
def linear_q4_1_plain(table, step, first, last, thread):
    _q4_1_plain(table, step, first, last, thread)


@stage
def linear_q4_0_plain(table, step, first, last, thread):
    _q4_0_plain(table, step, first, last, thread)


@stage
def linear_q8_0_plain(table, step, first, last, thread):
    _q8_0_plain(table, step, first, last, thread)


@stage
def linear_float32_plain(table, step, first, last, thread):
    _float32_plain(table, step, first, last, thread)


@stage
def linear_bfloat16_plain(table, step, first, last, thread):
    _bfloat16_plain(table, step, first, last, thread)


def linear_stage(kind: str, form: int) -> Stage:
    """The stage for packed weights of a format and inputs of a form; its items are tiles of 16 outputs, or units of four with SWIGLU.

    Raises: KeyError for float weights with integer inputs.
    """
    return STAGES[f"linear_{kind}_{('plain', 'coarse', 'fine')[form]}"]
