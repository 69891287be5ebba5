"""StepPlan -> StepResult, and moves of KV between blocks and the tier.

Owns the way from block tables to the numbers that kernels take, and from logits to what is asked of them. Knows neither why a step was
planned, nor what becomes of its tokens, nor on what it runs. Everything here runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.core import CacheNode, Copy, Load, Move, Save, Score, Sequence, StepPlan, StepResult
from engine.decoder import Decoder, Logits
from engine.grammar_guides import Guides
from engine.kernels.batch import Batch, Span
from engine.logprobs import Distribution
from engine.offload import Store


class Runner:
    def __init__(self, decoder: Decoder, block_size: int, store: Store | None = None, guides: Guides | None = None) -> None:
        """guides: of the sequences that have a grammar; needed if any does."""
        self.decoder = decoder
        self.block_size = block_size
        self.store = store
        self.guides = guides
        self._between = np.empty(decoder.block_bytes if store else 0, np.uint8)
        self._touched: set[int] = set()  # blocks

    def move(self, moves: Iterable[Move]) -> list[Move]:
        """Make moves in their order. Returns those that failed, and the copies of what they should have brought."""
        failed: list[Move] = []
        lost: set[int] = set()  # blocks that hold nothing of use
        nowhere: set[CacheNode] = set()  # what could not be read is not tried twice, what could not be written not at all
        for move in moves:
            match move:
                case Copy(source, target):
                    done = source not in lost
                    self.decoder.copy_block(source, target)
                case Save(block, slot, node):
                    assert self.store
                    self.decoder.save_block(block, self._between)
                    done = self.store.write(slot, node, self._between.data)
                    nowhere = nowhere - {node} if done else nowhere | {node}
                case Load(slot, block, node):
                    assert self.store
                    done = node not in nowhere and self.store.read(slot, node, self._between.data)
                    if done:
                        self.decoder.load_block(block, self._between)
                    else:
                        nowhere.add(node)
            if isinstance(move, Copy | Load):
                target = move.target if isinstance(move, Copy) else move.block
                lost = lost - {target} if done else lost | {target}
            if not done:
                failed.append(move)
        return failed

    def touch(self, blocks: Iterable[int]) -> bool:
        """Have memory for the first of some blocks that it was not had for before. Returns whether there was one."""
        if (block := next((block for block in blocks if block not in self._touched), None)) is None:
            return False
        self.decoder.touch_block(block)
        self._touched.add(block)
        return True

    def run(self, plan: StepPlan) -> StepResult:
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if any(chunk.scored for chunk in plan.chunks) or any(map(_apart, sampling)):
            return self._run_apart(plan, sampling)
        return StepResult(self.decoder.choose(self.batch(plan), sampling))

    def _run_apart(self, plan: StepPlan, sampling: list[Sequence]) -> StepResult:
        """A step in whose logits there is more to look for, or less to choose from, than the decoder knows: before it chooses, it stops.

        Masks are worked out meanwhile, and waited for whatever happens, so that none is when the next step begins.
        """
        masks = self.guides.masks(sampling) if self.guides else None
        try:
            logits = self.decoder.forward(self.batch(plan))
            asked = {row: Distribution(logits[row]) for row, sequence in enumerate(sampling) if sequence.sampling.logprobs >= 0}
            prompts = _prompt_scores(plan, logits[len(sampling) :])
        finally:
            forbidden = masks() if masks else []
        for row, mask in enumerate(forbidden):
            if mask is not None and not np.isnan(logits[row]).any():  # or nobody would see that its numbers are none
                logits[row, mask] = -np.inf
        tokens = self.decoder.pick(sampling)
        scores = {sampling[row].id: found.score(tokens[row], sampling[row].sampling.logprobs) for row, found in asked.items()}
        return StepResult(tokens, scores, prompts)

    def batch(self, plan: StepPlan) -> Batch:
        """Of the rows whose logits are wanted, those that choose tokens are first, in the plan's order, then those that are scored."""
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        sample_rows: list[int] = []
        scored_rows: list[int] = []
        for chunk in plan.chunks:
            stop = chunk.start + len(chunk.tokens)
            table = chunk.sequence.table
            spans.append(Span(len(tokens), len(chunk.tokens), stop, np.array(table[: -(-stop // size)], np.int64)))
            if chunk.scored:
                scored_rows += range(len(tokens), len(tokens) + chunk.scores)
            tokens += chunk.tokens
            positions += range(chunk.start, stop)
            slots += [table[at // size] * size + at % size for at in range(chunk.start, stop)]
            if chunk.samples:
                sample_rows.append(len(tokens) - 1)
        wanted = np.array(sample_rows + scored_rows, np.int64)
        return Batch(np.array(tokens, np.int64), np.array(positions, np.int64), np.array(slots, np.int64), spans, wanted)


def _apart(sequence: Sequence) -> bool:
    return sequence.sampling.logprobs >= 0 or sequence.sampling.grammar is not None


def _prompt_scores(plan: StepPlan, logits: Logits) -> dict[int, list[Score]]:
    """What the scored rows, whose logits these are, say of the tokens that follow them."""
    found: dict[int, list[Score]] = {}
    row = 0
    for chunk in plan.chunks:
        if chunk.scored:
            sequence, count = chunk.sequence, chunk.scores
            following = sequence.prompt[chunk.start + 1 : chunk.start + 1 + count]
            top = sequence.sampling.logprobs
            found[sequence.id] = [Distribution(logits[row + at]).score(token, top) for at, token in enumerate(following)]
            row += count
    return found
