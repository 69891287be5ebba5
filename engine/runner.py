"""StepPlan -> StepResult.

Owns the way from block tables to the numbers that kernels take. Knows neither why a step was planned, nor what becomes of its tokens, nor
on what it runs. Everything here runs in the engine thread.
"""

from __future__ import annotations

import numpy as np

from engine.core import StepPlan, StepResult
from engine.decoder import Decoder
from engine.kernels.batch import Batch, Span


class Runner:
    def __init__(self, decoder: Decoder, block_size: int) -> None:
        self.decoder = decoder
        self.block_size = block_size

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(self.decoder.choose(self.batch(plan), [chunk.sequence for chunk in plan.chunks if chunk.samples]))

    def batch(self, plan: StepPlan) -> Batch:
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        sample_rows: list[int] = []
        for chunk in plan.chunks:
            stop = chunk.start + len(chunk.tokens)
            table = chunk.sequence.table
            spans.append(Span(len(tokens), len(chunk.tokens), stop, np.array(table[: -(-stop // size)], np.int64)))
            tokens += chunk.tokens
            positions += range(chunk.start, stop)
            slots += [table[at // size] * size + at % size for at in range(chunk.start, stop)]
            if chunk.samples:
                sample_rows.append(len(tokens) - 1)
        return Batch(
            np.array(tokens, np.int64), np.array(positions, np.int64), np.array(slots, np.int64), spans, np.array(sample_rows, np.int64)
        )
