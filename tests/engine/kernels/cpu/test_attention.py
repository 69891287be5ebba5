"""Paged attention against the reference in float64 on the numbers as stored, and bit for bit against itself in other company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cpu.kv import KV_TYPES
from engine.kernels.cpu.strips import SPAN
from tests.engine.kernels.cpu.attention_case import Array, Case, Shape, lone, whole
from tests.engine.kernels.cpu.workbench import FEW, UNHURRIED

EDGES = (1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300, 1000)
HEAD_SIZES = (16, 48, 64, 80, 96, 128)
GROUPS = (1, 2, 3, 4, 5, 8, 16)
CLOSE = {"float32": 1e-5, "bfloat16": 4e-3, "int8": 1e-5}  # of the largest value; softmax weights as bfloat16 have 8 bits

each_kind = pytest.mark.parametrize("kind", KV_TYPES)
seeds = st.integers(0, 2**32)


def check(case: Case, out: Array, close: float | None = None) -> None:
    expected, close = case.expected(), close or CLOSE[case.shape.kind]
    assert np.abs(out - expected).max() <= close * np.abs(expected).max()


def same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


@st.composite
def sizes(draw: st.DrawFn, most: int = 4) -> list[tuple[int, int]]:
    """(context, rows) of some sequences: decodes, chunks of a prompt with and without what came before, whole prompts."""
    made = []
    for _ in range(draw(st.integers(1, most))):
        context = draw(st.sampled_from(EDGES) | st.integers(1, 400))
        made.append((context, draw(st.just(1) | st.integers(1, min(context, 40)) | st.just(min(context, 150)))))
    return made


@st.composite
def shapes(draw: st.DrawFn, kind: str) -> Shape:
    return Shape(kind, draw(st.sampled_from(HEAD_SIZES)), draw(st.sampled_from(GROUPS)), 2, draw(st.sampled_from([16, 32, 48])))


@each_kind
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_shape_at_every_edge(kind: str, head_dim: int, group: int) -> None:
    """One row at each context, and a chunk that ends there."""
    case = Case.make(Shape(kind, head_dim, group, 2, 32), [(context, rows) for context in EDGES for rows in {1, min(context, 5)}])
    out = case.run()
    check(case, out)
    assert same(case.run(lone, split=True), out)


@each_kind
@UNHURRIED
@given(st.data(), sizes(), seeds)
def test_attention_is_that_of_float64(kind: str, data: Any, spans: list[tuple[int, int]], seed: int) -> None:
    case = Case.make(data.draw(shapes(kind)), spans, seed)
    check(case, case.run())


@each_kind
@UNHURRIED
@given(st.data(), sizes(), seeds)
def test_a_rows_bits_are_the_same_in_every_batch(kind: str, data: Any, spans: list[tuple[int, int]], seed: int) -> None:
    """However rows are cut into blocks and tiles into parts, whichever thread does it, in whatever blocks the tokens lie, and whatever
    unread slots hold (E18)."""
    case = Case.make(data.draw(shapes(kind)), spans, seed)
    out = case.run()

    def random_cut(count: int, most: int) -> list[int]:
        made: list[int] = []
        while count > sum(made):
            made.append(data.draw(st.integers(1, min(most, count - sum(made)))))
        return made

    assert same(case.run(random_cut, split=True), out)
    assert same(case.run(lone), out)
    assert same(case.run(lone, split=True, thread=2), out)
    assert same(case.run(pieces=data.draw(st.lists(st.integers(1, 40), max_size=4)), thread=1), out)
    block_size = data.draw(st.sampled_from([16, 32, 48]))
    assert same(case.moved(block_size, seed + 1).run(), out)
    assert same(case.moved(block_size, seed + 2, garbage=data.draw(st.sampled_from([0, 0x7F, 0x80, 0xFF]))).run(random_cut, True), out)


@each_kind
@FEW
@given(st.data(), sizes(3), seeds)
def test_a_chunk_is_its_rows_one_by_one(kind: str, data: Any, spans: list[tuple[int, int]], seed: int) -> None:
    """In steps of their own, as decodes and as smaller chunks (E12, E18)."""
    case = Case.make(data.draw(shapes(kind)), spans, seed)
    out = case.run()
    for index, span in enumerate(case.spans):
        for row in {0, span.rows - 1, data.draw(st.integers(0, span.rows - 1))}:
            wanted = out[span.first + row : span.first + row + 1]
            assert same(case.only(index, row, 1).run(), wanted)
            assert same(case.only(index, row, 1).run(split=True), wanted)
        cut = data.draw(st.integers(0, span.rows - 1))
        assert same(case.only(index, cut).run(), out[span.first + cut : span.first + span.rows])


@each_kind
def test_scores_far_below_zero_are_scores(kind: str) -> None:
    """True scores of -64,000 and less count among themselves: no finite stand-in for minus infinity is above them (E13)."""
    shape = Shape(kind, 64, 3)
    case = Case.make(shape, [(300, 1), (140, 20), (128, 1), (7, 7)])
    case.queries[...] = 0
    case.queries[..., 0] = -8  # times 1 / sqrt(64)
    for span in case.spans:
        keys = np.zeros((span.context, shape.kv_heads, 64), np.float32)
        keys[..., 0] = 64000 if kind == "float32" else 65024  # 127 * 512: a bfloat16
        case.put(0, span, keys)
    out = case.run()
    check(case, out)
    assert same(case.run(lone, split=True), out)

    last = case.spans[0]
    keys = np.zeros((last.context, shape.kv_heads, 64), np.float32)
    keys[..., 0] = 97536  # 127 * 768
    keys[130, :, 0] = 65024
    case.put(0, last, keys)
    np.testing.assert_allclose(case.run()[0], case.expected()[0], rtol=1e-6, atol=1e-6)
    held = case.only(0).expected()[0, 0]
    assert np.abs(held).max() > 1, "the value of position 130 alone, not a mean of many"


@each_kind
@pytest.mark.parametrize("group", [1, 3, 8])
def test_rows_that_see_nothing_of_a_tile(kind: str, group: int) -> None:
    """A chunk over a tile's edge has rows for which the whole second tile lies ahead (E13)."""
    for context in (SPAN + 1, SPAN + 5, 2 * SPAN + 3):
        for rows in (2, 6, 7, 24):
            case = Case.make(Shape(kind, 64, group), [(context, rows)], rows)
            out = case.run()
            check(case, out)
            assert same(case.run(lone), out)


@each_kind
def test_a_broken_query_stays_alone(kind: str) -> None:
    case = Case.make(Shape(kind, 64, 3), [(140, 12), (40, 1), (300, 1)])
    sound = case.run()
    for row in (0, 5, 11, 12, 13):
        broken = Case(case.shape, case.spans, case.queries.copy(), case.pages)
        broken.queries[row, 4, 3] = np.nan
        for out in (broken.run(), broken.run(lone, split=True)):
            assert np.isnan(out[row, 4]).all()
            out[row, 4] = sound[row, 4]
            assert same(out, sound)


@each_kind
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_broken_position_breaks_its_own_sequence_only(kind: str, part: int) -> None:
    """And of that no query of another KV head."""
    case = Case.make(Shape(kind, 64, 3), [(140, 12), (40, 5), (300, 1)])
    sound = case.run()
    numbers = np.random.default_rng(1).standard_normal((300, 2, 64), np.float32)
    case.put(part, case.spans[2], numbers)
    sound[17] = case.run()[17]
    for position in (0, 127, 128, 299):
        numbers_broken = numbers.copy()
        numbers_broken[position, 1] = np.nan
        with np.errstate(invalid="ignore"):
            broken = Case(case.shape, case.spans, case.queries, case.pages.copy())
            broken.put(part, case.spans[2], numbers_broken)
        out = broken.run(split=True)
        assert np.isnan(out[17, 3:]).all()
        out[17, 3:] = sound[17, 3:]
        assert same(out, sound)


@each_kind
def test_larger_values_do_not_overflow(kind: str) -> None:
    """Values of 1e30 mix as small ones do."""
    case = Case.make(Shape(kind, 32, 2), [(200, 3)])
    span = case.spans[0]
    case.put(1, span, np.random.default_rng(0).standard_normal((200, 2, 32), np.float32) * np.float32(1e30))
    check(case, case.run())


def test_whole_and_lone_cut_all_rows() -> None:
    assert whole(20, 8) == [8, 8, 4]
    assert lone(3, 8) == [1, 1, 1]
