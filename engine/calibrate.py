"""Measuring what steps take on this machine.

Owns: the steps that are timed before the first request comes, on an empty pool. `cost.py` owns what the numbers mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from engine.core import SamplingParams, Sequence
from engine.cost import StepCost
from engine.decoder import Decoder
from engine.kernels.batch import Batch, Span

_CONTEXT = 1024  # positions that the far steps attend to, if the pool has as many
_DECODES = 8
_ROUNDS = 3  # the quickest counts


def measure(decoder: Decoder, blocks: int, block_size: int, rows: int, context_length: int, load: float, save: float = 0.0) -> StepCost:
    """The cost of steps of up to `rows` rows, on blocks that hold nothing yet. load, save: as `Store.measure` has them."""
    far = min(_CONTEXT, blocks * block_size, context_length)
    rows = min(rows, far)
    table = np.arange(blocks, dtype=np.int64)

    def step(spans: Iterable[tuple[int, int]]) -> float:
        """Of (rows, context) each."""
        batch = one_batch(list(spans), table, block_size)
        sequence = Sequence(0, b"", [0], SamplingParams(max_tokens=1, temperature=0))
        times = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            decoder.choose(batch, [sequence])
            times.append(1e3 * (time.perf_counter() - start))
        return min(times)

    step([(rows, rows)])  # buffers and pages are touched for the first time
    points = sorted({1, min(16, rows), max(1, rows // 2), rows})
    near = {count: step([(count, count)]) for count in points}
    long = min(rows, max(1, far // 2))
    pair = (step([(long, far)]) - step([(long, long)])) / (long * max(1, far - long))
    decodes = min(_DECODES, rows)
    read = (step([(1, far)] * decodes) - step([(1, 1)] * decodes)) / (decodes * max(1, far - 1))
    pair, read = max(0.0, pair), max(0.0, read)
    times = [max(0.0, near[count] - pair * count * (count + 1) / 2) for count in points]
    times = np.maximum.accumulate(times).tolist()  # more rows never take less, whatever the clock says
    return StepCost(tuple(zip(points, times, strict=True)), pair, read, load, save)


def one_batch(spans: list[tuple[int, int]], table: np.ndarray, block_size: int) -> Batch:
    """A step of (rows, context) each, all in the same blocks. The last row of all is sampled: a batch may take no more."""
    positions = np.concatenate([np.arange(context - rows, context) for rows, context in spans])
    firsts = np.cumsum([0, *(rows for rows, _ in spans)])
    return Batch(
        np.zeros(len(positions), np.int64),
        positions,
        table[positions // block_size] * block_size + positions % block_size,
        [
            Span(int(first), rows, context, table[: -(-context // block_size)])
            for first, (rows, context) in zip(firsts[:-1], spans, strict=True)
        ],
        firsts[-1:] - 1,
    )
