"""Rotary positions and the way of keys and values into pages, against the reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import reference
from engine.kernels.cpu import kv
from engine.kernels.cpu.kv import KV_TYPES, PAGE, store_stage
from engine.weights import blocks
from tests.engine.kernels.cpu.workbench import FEW, UNHURRIED, Array, Memory, blank_pages, page_views, run, stored

HEAD_SIZES = (16, 48, 64, 80, 96, 128)
each_kind = pytest.mark.parametrize("kind", KV_TYPES)
each_head_size = pytest.mark.parametrize("head_dim", HEAD_SIZES)


class Store:
    """Rows [count, (heads + 2 * kv_heads) * head_dim] that `store_*` rotates in place and puts into pages at slots."""

    def __init__(self, kind: str, x: Array, kv_heads: int, head_dim: int, positions: Array, slots: Array, cos: Array, sin: Array) -> None:
        self.memory = memory = Memory()
        heads = x.shape[1] // head_dim - 2 * kv_heads
        self.x = memory.place(x)
        self.pages = memory.place(blank_pages(kind, int(slots.max()) // PAGE + 2, kv_heads, head_dim), np.uint8)
        table = [0] * kv.ATTENTION_FIELDS
        table[kv.QKV], table[kv.QKV_STRIDE] = self.x.ctypes.data, 4 * x.shape[1]
        table[kv.HEADS], table[kv.KV_HEADS], table[kv.HEAD_DIM] = heads, kv_heads, head_dim
        table[kv.CACHE] = self.pages.ctypes.data
        table[kv.PAGE_STRIDE] = kv.page_bytes(kv.KV_TYPES[kind], kv_heads, head_dim)
        table[kv.COS], table[kv.SIN] = (memory.place(each).ctypes.data for each in (cos, sin))
        self.stage, self.table, self.count = store_stage(kind), memory.table(*table), len(x)
        self.step = memory.step(positions=positions, slots=slots)

    def run(self, pieces: tuple[int, ...] = ()) -> Store:
        run(self.stage, self.table, self.step, self.count, pieces)
        self.memory.check()
        return self


def angles(positions: int, head_dim: int) -> tuple[Array, Array]:
    at = np.arange(positions)[:, None] / 100 ** (np.arange(head_dim // 2) / (head_dim // 2))
    return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


@each_kind
@each_head_size
@UNHURRIED
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1.0, 1e-20, 1e10]), st.integers(0, 2**32))
def test_rows_are_rotated_and_stored(kind: str, head_dim: int, count: int, group: int, kv_heads: int, size: float, seed: int) -> None:
    """Queries and keys as the reference turns them, values as they are, each in its slot and rounded once; other slots are left alone."""
    random = np.random.default_rng(seed)
    heads = group * kv_heads
    x = (random.standard_normal((count, (heads + 2 * kv_heads) * head_dim)) * size).astype(np.float32)
    positions, slots = random.integers(0, 300, count), random.permutation(5 * PAGE)[:count]
    cos, sin = angles(300, head_dim)
    store = Store(kind, x, kv_heads, head_dim, positions, slots, cos, sin).run()

    by_head = x.reshape(count, -1, head_dim)
    at = [torch.from_numpy(each[positions].astype(np.float64)) for each in (cos, sin)]
    rotated = reference.rope(torch.from_numpy(by_head.astype(np.float64)), *at).numpy()
    rounding = 3e-7 * np.abs(by_head).max() * (cos.max() + sin.max())
    after = store.x.reshape(by_head.shape)
    np.testing.assert_allclose(after[:, : heads + kv_heads], rotated[:, : heads + kv_heads], rtol=0, atol=rounding)
    keys, values = after[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]

    held = np.zeros(store.pages.shape[0] * PAGE, bool)
    held[slots] = True
    for lies, wanted in zip(stored(kind, store.pages, head_dim), (keys, values), strict=True):
        mine = lies[slots]
        if kind == "float32":
            np.testing.assert_array_equal(mine, wanted)
        elif kind == "bfloat16":
            rounded = blocks.from_bfloat16(blocks.to_bfloat16(wanted))
            np.testing.assert_array_equal(mine, np.where(np.abs(rounded) < 2.0**-50, 0, rounded))
        else:
            peaks = np.abs(wanted).max(-1, keepdims=True).astype(np.float64)
            assert (np.abs(mine - wanted) <= peaks * (0.5 / 127 + 4e-7)).all()
        assert np.isnan(lies[~held]).all(), "what no row has written is as it was"


@each_kind
def test_no_rows_write_nothing(kind: str) -> None:
    """Neither to the pages nor to the queries."""
    cos, sin = angles(4, 16)
    store = Store(kind, np.ones((1, 64), np.float32), 1, 16, np.array([3]), np.array([5]), cos, sin)
    store.count = 0
    store.run()
    assert (store.x == 1).all()
    assert np.isnan(np.stack(stored(kind, store.pages, 16))).all()


@each_kind
@FEW
@given(st.data(), st.integers(2, 20), st.sampled_from(HEAD_SIZES), st.integers(0, 2**32))
def test_a_row_is_stored_with_the_same_bits_in_every_batch(kind: str, data: Any, count: int, head_dim: int, seed: int) -> None:
    """In another order, another slot of another page, and however the rows are shared out."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, 4 * head_dim)).astype(np.float32)
    positions, slots = random.integers(0, 300, count), random.permutation(5 * PAGE)[:count]
    cos, sin = angles(300, head_dim)
    one = Store(kind, x, 1, head_dim, positions, slots, cos, sin).run()
    order = np.array(data.draw(st.permutations(range(count))))
    elsewhere = random.permutation(5 * PAGE)[:count]
    cut = data.draw(st.integers(0, count))
    other = Store(kind, x[order], 1, head_dim, positions[order], elsewhere, cos, sin).run((cut,))
    assert other.x.tobytes() == one.x[order].tobytes()
    for mine, theirs in zip(stored(kind, other.pages, head_dim), stored(kind, one.pages, head_dim), strict=True):
        assert mine[elsewhere].tobytes() == theirs[slots[order]].tobytes()


@each_kind
def test_zeros_are_stored_as_zeros(kind: str) -> None:
    cos, sin = angles(4, 32)
    store = Store(kind, np.zeros((3, 3 * 32), np.float32), 1, 32, np.arange(3), np.arange(3), cos, sin).run()
    for lies in stored(kind, store.pages, 32):
        assert not lies[:3].any()


@each_kind
@pytest.mark.parametrize(
    "broken", [0x7FFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7F8000], ids=["nan all ones", "nan", "inf", "-inf", "inf once rounded"]
)
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_no_number_breaks_later_rows_only(kind: str, broken: int, where: str) -> None:
    """Such a position's keys are NaN, so every row that attends to it is none; its values are 0, so a row that does not is unharmed."""
    x = np.ones((3, 3 * 32), np.float32)
    x[1, 32 * (1 if where == "key" else 2) + 5] = np.array([broken], np.uint32).view(np.float32)[0]
    cos, sin = angles(4, 32)
    with np.errstate(invalid="ignore"):
        store = Store(kind, x, 1, 32, np.zeros(3, np.int64), np.arange(3), cos, sin).run()
        keys, values = stored(kind, store.pages, 32)
    assert np.isnan(keys[1]).all()
    assert not values[1].any()
    assert np.allclose(keys[[0, 2]], 1)
    assert np.allclose(values[[0, 2]], 1)


def test_bfloat16_ties_go_to_even_and_next_to_nothing_to_zero() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x26808000, 0x7F7F7FFF, 0x267F7FFF], np.uint32)
    x = np.zeros((1, 48), np.float32)
    x[0, 32:40] = bits.view(np.float32)
    x[0, 16:24] = bits.view(np.float32)
    cos, sin = np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32)
    store = Store("bfloat16", x, 1, 16, np.zeros(1, np.int64), np.zeros(1, np.int64), cos, sin).run()
    keys, values, _ = page_views("bfloat16", store.pages, 16)
    wanted = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x2680, 0x7F7F, 0x0000]
    assert values[0, 0, 0, :8].tolist() == wanted
    assert keys[0, 0, :8, 0].tolist() == wanted
