"""Which tokens run in the next step.

Owns: the waiting and the running sequences, their block tables, and when they finish. Pure: a function of its state, the
arrivals and the aborts; no clock, no tensors, no I/O, so thousands of schedules can be tested in seconds.

Each step has a budget of tokens. Every running decode gets its one token first; the rest goes to prefills, oldest sequence
first; then waiting sequences are admitted in order of arrival while the batch, the budget and the pool have room. A prompt that fits a
step is not parted: if it does not fit behind another, it waits for the next step, where its last token would have run anyway, and the one
before it has a shorter step. Longer ones take what is left.
When the pool runs dry the newest sequence is preempted (its blocks go, its tokens stay, and it is recomputed later),
so the oldest always progresses. (Continuous batching: Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.blocks import BlockPool
from engine.core import CacheNode, Chunk, FinishReason, Phase, Sequence, StepPlan, StepResult


@dataclass(slots=True, frozen=True)
class Limits:
    max_batch_size: int  # sequences running at once
    max_step_tokens: int  # tokens in one forward pass
    context_length: int  # tokens of prompt and reply together
    eos_ids: frozenset[int]
    lone_step_tokens: int = 0  # tokens in one forward pass when there is one sequence only, if that is more


@dataclass(slots=True, frozen=True)
class Sampled:
    """One new token of a sequence, and whether it was the last."""

    sequence: Sequence
    token: int
    finish: FinishReason | None


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        if limits.max_step_tokens < limits.max_batch_size:
            raise ValueError(f"expected max_step_tokens >= max_batch_size, so that every decode fits, got {limits}")
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def longest(self) -> int:
        """Tokens a sequence can ever have: the context, or the whole pool if that is smaller."""
        return min(self.limits.context_length, self.pool.blocks * self.pool.block_size)

    def plan(self, arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> StepPlan:
        """The next step. Empty when nothing can run."""
        self.waiting.extend(arrivals)
        for sequence in aborts:
            self.finish(sequence)
        budget = self._budget()
        chunks: list[Chunk] = []
        for sequence in [s for s in self.running if s.length - s.computed == 1]:
            if self._grow(sequence):
                chunks.append(self._chunk(sequence, 1))
                budget -= 1
        whole = budget
        for sequence in [s for s in self.running if s.length - s.computed > 1]:
            if count := min(budget, sequence.length - sequence.computed):
                chunks.append(self._chunk(sequence, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.limits.max_batch_size:
            sequence = self.waiting[0]
            chain = self._match(sequence)
            left = sequence.length - len(chain) * self.pool.block_size
            if budget < left <= whole or not self._admit(sequence, chain):
                break
            self.waiting.popleft()
            chunks.append(self._chunk(sequence, min(budget, left)))
            budget -= min(budget, left)
        return StepPlan(chunks)

    def advance(self, plan: StepPlan, result: StepResult) -> list[Sampled]:
        """Take a step's outcome in: KV that now exists, tokens that were chosen, sequences that are done."""
        sampled: list[Sampled] = []
        tokens = iter(result.tokens)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + len(chunk.tokens)
            self._remember(sequence)
            if chunk.samples:
                token = next(tokens)
                sequence.output.append(token)
                finish = self._finish_reason(sequence, token)
                if finish:
                    self.finish(sequence)
                sampled.append(Sampled(sequence, token, finish))
        return sampled

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever its phase: its blocks become free or evictable."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self._drop_blocks(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        sequence.phase = Phase.FINISHED

    def _budget(self) -> int:
        """Tokens of the next step. A sequence that is alone keeps nobody waiting who is there already."""
        alone = len(self.running) + len(self.waiting) == 1
        return max(self.limits.max_step_tokens, self.limits.lone_step_tokens if alone else 0)

    def _match(self, sequence: Sequence) -> list[CacheNode]:
        """What the cache has of a waiting sequence."""
        # At least one token must run, or there would be no logits to sample from.
        return self.pool.cache.match(sequence.salt, sequence.tokens(0, sequence.length - 1))

    def _admit(self, sequence: Sequence, chain: list[CacheNode]) -> bool:
        """Start a waiting sequence, of which the cache has `chain`, if blocks for all its tokens can be had."""
        needed = self.pool.blocks_for(sequence.length) - len(chain)
        if needed > self.pool.available - self.pool.evictable(chain):
            return False
        sequence.table = self.pool.share(chain) + [self.pool.allocate() for _ in range(needed)]
        sequence.chain = chain
        sequence.computed = len(chain) * self.pool.block_size
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Give a decode the block its next token goes to; the newest sequences make room if they must, itself included."""
        while sequence.phase is Phase.RUNNING:
            if self.pool.blocks_for(sequence.length) == len(sequence.table):
                return True
            if self.pool.available:
                sequence.table.append(self.pool.allocate())
            else:
                self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.table = []
        sequence.chain = []

    def _remember(self, sequence: Sequence) -> None:
        """Tell the cache of blocks that this step filled."""
        size = self.pool.block_size
        full = sequence.computed // size
        if full > len(sequence.chain):
            self.pool.cache.extend(sequence.salt, sequence.chain, sequence.tokens(0, full * size), sequence.table)

    @staticmethod
    def _chunk(sequence: Sequence, count: int) -> Chunk:
        start = sequence.computed
        return Chunk(sequence, start, sequence.tokens(start, start + count), samples=start + count == sequence.length)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token in sampling.stop_ids or (token in self.limits.eos_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        if len(sequence.output) >= sampling.max_tokens or sequence.length >= self.longest:
            return FinishReason.LENGTH
        return None
