"""Queries times keys, and weights times values, in bfloat16 on the CPU's matrix unit (AMX), 16 queries at a time.

Owns how pages are laid out for the unit. It sums even and odd terms apart in fused multiply-adds, adds the two, and then adds them to
what was there, so `strips.py`, which does the same, gives the same bits. It takes subnormal numbers for zero: there are none, since what
is stored as bfloat16 is 0 or at least 2 ** -50 (see `simd.round_bf16`). Only where `features.MATRIX` says so.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types

from engine.kernels.cpu.kv import PAGE
from engine.kernels.cpu.matrix import emit_matrix
from engine.kernels.cpu.simd import get
from engine.kernels.cpu.strips import PAIRED, SPAN
from engine.kernels.cpu.tiles import BLOCK
from engine.kernels.cpu.vector import I8, I16, I32X16, I64, LANES, address, emit_load, emit_store, lanes, op, pointer

_HALVES = ir.VectorType(I16, LANES)


@op(types.void, address, address, address)
def _pair(b, even, odd, to):
    """16 bfloat16 from each address, by turns."""
    low, high = (b.zext(emit_load(b, at, _HALVES, 2), I32X16) for at in (even, odd))
    emit_store(b, to, b.or_(low, b.shl(high, lanes(16, I32X16))))


@op(types.void, address, address)
def _pair_with_zeros(b, even, to):
    emit_store(b, to, b.zext(emit_load(b, even, _HALVES, 2), I32X16))


@op(types.void, address)
def _zeros(b, to):
    emit_store(b, to, lanes(0, I32X16))


@op(types.void)
def _clear_sums(b):
    emit_matrix(b, "tilezero", I8(0))


@op(types.void, address, types.intp, address)
def _add_wide(b, x, x_stride, w):
    """sums [16, 16] += x [16, 32], rows `x_stride` bytes apart, times w [16, 16, 2]."""
    emit_matrix(b, "tileloadd64", I8(5), pointer(b, w, I8), I64(64))
    emit_matrix(b, "tileloadd64", I8(4), pointer(b, x, I8), x_stride)
    emit_matrix(b, "tdpbf16ps", I8(0), I8(4), I8(5))


@op(types.void, address, types.intp, address, types.intp)
def _add_narrow(b, x, x_stride, w, w_stride):
    """sums [16, 16] += x [16, 16] times w [8, 16, 2], each with its rows so many bytes apart."""
    emit_matrix(b, "tileloadd64", I8(3), pointer(b, w, I8), w_stride)
    emit_matrix(b, "tileloadd64", I8(2), pointer(b, x, I8), x_stride)
    emit_matrix(b, "tdpbf16ps", I8(0), I8(2), I8(3))


@op(types.void, address, types.intp)
def _store_sums(b, out, out_stride):
    emit_matrix(b, "tilestored64", I8(0), pointer(b, out, I8), out_stride)


@njit(nogil=True, error_model="numpy")
def scores(queries, total, head_dim, pages, kv, page_stride, count, room, out):
    """bfloat16 queries [total, head_dim] times the keys of `count` pages, into out float32 [total, SPAN]; both with room for whole blocks
    of 16. room: 32 * head_dim bytes."""
    for index in range(count):
        keys = kv + get(pages, index) * page_stride
        for pair in range(head_dim // 2):
            _pair(keys + 4 * PAGE * pair, keys + 4 * PAGE * pair + 2 * PAGE, room + 64 * pair)
        for query in range(0, total, BLOCK):
            _clear_sums()
            for start in range(0, head_dim, PAIRED):
                _add_wide(queries + 2 * (head_dim * query + start), 2 * head_dim, room + 32 * start)
            _store_sums(out + 4 * (SPAN * query + PAGE * index), 4 * SPAN)


@njit(nogil=True, error_model="numpy")
def mix(weights, total, head_dim, pages, kv, page_stride, count, room, out, out_stride):
    """bfloat16 weights [total, SPAN] times the values of the first `count` positions, into out float32 [total, head_dim]; both with room
    for whole blocks of 16. room: 2 * SPAN * head_dim bytes."""
    row = 2 * head_dim  # bytes of a position
    for index in range(0, count, PAGE):
        values = kv + PAGE * row + get(pages, index // PAGE) * page_stride
        for position in range(0, PAGE, 2):
            to = room + row * (index + position)
            left = count - index - position
            for i in range(0, row, 32):
                at = values + row * position + i
                if left > 1:
                    _pair(at, at + row, to + 2 * i)
                elif left == 1:
                    _pair_with_zeros(at, to + 2 * i)
                else:
                    _zeros(to + 2 * i)
    for query in range(0, total, BLOCK):
        for i in range(0, row, 32):
            _clear_sums()
            for index in range(0, count, PAGE):
                _add_narrow(weights + 2 * (SPAN * query + index), 2 * SPAN, room + row * index + 2 * i, 2 * row)
            _store_sums(out + out_stride * query + 2 * i, out_stride)
