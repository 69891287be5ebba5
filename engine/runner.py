"""StepPlan -> StepResult, and moves of KV between blocks and the tier.

Owns the way from block tables to the numbers that kernels take. Knows neither why a step was planned, nor what becomes of its tokens, nor
on what it runs. Everything here runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.core import CacheNode, Copy, Load, Move, Save, StepPlan, StepResult
from engine.decoder import Decoder
from engine.kernels.batch import Batch, Span
from engine.offload import Store


class Runner:
    def __init__(self, decoder: Decoder, block_size: int, store: Store | None = None) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.store = store
        self._between = np.empty(decoder.block_bytes if store else 0, np.uint8)

    def move(self, moves: Iterable[Move]) -> list[Move]:
        """Make moves in their order. Returns those that failed, and the copies of what they should have brought."""
        failed: list[Move] = []
        lost: set[int] = set()  # blocks that hold nothing of use
        unread: set[CacheNode] = set()  # not tried twice: what could not be read is forgotten, also by who would read it later
        for move in moves:
            match move:
                case Copy(source, target):
                    done = source not in lost
                    self.decoder.copy_block(source, target)
                case Save(block, slot, node):
                    assert self.store
                    self.decoder.save_block(block, self._between)
                    done = self.store.write(slot, node, self._between.data)
                case Load(slot, block, node):
                    assert self.store
                    done = node not in unread and self.store.read(slot, node, self._between.data)
                    if done:
                        self.decoder.load_block(block, self._between)
                    else:
                        unread.add(node)
            if isinstance(move, Copy | Load):
                target = move.target if isinstance(move, Copy) else move.block
                lost = lost - {target} if done else lost | {target}
            if not done:
                failed.append(move)
        return failed

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
