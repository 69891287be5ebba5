"""StepPlan -> StepResult on the CPU.

Owns the KV cache tensor and turns block tables into the tensors that kernels take. Knows neither why a step was planned
nor what becomes of its tokens. Everything here runs in the engine thread.
"""

from __future__ import annotations

import torch

from engine import sampler
from engine.core import StepPlan, StepResult
from engine.kernels.batch import Batch, Span
from engine.models.llama import Llama


class Runner:
    def __init__(self, model: Llama, blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = model.new_cache(blocks, block_size)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        logits = self.model.forward(self.batch(plan), self.cache)
        return StepResult(sampler.sample(logits, [chunk.sequence for chunk in plan.chunks if chunk.samples]))

    def batch(self, plan: StepPlan) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        sample_rows: list[int] = []
        for chunk in plan.chunks:
            stop = chunk.start + len(chunk.tokens)
            table = chunk.sequence.table
            blocks = table[: -(-stop // self.block_size)]
            spans.append(Span(len(tokens), len(chunk.tokens), stop, torch.tensor(blocks)))
            tokens += chunk.tokens
            positions += range(chunk.start, stop)
            slots += [table[at // self.block_size] * self.block_size + at % self.block_size for at in range(chunk.start, stop)]
            if chunk.samples:
                sample_rows.append(len(tokens) - 1)
        return Batch(
            torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots), spans, torch.tensor(sample_rows, dtype=torch.int64)
        )
