"""SIMD operations on one vector, and the scalars beside them.

Owns the one place that knows LLVM's names for them. Addresses are plain integers. Everything is plain LLVM IR, so it runs on any CPU, but
for what `features.py` names. Both forms of that are exact and give the same bits, as does everything else here: nothing is reassociated
or contracted behind our back. Knows no model and no layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from engine.kernels.cpu.features import F16C, VNNI
from engine.kernels.cpu.vector import (
    B8X64,
    F32,
    F32X16,
    I8,
    I16,
    I32,
    I32X16,
    I64,
    LANES,
    address,
    b8x64,
    emit_call,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    f32x16,
    i32x16,
    lanes,
    op,
    pointer,
)

# Scalars in memory


@op(types.int64, address)
def ld_i64(b, addr):
    return emit_load(b, addr, I64, 8)


@op(types.int64, address, types.intp)
def get(b, table, index):
    """table[index], for a table of int64."""
    return emit_load(b, b.add(table, b.mul(index, I64(8))), I64, 8)


@op(types.float32, address)
def ld_f32(b, addr):
    return emit_load(b, addr, F32, 4)


def _widened(b: Any, addr: Any) -> Any:
    """16 float16 from addr on, as float32. In integers where the CPU has no instruction: LLVM would call a function that is not there."""
    if F16C:
        return b.fpext(emit_load(b, addr, ir.VectorType(ir.HalfType(), LANES), 2), F32X16)
    bits = b.zext(emit_load(b, addr, ir.VectorType(I16, LANES), 2), I32X16)
    magnitude = b.shl(b.and_(bits, lanes(0x7FFF, I32X16)), lanes(13, I32X16))
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, F32X16), lanes(2.0**112)), I32X16)  # the exponents' biases differ by 112; exact
    infinite = b.icmp_signed(">=", magnitude, lanes(0x7C00 << 13, I32X16))
    kept = b.select(infinite, b.or_(magnitude, lanes(0x7F800000, I32X16)), finite)
    sign = b.shl(b.and_(bits, lanes(0x8000, I32X16)), lanes(16, I32X16))
    return b.bitcast(b.or_(kept, sign), F32X16)


@op(types.int64, address)
def ld_u8(b, addr):
    return b.zext(emit_load(b, addr, I8), I64)


@op(types.void, address, types.float32)
def st_f32(b, addr, value):
    emit_store(b, addr, value, 4)


@op(types.void, address, types.int32)
def st_i32(b, addr, value):
    emit_store(b, addr, value, 4)


@op(types.void, address, types.int64)
def st_i64(b, addr, value):
    emit_store(b, addr, value, 8)


@op(types.float32, address)
def bf16_at(b, addr):
    return b.bitcast(b.shl(b.zext(emit_load(b, addr, I16, 2), I32), I32(16)), F32)


# Vectors in memory


@op(f32x16)
def f32_zero(b):
    return lanes(0.0)


@op(f32x16, address)
def load_f32(b, addr):
    return emit_load(b, addr, F32X16, 4)


@op(types.float32, address, types.int64)
def half_at(b, addr, lane):
    """One of 16 float16 values."""
    return b.extract_element(_widened(b, addr), b.trunc(lane, I32))


@op(f32x16, address)
def load_half(b, addr):
    """16 float16 values, widened."""
    return _widened(b, addr)


@op(f32x16, address)
def load_bf16(b, addr):
    """16 bfloat16 values, widened."""
    wide = b.zext(emit_load(b, addr, ir.VectorType(I16, LANES), 2), I32X16)
    return b.bitcast(b.shl(wide, lanes(16, I32X16)), F32X16)


@op(f32x16, address)
def load_i8(b, addr):
    """16 int8 values as float32."""
    return b.sitofp(b.sext(emit_load(b, addr, ir.VectorType(I8, LANES)), I32X16), F32X16)


@op(b8x64, address)
def load_bytes(b, addr):
    return emit_load(b, addr, B8X64)


@op(types.void, address, f32x16)
def store_f32(b, addr, v):
    emit_store(b, addr, v, 4)


@op(types.void, address, i32x16)
def store_i8(b, addr, v):
    emit_store(b, addr, b.trunc(v, ir.VectorType(I8, LANES)))


@op(types.void, address, address, i32x16)
def store_split(b, high, low, v):
    """v = 16 * high + low, each an int8, low in -8 .. 7."""
    upper = b.ashr(b.add(v, lanes(8, I32X16)), lanes(4, I32X16))
    emit_store(b, high, b.trunc(upper, ir.VectorType(I8, LANES)))
    emit_store(b, low, b.trunc(b.sub(v, b.shl(upper, lanes(4, I32X16))), ir.VectorType(I8, LANES)))


_LEAST = 2.0**-50  # products of two such numbers, and what is left of their sums, are far from subnormal


def _to_even(b: Any, v: Any) -> Any:
    bits = b.bitcast(v, I32X16)
    even = b.and_(b.lshr(bits, lanes(16, I32X16)), lanes(1, I32X16))
    return b.and_(b.add(bits, b.add(even, lanes(0x7FFF, I32X16))), lanes(0xFFFF0000, I32X16))


def _rounded(b: Any, v: Any) -> Any:
    """The bits of v as bfloat16 has it, in the upper half of 32."""
    rounded = _to_even(b, v)
    kept = b.select(b.fcmp_unordered("uno", v, v), lanes(0x7FC00000, I32X16), rounded)
    small = b.icmp_unsigned("<", b.and_(kept, lanes(0x7FFFFFFF, I32X16)), b.bitcast(lanes(_LEAST), I32X16))
    return b.select(small, lanes(0, I32X16), kept)


def _bf16(b: Any, v: Any) -> Any:
    return b.trunc(b.lshr(_rounded(b, v), lanes(16, I32X16)), ir.VectorType(I16, LANES))


@op(f32x16, f32x16)
def round_bf16(b, v):
    """Rounded to nearest even, as float32; NaN stays NaN, what is below 2 ** -50 becomes 0."""
    return b.bitcast(_rounded(b, v), F32X16)


@op(f32x16, f32x16)
def round_weight(b, v):
    """`round_bf16` in fewer instructions, for v >= 0 or the NaN that arithmetic makes."""
    rounded = _to_even(b, v)
    return b.bitcast(b.select(b.icmp_unsigned("<", rounded, b.bitcast(lanes(_LEAST), I32X16)), lanes(0, I32X16), rounded), F32X16)


@op(types.void, address, f32x16)
def store_upper(b, addr, v):
    """As bfloat16, which v is already."""
    emit_store(b, addr, b.trunc(b.lshr(b.bitcast(v, I32X16), lanes(16, I32X16)), ir.VectorType(I16, LANES)), 2)


@op(types.void, address, f32x16)
def store_bf16(b, addr, v):
    """As `round_bf16` has it."""
    emit_store(b, addr, _bf16(b, v), 2)


def _put(b: Any, addr: Any, stride: Any, v: Any) -> None:
    """Each lane by itself, `stride` bytes apart."""
    for index in range(v.type.count):
        emit_store(b, b.add(addr, b.mul(stride, I64(index))), b.extract_element(v, I32(index)))


@op(types.void, address, types.intp, f32x16)
def put_f32(b, addr, stride, v):
    _put(b, addr, stride, v)


@op(types.void, address, types.intp, f32x16)
def put_bf16(b, addr, stride, v):
    _put(b, addr, stride, _bf16(b, v))


@op(types.void, address, types.intp, i32x16)
def put_i8(b, addr, stride, v):
    _put(b, addr, stride, b.trunc(v, ir.VectorType(I8, LANES)))


def prefetch_lines(count: int) -> Any:
    """An op: ask for `count` cache lines from an address on, ahead of their use. Any address will do."""

    @op(types.void, address)
    def prefetch(b, addr):
        for line in range(count):
            near = pointer(b, b.add(addr, I64(64 * line)), I8)
            emit_call(b, "llvm.prefetch.p0", ir.VoidType(), near, I32(0), I32(3), I32(1))  # to read, keep near, data

    return prefetch


@op(types.void)
def keep_order(b):
    """No instruction of its own: what reads memory after it is not moved before it.

    LLVM would rather finish one row's sum before it begins the next, which saves registers that nobody needs and makes each instruction
    wait for the one before.
    """
    b.fence("acq_rel", "singlethread")


# Arithmetic on one vector


@op(f32x16, types.float32)
def splat(b, x):
    return emit_splat(b, x, F32X16)


@op(f32x16, f32x16, f32x16)
def add(b, x, y):
    return b.fadd(x, y)


@op(f32x16, f32x16, f32x16)
def sub(b, x, y):
    return b.fsub(x, y)


@op(f32x16, f32x16, f32x16)
def mul(b, x, y):
    return b.fmul(x, y)


@op(f32x16, f32x16)
def reciprocal(b, x):
    """1 / x for normal positive x, to about one part in 2 ** 23: Newton's iteration on a guess from the bits, quicker than a division."""
    guess = b.bitcast(b.sub(lanes(0x7EF311C7, I32X16), b.bitcast(x, I32X16)), F32X16)
    for _ in range(3):
        guess = emit_fma(b, guess, emit_fma(b, b.fsub(lanes(0.0), x), guess, lanes(1.0)), guess)
    return guess


@op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return emit_fma(b, x, y, z)


@op(f32x16, f32x16, f32x16)
def vmax(b, x, y):
    """The larger of each pair; y where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


_ROUND = 12582912.0  # 1.5 * 2 ** 23: adding it leaves a small number's integer in the low bits
_ROUND_BITS = 0x4B400000


@op(i32x16, f32x16)
def round_i32(b, x):
    """To nearest even, for |x| < 2 ** 22; anything else (NaN included) becomes some int32."""
    return b.sub(b.bitcast(b.fadd(x, lanes(_ROUND)), I32X16), lanes(_ROUND_BITS, I32X16))


def _larger(b: Any, x: Any, y: Any) -> Any:
    """The bits of the larger magnitude of each pair. Without their sign, floats order as integers, and NaN is above all."""
    bits = [b.and_(b.bitcast(v, I32X16), lanes(0x7FFFFFFF, I32X16)) for v in (x, y)]
    return b.select(b.icmp_signed(">", *bits), *bits)


@op(f32x16, f32x16, f32x16)
def larger_magnitude(b, x, y):
    """Of each pair; NaN where either is."""
    return b.bitcast(_larger(b, x, y), F32X16)


@op(types.float32, f32x16, f32x16)
def largest_magnitude(b, x, y):
    """Of all lanes of both; NaN if any is."""
    return b.bitcast(emit_call(b, "llvm.vector.reduce.smax.v16i32", I32, _larger(b, x, y)), F32)


@op(f32x16, f32x16, types.int64, types.float32)
def keep_lanes(b, x, count, other):
    """The first `count` lanes of x, then `other`."""
    index = ir.Constant(I32X16, list(range(LANES)))
    return b.select(b.icmp_signed("<", index, emit_splat(b, b.trunc(count, I32), I32X16)), x, emit_splat(b, other, F32X16))


@op(types.float32, f32x16)
def reduce_max(b, x):
    return _halved(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


@op(types.float32, f32x16)
def reduce_add(b, x):
    """Pairwise, always in the same order."""
    return _halved(b, x, b.fadd)


@op(types.int32, i32x16, i32x16)
def reduce_sum_i32(b, x, y):
    """The sum of all lanes of both."""
    return _halved(b, b.add(x, y), b.add)


def _halved(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    while x.type.count > 1:
        half = x.type.count // 2
        parts = [
            b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), ir.Constant(ir.VectorType(I32, half), list(range(start, start + half))))
            for start in (0, half)
        ]
        x = combine(*parts)
    return b.extract_element(x, I32(0))


@op(f32x16, f32x16)
def vexp(b, x):
    """e ** x, relative error about 2e-7; below -87 as at -87, above 87 as at 87. exp(0) is exactly 1. (Cephes' expf)"""
    x = b.select(b.fcmp_ordered("<", x, lanes(-87.0)), lanes(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, lanes(87.0)), lanes(87.0), x)
    shifted = b.fadd(b.fmul(x, lanes(1.4426950408889634)), lanes(_ROUND))
    n, power = b.fsub(shifted, lanes(_ROUND)), b.sub(b.bitcast(shifted, I32X16), lanes(_ROUND_BITS, I32X16))
    r = emit_fma(b, n, lanes(2.12194440e-4), emit_fma(b, n, lanes(-0.693359375), x))
    p = lanes(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = emit_fma(b, p, r, lanes(coefficient))
    p = b.fadd(emit_fma(b, p, b.fmul(r, r), r), lanes(1.0))
    return b.fmul(p, b.bitcast(b.shl(b.add(power, lanes(127, I32X16)), lanes(23, I32X16)), F32X16))


# Bytes


@op(b8x64, b8x64)
def low_nibbles(b, v):
    return b.and_(v, lanes(15, B8X64))


@op(b8x64, b8x64)
def high_nibbles(b, v):
    return b.and_(b.bitcast(b.lshr(b.bitcast(v, I32X16), lanes(4, I32X16)), B8X64), lanes(15, B8X64))


@op(f32x16, address, types.int64, types.int64)
def load_field(b, addr, shift, mask):
    """(each of 16 uint32 >> shift) & mask, as float32; mask < 2 ** 24."""
    words = b.lshr(emit_load(b, addr, I32X16, 4), emit_splat(b, b.trunc(shift, I32), I32X16))
    return b.sitofp(b.and_(words, emit_splat(b, b.trunc(mask, I32), I32X16)), F32X16)


def emit_dot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """total[i] += sum over j < 4 of unsigned[4 i + j] * signed[4 i + j]."""
    if VNNI:
        return emit_call(b, "llvm.x86.avx512.vpdpbusd.512", I32X16, total, unsigned, signed)  # LLVM 20 and newer: byte vectors
    # Even and odd bytes as 16-bit numbers; the products of neighbours added in 32 bits are the oldest SIMD multiply there is (pmaddwd).
    wide, eight = ir.VectorType(I16, 2 * LANES), lanes(8, ir.VectorType(I16, 2 * LANES))
    u, s = b.bitcast(unsigned, wide), b.bitcast(signed, wide)
    for left, right in ((b.and_(u, lanes(255, wide)), b.ashr(b.shl(s, eight), eight)), (b.lshr(u, eight), b.ashr(s, eight))):
        widest = ir.VectorType(I32, 2 * LANES)
        products = b.mul(b.sext(left, widest), b.sext(right, widest))
        for start in (0, 1):
            every_other = ir.Constant(I32X16, list(range(start, 2 * LANES, 2)))
            total = b.add(total, b.shuffle_vector(products, ir.Constant(widest, ir.Undefined), every_other))
    return total


@op(i32x16, i32x16, b8x64, b8x64)
def dot(b, total, unsigned, signed):
    """total[i] += sum over j < 4 of unsigned[4 i + j] * signed[4 i + j], bytes, in 32 bits."""
    return emit_dot(b, total, unsigned, signed)
