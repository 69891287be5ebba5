"""SIMD operations on rows: plain tuples of vectors, one for each row of activations.

Owns what tiles are made of. An operation is emitted once for each row of the tuple, so that a loop over rows costs nothing and every row
goes through the same instructions. Knows no layout beyond a distance in bytes from row to row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.cpu.simd import emit_dot
from engine.kernels.cpu.vector import (
    B8X64,
    F32,
    F32X16,
    I32,
    I32X16,
    I64,
    address,
    b8x64,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    f32x16,
    generic_op,
    i32x16,
    lanes,
    op,
)


def _per_row(*arguments: types.Type) -> Callable[..., tuple[types.Type, tuple[types.Type, ...]]]:
    """(rows, *arguments) -> rows."""
    return lambda rows, *_: (rows, (rows, *arguments))


def _each(b: Any, rows: Any, change: Callable[[int, Any], Any]) -> Any:
    values = [change(index, b.extract_value(rows, index)) for index in range(rows.type.count)]
    return cgutils.pack_array(b, values)


def _at(b: Any, addr: Any, index: int, stride: Any) -> Any:
    return b.add(addr, b.mul(stride, I64(index))) if index else addr


def rows_f32(count: int) -> Any:
    """An op without arguments: `count` rows of zeros."""

    @op(types.UniTuple(f32x16, count))
    def zeros(b):
        return ir.Constant(ir.ArrayType(F32X16, count), None)

    return zeros


@generic_op(_per_row(b8x64, address, types.intp), 4)
def dot_rows(b, rows, weights, x, stride):
    """rows[r][i] += the dot product of the 4 weights of lane i and the 4 bytes at x + r * stride."""

    def change(index: int, total: Any) -> Any:
        quad = emit_load(b, _at(b, x, index, stride), I32)
        return emit_dot(b, total, weights, b.bitcast(emit_splat(b, quad, I32X16), B8X64))

    return _each(b, rows, change)


@generic_op(lambda rows, *_: (types.UniTuple(i32x16, rows.count), (rows, address, types.intp)), 3)
def splat_rows_i32(b, rows, addr, stride):
    """As many rows as `rows` has: the int32 at addr + r * stride, in each lane."""
    return cgutils.pack_array(
        b, [emit_splat(b, emit_load(b, _at(b, addr, index, stride), I32, 4), I32X16) for index in range(rows.type.count)]
    )


@generic_op(lambda rows, *_: (types.UniTuple(i32x16, rows.count), (rows, address, types.intp)), 3)
def load_rows_i32(b, rows, addr, stride):
    """As many rows as `rows` has: 16 int32 each, at addr + r * stride."""
    return cgutils.pack_array(b, [emit_load(b, _at(b, addr, index, stride), I32X16, 4) for index in range(rows.type.count)])


@generic_op(_per_row(address, types.intp), 3)
def load_rows(b, rows, addr, stride):
    """As many rows as `rows` has: 16 float32 each, at addr + r * stride."""
    return _each(b, rows, lambda index, _: emit_load(b, _at(b, addr, index, stride), F32X16, 4))


@generic_op(lambda rows, *_: (types.UniTuple(i32x16, rows.count), (rows,)), 1)
def zero_rows_i32(b, rows):
    """As many rows as `rows` has, all zero."""
    return ir.Constant(ir.ArrayType(I32X16, rows.type.count), None)


@generic_op(lambda rows, other: (rows, (rows, other)), 2)
def high_and_low(b, high, low):
    """16 * high + low."""
    return _each(b, high, lambda index, value: b.add(b.shl(value, lanes(4, I32X16)), b.extract_value(low, index)))


@generic_op(lambda rows, sums, *_: (rows, (rows, sums, f32x16, address, types.intp)), 5)
def scale_rows(b, rows, sums, scale, x_scale, stride):
    """rows[r] += sums[r] * (scale * the float32 at x_scale + r * stride)."""

    def change(index: int, total: Any) -> Any:
        both = b.fmul(scale, emit_splat(b, emit_load(b, _at(b, x_scale, index, stride), F32, 4), F32X16))
        return emit_fma(b, b.sitofp(b.extract_value(sums, index), F32X16), both, total)

    return _each(b, rows, change)


@generic_op(_per_row(f32x16, address, types.intp), 4)
def fma_rows(b, rows, v, x, stride):
    """rows[r] += v * the float32 at x + r * stride."""
    return _each(b, rows, lambda index, total: emit_fma(b, v, emit_splat(b, emit_load(b, _at(b, x, index, stride), F32, 4), F32X16), total))


@generic_op(lambda rows, other: (rows, (rows, other)), 2)
def add_rows_i32(b, rows, other):
    return _each(b, rows, lambda index, value: b.add(value, b.extract_value(other, index)))


@generic_op(lambda rows, other: (rows, (rows, other)), 2)
def add_rows(b, rows, other):
    return _each(b, rows, lambda index, value: b.fadd(value, b.extract_value(other, index)))


@generic_op(lambda rows, *_: (types.void, (rows, address, types.intp)), 3)
def store_rows(b, rows, addr, stride):
    """rows[r] to addr + r * stride."""
    for index in range(rows.type.count):
        emit_store(b, _at(b, addr, index, stride), b.extract_value(rows, index), 4)
