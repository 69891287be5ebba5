"""A model for the scheduler's tests: it samples from a seeded generator and checks every KV slot it would read."""

from __future__ import annotations

import hashlib
import random

from engine.core import SamplingParams, Sequence, StepPlan, StepResult


class FakeRunner:
    """Keeps, for each slot, a digest of the whole prefix that led to it, and demands the right one wherever attention would look."""

    def __init__(self, block_size: int, seed: int = 0, vocab: int = 256) -> None:
        self.block_size = block_size
        self.random = random.Random(seed)
        self.vocab = vocab
        self.slots: dict[int, bytes] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            sequence = chunk.sequence
            stop = chunk.start + len(chunk.tokens)
            assert sequence.tokens(chunk.start, stop) == chunk.tokens
            digest = sequence.salt
            for position, token in enumerate(sequence.tokens(0, stop)):
                digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=8).digest()
                slot = sequence.table[position // self.block_size] * self.block_size + position % self.block_size
                if position < chunk.start:
                    assert self.slots.get(slot) == digest, f"sequence {sequence.id} reads another prefix's KV at position {position}"
                else:
                    self.slots[slot] = digest
        return StepResult([self.random.randrange(self.vocab) for chunk in plan.chunks if chunk.samples])


def sequence(id: int, prompt: list[int], max_tokens: int = 8, salt: bytes = b"a", **sampling: object) -> Sequence:
    return Sequence(id, salt, prompt, SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
