from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine import calibrate
from engine.core import Sequence
from engine.engine import Engine
from engine.kernels.batch import Batch
from engine.weights.checkpoint import Checkpoint
from tests.engine.test_engine import ask, run


class Clocked:
    """A decoder of known costs, by whose steps alone the clock advances. It demands steps that a real one could run."""

    def __init__(self, blocks: int, size: int, max_rows: int, context: int, samples: int = 1) -> None:
        self.blocks, self.size, self.max_rows, self.context, self.samples = blocks, size, max_rows, context, samples
        self.now = 0.0  # seconds
        self.steps = 0
        self.noise: Callable[[int], float] = lambda step: 0.0  # milliseconds

    def choose(self, batch: Batch, sequences: list[Sequence]) -> list[int]:
        rows = len(batch.tokens)
        assert 1 <= rows == len(batch.positions) == len(batch.slots) == sum(span.rows for span in batch.spans) <= self.max_rows
        assert 1 <= len(sequences) == len(batch.sample_rows) <= self.samples
        assert all(0 <= row < rows for row in batch.sample_rows)
        assert all(0 <= position < self.context for position in batch.positions)
        for span in batch.spans:
            assert len(span.table) == -(-span.context // self.size)
            assert all(0 <= block < self.blocks for block in span.table)
            for row in range(span.first, span.first + span.rows):
                position = batch.positions[row]
                assert batch.slots[row] == span.table[position // self.size] * self.size + position % self.size
            assert list(batch.positions[span.first : span.first + span.rows]) == list(range(span.context - span.rows, span.context))
        self.now += 1e-3 * (self.cost(batch) + self.noise(self.steps))
        self.steps += 1
        return [0] * len(sequences)

    def cost(self, batch: Batch) -> float:
        """As `StepCost` has it: 2 ms, 0.25 for a row (0.125 from the 65th on), 0.001 and 0.002 for a position."""
        rows = len(batch.tokens)
        lone, parts = [s for s in batch.spans if s.rows == 1], [s for s in batch.spans if s.rows > 1]
        seen = sum(sum(range(span.context - span.rows + 1, span.context + 1)) for span in parts)
        return 2 + 0.25 * min(rows, 64) + 0.125 * max(0, rows - 64) + 0.001 * seen + 0.002 * sum(span.context for span in lone)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def measured(decoder: Clocked, load: float = 0.0) -> Any:
        monkeypatch.setattr(calibrate.time, "perf_counter", lambda: decoder.now)
        return calibrate.measure(decoder, decoder.blocks, decoder.size, decoder.max_rows, decoder.context, load)  # type: ignore[arg-type]

    return measured


def test_what_steps_take_is_found(clocked: Callable[..., Any]) -> None:
    cost = clocked(Clocked(200, 16, 128, 4096), 3.5)
    assert [count for count, _ in cost.rows] == [1, 16, 64, 128]
    assert cost.pair == pytest.approx(0.001)
    assert cost.read == pytest.approx(0.002)
    assert cost.load == 3.5
    for rows in (2, 16, 40, 64, 100, 128, 256):
        assert cost.of_rows(rows) == pytest.approx(2 + 0.25 * min(rows, 64) + 0.125 * max(0, rows - 64), abs=0.01)


def test_the_quickest_round_counts(clocked: Callable[..., Any]) -> None:
    """Other processes disturb some."""
    noisy = Clocked(200, 16, 128, 4096)
    noisy.noise = lambda step: 0.0 if step % 3 == 1 else 7.0
    found, wanted = clocked(noisy), clocked(Clocked(200, 16, 128, 4096))
    assert (found.pair, found.read) == pytest.approx((wanted.pair, wanted.read))
    assert [took for _, took in found.rows] == pytest.approx([took for _, took in wanted.rows])


@pytest.mark.parametrize("seed", range(30))
def test_no_cost_is_negative_whatever_the_clock_says(clocked: Callable[..., Any], seed: int) -> None:
    """Nor do more rows take less: a step's budget is divided by what they add."""
    noisy = Clocked(200, 16, 128, 4096)
    chance = random.Random(seed)
    noises = [chance.choice((0.0, 5.0, 500.0)) for _ in range(20)]
    noisy.noise = lambda step: noises[step // 3]
    cost = clocked(noisy)
    assert cost.pair >= 0
    assert cost.read >= 0
    assert cost.of_row() > 0
    assert 0 <= cost.rows[0][1] <= cost.rows[1][1] <= cost.rows[2][1] <= cost.rows[3][1]
    assert cost.load_rows() >= 1


@pytest.mark.parametrize(("blocks", "size"), [(1, 1), (1, 2), (2, 1), (3, 1), (1, 16), (2, 16), (64, 16)])
@pytest.mark.parametrize("rows", [1, 2, 9, 128])
@pytest.mark.parametrize("context", [1, 2, 3, 40, 4096])
def test_the_steps_fit_any_pool_and_any_context(clocked: Callable[..., Any], blocks: int, size: int, rows: int, context: int) -> None:
    cost = clocked(Clocked(blocks, size, rows, context))
    assert cost.of_rows(1) >= 2
    assert cost.of_row() > 0


@pytest.mark.parametrize("options", [{"max_batch_size": 1}, {"max_step_tokens": 9}, {"max_total_tokens": 16}])
def test_an_engine_of_any_shape_is_measured(quantised: Checkpoint, new_engine: Callable[..., Engine], options: dict[str, int]) -> None:
    engine = new_engine(quantised, max_step_ms=1000, **options)
    assert engine.scheduler.cost
    assert engine.scheduler.cost.of_rows(1) > 0
    run(engine, {0: [ask(0, [5, 6, 7], 4)]})
