"""One tile of a linear layer, 16 outputs, for blocks of 16 rows on the CPU's matrix unit (AMX).

Owns the unit's instructions and the order in which blocks go through it. The integers are those of `tiles.py`, and what follows them is
the same operations in the same order, so a row's result has the same bits either way. Only where `features.MATRIX` says so.

The unit multiplies 16 rows of 64 signed bytes by 64 x 16 unsigned ones. A row has 32 to a group: a fine one fills the other half with its
low bytes, against weights a sixteenth of those its high bytes meet, so that it costs little more than a coarse one.

Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from engine.kernels.cpu.features import MATRIX
from engine.kernels.cpu.simd import load_f32, load_half, prefetch_lines, store_f32
from engine.kernels.cpu.simd_rows import (
    add_rows_i32,
    fma_rows,
    load_rows,
    load_rows_i32,
    rows_f32,
    scale_rows,
    splat_rows_i32,
    store_rows,
)
from engine.kernels.cpu.tiles import AT_ONCE, BLOCK, GROUP_BYTES, Q4_0, Q4_1, Q8_0
from engine.kernels.cpu.vector import B8X64, I8, I32X16, I64, address, emit_call, emit_load, emit_store, lanes, op, pointer

SEGMENT = 24  # groups whose weights are unpacked at a time: they stay in the first-level cache
SUMS_BYTES = 2 * 1024  # int32 [2, 16, 16]: a group's sums on their way out of the unit, and the next one's
LAST_BYTES = 1024  # float32 [16, 16]: the outputs of a block that is not full
SCRATCH_BYTES = SUMS_BYTES + LAST_BYTES + 1024 * SEGMENT

# The unit's registers: 0 holds sums; 2 and 3 rows of 32 bytes and their weights, 4 and 5 rows of 64 and theirs.
_SHAPES = {0: (16, 64), 2: (16, 32), 3: (8, 64), 4: (16, 64), 5: (16, 64)}  # rows, bytes of each


def available(kind: int, fine: bool) -> bool:
    """Whether weights of this kind go through the unit: of 8 bits, there is no byte that holds 16 times as much."""
    return MATRIX and kind in ((Q4_0, Q4_1) if fine else (Q4_0, Q4_1, Q8_0))


def _configuration() -> bytes:
    data = bytearray(64)
    data[0] = 1  # the palette
    for register, (rows, width) in _SHAPES.items():
        data[16 + 2 * register : 18 + 2 * register] = width.to_bytes(2, "little")
        data[48 + register] = rows
    return bytes(data)


def emit_matrix(b: Any, name: str, *arguments: Any) -> None:
    """One of the unit's instructions, by LLVM's name."""
    emit_call(b, f"llvm.x86.{name}", ir.VoidType(), *arguments)


@op(types.void)
def matrix_begin(b):
    """Have the unit ready in this thread."""
    data = _configuration()
    constant = ir.Constant(ir.ArrayType(I8, len(data)), bytearray(data))
    emit_matrix(b, "ldtilecfg", b.bitcast(cgutils.global_constant(b, "matrix_shapes", constant), I8.as_pointer()))


@op(types.void)
def matrix_end(b):
    """Give the unit back: a thread that holds it costs the system more to switch."""
    emit_matrix(b, "tilerelease")


def _product(fine: bool) -> Any:
    sums_register, x_register, w_register = I8(0), *((I8(4), I8(5)) if fine else (I8(2), I8(3)))

    @op(types.void, address, address, address)
    def product(b, x, w, sums):
        """sums int32 [16, 16] = rows x times weights w, of one group."""
        emit_matrix(b, "tilezero", sums_register)
        emit_matrix(b, "tileloadd64", w_register, pointer(b, w, I8), I64(64))
        emit_matrix(b, "tileloadd64", x_register, pointer(b, x, I8), I64(64 if fine else 32))
        emit_matrix(b, "tdpbsud", sums_register, x_register, w_register)
        emit_matrix(b, "tilestored64", sums_register, pointer(b, sums, I8), I64(64))

    return product


def _unpack(fine: bool) -> Any:
    @op(types.void, address, address)
    def unpack(b, packed, to):
        """A group's nibbles as bytes [8, 16, 4], a quad of inputs after the other; if fine, 16 times as much before them."""
        for quad in range(4):
            words = b.bitcast(emit_load(b, b.add(packed, I64(64 * quad)), B8X64), I32X16)
            for at, shift in ((quad, 0), (quad + 4, 4)):
                nibbles = b.and_(b.bitcast(b.lshr(words, lanes(shift, I32X16)), B8X64), lanes(15, B8X64))
                emit_store(b, b.add(to, I64(64 * at + 512 * fine)), nibbles)
                if fine:
                    larger = b.and_(b.bitcast(b.shl(words, lanes(4 - shift, I32X16)), B8X64), lanes(240, B8X64))
                    emit_store(b, b.add(to, I64(64 * at)), larger)

    return unpack


def matrix_tile(kind: int, fine: bool) -> Any:
    """tile(w, groups, x, scale, total, rows, y, y_stride, scratch): as `tiles.integer_tile`, for any number of rows from a block's start.

    scratch: SCRATCH_BYTES. Only where `available`.
    """
    zeros = rows_f32(AT_ONCE)
    minima, nibbles = kind == Q4_1, kind != Q8_0
    size = GROUP_BYTES[kind]
    scales = 256 if nibbles else 512  # where they begin
    product, unpack = _product(fine), _unpack(fine)
    group_of_rows = BLOCK * (64 if fine else 32)
    ahead = prefetch_lines(group_of_rows // 64)
    unpacked_bytes = (1024 if fine else 512) if nibbles else size

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def scaled(result, sums, w, scale, total):
        integers = load_rows_i32(result, sums, 64)
        if not minima:
            integers = add_rows_i32(integers, splat_rows_i32(result, total, 4))
        result = scale_rows(result, integers, load_half(w + scales), scale, 4)
        if minima:
            result = fma_rows(result, load_half(w + scales + 32), total, 4)
        return result

    @njit(nogil=True, error_model="numpy")
    def block(w, unpacked, groups, x, scale, total, eight, sums, fresh, y, y_stride):
        """y += 16 rows over some groups, or = if fresh; `eight`: bytes from one eight's scales to the next's. The unit is a group ahead."""
        upper, lower = zeros(), zeros()
        if not fresh:
            upper, lower = load_rows(upper, y, y_stride), load_rows(lower, y + AT_ONCE * y_stride, y_stride)
        product(x, unpacked, sums)
        for group in range(groups):
            if group + 1 < groups:
                x += group_of_rows
                unpacked += unpacked_bytes
                ahead(x + 2 * group_of_rows)  # the unit's loads do not wake the CPU's own prefetching
                product(x, unpacked, sums + 1024 * ((group + 1) & 1))
            done = sums + 1024 * (group & 1)
            upper = scaled(upper, done, w, scale, total)
            lower = scaled(lower, done + 64 * AT_ONCE, w, scale + eight, total + eight)
            w += size
            scale += 4 * AT_ONCE
            total += 4 * AT_ONCE
        store_rows(upper, y, y_stride)
        store_rows(lower, y + AT_ONCE * y_stride, y_stride)

    @njit(nogil=True, error_model="numpy")
    def tile(w, groups, x, scale, total, rows, y, y_stride, scratch):
        sums, last, room = scratch, scratch + SUMS_BYTES, scratch + SUMS_BYTES + LAST_BYTES
        for start in range(0, groups, SEGMENT):
            count = min(SEGMENT, groups - start)
            packed = w + start * size
            unpacked = packed
            if nibbles:
                unpacked = room
                for group in range(count):
                    unpack(packed + group * size, room + group * unpacked_bytes)
            for row in range(0, rows, BLOCK):
                full = rows - row >= BLOCK
                out, stride = (y + row * y_stride, y_stride) if full else (last, 64)
                here = x + (row // BLOCK * groups + start) * group_of_rows
                skipped, eight = 4 * AT_ONCE * (row // AT_ONCE * groups + start), 4 * AT_ONCE * groups
                block(packed, unpacked, count, here, scale + skipped, total + skipped, eight, sums, start == 0, out, stride)
        for row in range(rows // BLOCK * BLOCK, rows):
            store_f32(y + row * y_stride, load_f32(last + 64 * (row % BLOCK)))

    return tile
