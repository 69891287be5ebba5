"""What kernels give for fixed inputs, so that processes with different instructions can be compared: integer ones, and attention.

`python -m tests.engine.kernels.cpu.integers FILE [LAYER ...]` writes it as .npz. Knows no test.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product as pairs

import numpy as np
from numba import njit

from engine.kernels.cpu import features
from engine.kernels.cpu.attention import merge
from engine.kernels.cpu.linear import linear_stage
from engine.kernels.cpu.simd import dot, load_bytes, load_f32, round_i32
from engine.kernels.cpu.simd_rows import dot_rows, rows_f32, store_rows, zero_rows_i32
from tests.engine.kernels.cpu.attention_case import Case, Shape
from tests.engine.kernels.cpu.workbench import ACTIVATIONS, FORM_NAMES, Array, activations, have, product, weights

EXTREMES = (0, 1, 2, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
_zeros = rows_f32(3)


@njit
def _dots(totals, unsigned, signed, count, out):
    """out int32 [count, 16] = dot(total float32 [count, 16], unsigned, signed uint8 [count, 64])."""
    for i in range(count):
        total = round_i32(load_f32(totals + 64 * i))
        store_rows((dot(total, load_bytes(unsigned + 64 * i), load_bytes(signed + 64 * i)),), out + 64 * i, 64)


@njit
def _row_dots(unsigned, x, count, out):
    """out int32 [count, 3, 16] = three rows' dots of unsigned uint8 [count, 64] and x uint8 [count, 3, 4]."""
    for i in range(count):
        sums = dot_rows(zero_rows_i32(_zeros()), load_bytes(unsigned + 64 * i), x + 12 * i, 4)
        store_rows(sums, out + 192 * i, 64)


def byte_pairs(random: np.random.Generator) -> tuple[Array, Array]:
    """uint8 [n, 64] twice: random ones, then every two of EXTREMES in every lane."""
    unsigned, signed = (random.integers(0, 256, (500, 64), np.uint8) for _ in range(2))
    extreme = np.array(list(pairs(EXTREMES, EXTREMES)), np.uint8)
    return (
        np.concatenate([unsigned, extreme[:, :1].repeat(64, 1), random.choice(extreme[:, 0], (200, 64))]),
        np.concatenate([signed, extreme[:, 1:].repeat(64, 1), random.choice(extreme[:, 1], (200, 64))]),
    )


def expected_dots(totals: Array, unsigned: Array, signed: Array) -> Array:
    """int32 [..., 16] in numpy."""
    products = unsigned.astype(np.int32) * signed.view(np.int8).astype(np.int32)
    return (totals.astype(np.int32) + products.reshape(*products.shape[:-1], 16, 4).sum(-1)).astype(np.int32)


def dots() -> dict[str, Array]:
    """int32 results of `dot` and `dot_rows`, and what they should be."""
    random = np.random.default_rng(0)
    unsigned, signed = byte_pairs(random)
    count = len(unsigned)
    totals = random.integers(-(2**20), 2**20, (count, 16)).astype(np.float32)
    out = np.zeros((count, 16), np.int32)
    _dots(totals.ctypes.data, unsigned.ctypes.data, signed.ctypes.data, count, out.ctypes.data)
    x = np.ascontiguousarray(signed[:, :12]).reshape(count, 3, 4)
    row_out = np.zeros((count, 3, 16), np.int32)
    _row_dots(unsigned.ctypes.data, x.ctypes.data, count, row_out.ctypes.data)
    rows = expected_dots(np.zeros(1), unsigned[:, None].repeat(3, 1), np.tile(x, (1, 1, 16)))
    return {"dot": out, "dot_expected": expected_dots(totals, unsigned, signed), "rows": row_out, "rows_expected": rows}


def linears(names: Sequence[str]) -> dict[str, Array]:
    """float32 outputs of the linear layers of these names ("q4_1 fine"), for every count of rows that takes another way."""
    made = {}
    layers = [(kind, FORM_NAMES[form]) for kind, form in (name.split() for name in names)]
    have(merge, *(linear_stage(kind, form) for kind, form in layers))
    for kind, form in layers:
        random = np.random.default_rng(1)
        for count, what in zip((1, 2, 4, 15, 167), ACTIVATIONS, strict=True):
            layer = weights(kind, 40, 800, random)
            made[f"{kind} {form} {count}"] = product(kind, form, layer, activations(random, count, 800, what))
    return made


def attentions() -> dict[str, Array]:
    """float32 outputs of attention on a bfloat16 cache: chunks and decodes, few and many queries."""
    made = {}
    for group in (3, 16):
        case = Case.make(Shape("bfloat16", 64, group), [(300, 40), (150, 150), (129, 1)])
        made[f"attention {group}"] = case.run()
    return made


def main() -> None:
    path, *names = sys.argv[1:]
    made = linears([name for name in names if name != "attention"]) if names else dots()
    if "attention" in names:
        made |= attentions()
    np.savez(path, vnni=features.VNNI, matrix=features.MATRIX, **made)


if __name__ == "__main__":
    main()
