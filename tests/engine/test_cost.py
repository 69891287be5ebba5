from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import Chunk
from engine.cost import Drift, StepCost
from tests.engine.fakes import sequence

milliseconds = st.floats(0, 100, allow_subnormal=False)


@st.composite
def costs(draw: st.DrawFn) -> StepCost:
    """As `calibrate` measures them: more rows never take less."""
    counts = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=5)))
    took = sorted(draw(st.lists(milliseconds, min_size=len(counts), max_size=len(counts))))
    rate = st.one_of(st.just(0.0), st.floats(0, 0.1, allow_subnormal=False))
    return StepCost(tuple(zip(counts, took, strict=True)), pair=draw(rate), read=draw(rate), load=draw(milliseconds))


def taken(cost: StepCost, before: int, start: int, count: int) -> float:
    return cost.of_rows(before + count) - cost.of_rows(before) + cost.of_chunk(start, count)


@pytest.mark.parametrize(
    ("rows", "took"), [(-1, 0), (0, 0), (1, 2), (3, 4), (5, 6), (10, 7), (15, 8), (25, 10), (35, 12)], ids=lambda value: str(value)
)
def test_rows_between_two_that_were_measured_lie_on_a_straight_line_and_so_do_those_beyond(rows: int, took: float) -> None:
    assert StepCost(((1, 2.0), (5, 6.0), (15, 8.0)), pair=0, read=0).of_rows(rows) == took


def test_fewer_rows_than_were_measured_never_take_less_than_nothing() -> None:
    assert StepCost(((10, 1.0), (20, 50.0)), pair=0, read=0).of_rows(1) == 0


def test_one_measurement_stands_for_all() -> None:
    cost = StepCost(((8, 3.0),), pair=0, read=0)
    assert [cost.of_rows(rows) for rows in (0, 1, 8, 100)] == [0, 3, 3, 3]


@given(costs())
def test_what_was_measured_is_predicted_and_more_rows_never_take_less(cost: StepCost) -> None:
    for rows, took in cost.rows:
        assert cost.of_rows(rows) == pytest.approx(took)
    predicted = [cost.of_rows(rows) for rows in range(250)]
    assert all(less <= more + 1e-9 for less, more in pairwise(predicted))


@given(costs(), st.integers(0, 3000))
def test_more_of_a_prompt_never_takes_less_and_later_never_less_than_earlier(cost: StepCost, start: int) -> None:
    took = [cost.of_chunk(start, count) for count in range(60)]
    assert took[0] == 0
    assert all(less <= more for less, more in pairwise(took))
    assert all(cost.of_chunk(start, count) <= cost.of_chunk(start + 1, count) for count in range(60))


def test_a_step_is_its_rows_and_what_each_sees() -> None:
    """A decode at position 9 sees 10; rows 4, 5 and 6 of a prompt see 5, 6 and 7."""
    cost = StepCost(((1, 1.0), (11, 11.0)), pair=0.5, read=0.25)
    one = sequence(0, [1] * 20)
    assert cost.of_step([]) == 0
    assert cost.of_step([Chunk(one, 9, [1], True)]) == 1 + 10 * 0.25
    assert cost.of_step([Chunk(one, 9, [1], True), Chunk(one, 4, [1] * 3, False)]) == 4 + 10 * 0.25 + 18 * 0.5


def test_a_row_of_a_prompt_reads_what_it_sees_as_a_decode_does() -> None:
    """Many rows share the reading; one, or few far into a prompt, take as long as it takes to read all before them."""
    cost = StepCost(((1, 1.0),), pair=0.001, read=0.1)
    assert cost.of_chunk(99, 1) == cost.of_decode(100) == 10
    assert cost.of_chunk(98, 2) == 10
    assert cost.of_chunk(0, 1000) == pytest.approx(0.001 * 500_500)


@given(costs(), st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), max_size=5), st.integers(0, 5))
def test_a_step_takes_no_more_than_its_parts_one_after_the_other(cost: StepCost, spans: list[tuple[int, int]], decodes: int) -> None:
    """So that a budget spent chunk by chunk is not overspent."""
    one = sequence(0, [1] * 600)
    chunks = [Chunk(one, 7 + at, [1], True) for at in range(decodes)]
    total = cost.of_step(chunks)
    for start, count in spans:
        total += taken(cost, sum(len(chunk.tokens) for chunk in chunks), start, count)
        chunks.append(Chunk(one, start, [1] * count, False))
    assert cost.of_step(chunks) <= total + 1e-6


@given(costs(), st.floats(-1, 120), st.integers(0, 2000), st.integers(0, 40), st.integers(0, 80))
def test_the_most_rows_within_a_time(cost: StepCost, room: float, start: int, before: int, most: int) -> None:
    fitting = [count for count in range(1, most + 1) if taken(cost, before, start, count) <= room]
    assert cost.rows_within(room, start, before, most) == max(fitting, default=0)


def test_a_block_that_comes_back_counts_as_the_rows_that_take_as_long() -> None:
    rows = ((1, 1.0), (129, 65.0))  # half a millisecond each
    assert [StepCost(rows, 0, 0, load).load_rows() for load in (0, 0.1, 0.5, 0.6, 8)] == [1, 1, 1, 2, 16]


def test_a_row_takes_time_also_where_only_one_number_of_rows_was_measured() -> None:
    """Else nothing would be worth bringing back."""
    assert StepCost(((1, 8.0),), 0, 0, 0.4).load_rows() == 1
    assert StepCost(((1, 8.0), (4, 8.0)), 0, 0, 4.0).load_rows() == 2


@given(costs())
def test_a_load_is_at_least_one_row_also_where_rows_take_nothing(cost: StepCost) -> None:
    rows = cost.load_rows()
    assert rows >= 1
    assert math.isfinite(rows)
    assert cost.of_row() > 0


def test_drift_follows_the_median_of_what_steps_take() -> None:
    drift = Drift()
    for number in range(400):
        drift.observe(10, 1000 if number % 10 == 0 else 25)
    assert drift.ratio == pytest.approx(2.5, rel=0.15), "one slow step in ten moves it little"
    for _ in range(400):
        drift.observe(10, 10)
    assert drift.ratio == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(("took", "bound"), [(1e9, Drift.MOST), (0.0, 1 / Drift.MOST)])
def test_drift_has_bounds(took: float, bound: float) -> None:
    drift = Drift()
    for _ in range(2000):
        drift.observe(1, took)
    assert drift.ratio == pytest.approx(bound)
