"""Linear layers over packed weights, each with what comes right after it.

Owns the order of tiles and rows, and the epilogues: keep the outputs, add them to the residual stream, or silu(gate) * up into the next
layer's input. One stage for each weight format and form of input. Knows no attention and no model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels.cpu.rows import COARSE, FINE, LOW, PLAIN, SCALE, TOTAL, X, put_group
from engine.kernels.cpu.simd import add, f32_zero, get, load_f32, mul, reciprocal, splat, store_f32, sub, vexp
from engine.kernels.cpu.stage import STAGES, Stage, stage
from engine.kernels.cpu.tiles import AT_ONCE, BFLOAT16, BLOCK, FLOAT32, Q4_0, Q4_1, Q8_0, float_tile, group_bytes, integer_tile

# A linear layer's table: int64. Addresses unless said otherwise.
WEIGHTS, KIND, GROUPS, INPUT, OUT, OUT_STRIDE, EPILOGUE, BIAS, ROW_COUNT, TARGET, SCRATCH, SCRATCH_STRIDE, LINEAR_FIELDS = range(13)
#   KIND: the weights' format; GROUPS: of 32 inputs; INPUT: an input's table; OUT: float32 [rows, outputs], OUT_STRIDE bytes from row to
#   row; EPILOGUE: one of the next three; BIAS: float32 [outputs], 0: none; ROW_COUNT: which field of the step counts the rows; TARGET:
#   SWIGLU's input table; SCRATCH: SCRATCH_STRIDE bytes for each thread
KEEP, ADD, SWIGLU = range(3)

ROW_BLOCK = 32  # rows that share a tile while it is in the first-level cache
SCRATCH_BYTES = ROW_BLOCK * 64 * 4  # of a unit's outputs on their way to an epilogue
UNIT = 4  # tiles of an item with SWIGLU: two of gate and the two of up that go with them


def _multiplier(kind: int, form: int) -> Any:
    """multiply(w, groups, input, row, rows, y, y_stride): one tile for rows from a block's start on, as many at once as registers hold."""
    if form == PLAIN:
        one, two, four, eight = (float_tile(kind, rows) for rows in (1, 2, 4, 8))
    else:
        one, two, four, eight = (integer_tile(kind, form == FINE, rows) for rows in (1, 2, 4, 8))

    @njit(nogil=True, error_model="numpy")
    def integer(w, groups, source, row, rows, y, y_stride):
        x, low, scale, total = get(source, X), get(source, LOW), get(source, SCALE), get(source, TOTAL)
        end = row + rows
        while row < end:
            at, lane = row // BLOCK * groups * BLOCK, row % BLOCK
            a, b = x + 32 * (at + lane), low + 32 * (at + lane)
            of_row = 4 * (row // AT_ONCE * groups * AT_ONCE + row % AT_ONCE)
            c, d = scale + of_row, total + of_row
            if end - row >= 8:
                eight(w, groups, a, b, c, d, y, y_stride)
                count = 8
            elif end - row >= 4:
                four(w, groups, a, b, c, d, y, y_stride)
                count = 4
            elif end - row >= 2:
                two(w, groups, a, b, c, d, y, y_stride)
                count = 2
            else:
                one(w, groups, a, b, c, d, y, y_stride)
                count = 1
            row += count
            y += count * y_stride

    @njit(nogil=True, error_model="numpy")
    def plain(w, groups, source, row, rows, y, y_stride):
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
    """A stage's function for one format and form. Items are tiles of 16 outputs, or units of four with SWIGLU."""
    multiply = _multiplier(kind, form)

    @njit(nogil=True, error_model="numpy")
    def linear(table, step, first, last, thread):
        groups, source = get(table, GROUPS), get(table, INPUT)
        weights, tile_bytes = get(table, WEIGHTS), groups * group_bytes(get(table, KIND))
        out, out_stride = get(table, OUT), get(table, OUT_STRIDE)
        epilogue, bias = get(table, EPILOGUE), get(table, BIAS)
        scratch = get(table, SCRATCH) + thread * get(table, SCRATCH_STRIDE)
        rows = get(step, get(table, ROW_COUNT))
        tiles = UNIT if epilogue == SWIGLU else 1
        for start in range(0, rows, ROW_BLOCK):
            count = min(ROW_BLOCK, rows - start)
            for item in range(first, last):
                kept = out + start * out_stride + 64 * item
                y, y_stride = (kept, out_stride) if epilogue == KEEP else (scratch, 64 * tiles)
                for part in range(tiles):
                    tile = tiles * item + part
                    multiply(weights + tile * tile_bytes, groups, source, start, count, y + 64 * part, y_stride)
                    if bias:
                        _add_bias(y + 64 * part, y_stride, bias + 64 * tile, count)
                if epilogue == ADD:
                    _add_tile(kept, out_stride, scratch, count)
                elif epilogue == SWIGLU:
                    _swiglu(scratch, get(table, TARGET), start, count, item)

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
