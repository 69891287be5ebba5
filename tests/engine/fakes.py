"""A model for the scheduler's tests: it samples from a seeded generator and checks every KV slot it would read."""

from __future__ import annotations

import random
from collections.abc import Iterable

from engine.core import Copy, Load, Move, SamplingParams, Save, Sequence, StepPlan, StepResult

Content = list[int]  # of a block: for each position a digest of the whole prefix that led to it


class FakeRunner:
    """Keeps, for each position of each block, a digest of the whole prefix that led to it, and demands the right one wherever attention
    would look. Its tier holds the same; `damage` is the chance that a slot cannot be read, `full` that one cannot be written."""

    def __init__(self, block_size: int, seed: int = 0, vocab: int = 256, damage: float = 0, full: float = 0) -> None:
        self.block_size = block_size
        self.random = random.Random(seed)
        self.vocab = vocab
        self.damage, self.full = damage, full
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {}
        self.loads = 0
        self._prefixes: dict[int, list[int]] = {}  # by sequence: the digest of each prefix

    def move(self, moves: Iterable[Move]) -> list[Move]:
        failed: list[Move] = []
        lost: set[int] = set()
        for move in moves:
            match move:
                case Copy(source, target):
                    done = source not in lost
                    self.blocks[target] = list(self.blocks[source])
                case Save(block, slot, _):
                    done = self.random.random() >= self.full
                    self.slots.pop(slot, None)
                    if done:
                        self.slots[slot] = list(self.blocks[block])
                case Load(slot, block, _):
                    done = slot in self.slots and self.random.random() >= self.damage
                    self.blocks[block] = list(self.slots[slot]) if done else [-1] * self.block_size
                    self.loads += done
            if not isinstance(move, Save):
                target = move.target if isinstance(move, Copy) else move.block
                lost = lost - {target} if done else lost | {target}
            if not done:
                failed.append(move)
        return failed

    def run(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            self._write(chunk.sequence, chunk.start, chunk.tokens)
        # Only now do rows attend, as in a layer: all have written before any reads.
        for chunk in plan.chunks:
            self._read(chunk.sequence, chunk.start + len(chunk.tokens))
        return StepResult([self.random.randrange(self.vocab) for chunk in plan.chunks if chunk.samples])

    def _write(self, sequence: Sequence, start: int, tokens: list[int]) -> None:
        stop = start + len(tokens)
        assert sequence.tokens(start, stop) == tokens
        prefixes = self._digests(sequence, stop)
        for position in range(start, stop):
            block = sequence.table[position // self.block_size]
            content = self.blocks.setdefault(block, [-1] * self.block_size)
            content[position % self.block_size] = prefixes[position]

    def _read(self, sequence: Sequence, stop: int) -> None:
        prefixes = self._digests(sequence, stop)
        for at in range(0, stop, self.block_size):
            want = prefixes[at : min(stop, at + self.block_size)]
            got = self.blocks[sequence.table[at // self.block_size]][: len(want)]
            assert got == want, f"sequence {sequence.id} reads another prefix's KV in positions {at} to {at + len(want) - 1}"

    def _digests(self, sequence: Sequence, stop: int) -> list[int]:
        known = self._prefixes.setdefault(sequence.id, [])
        digest = known[-1] if known else hash(b"" if sequence.shared else sequence.salt)
        for token in sequence.tokens(len(known), stop):
            digest = hash((digest, token))
            known.append(digest)
        return known


def sequence(id: int, prompt: list[int], max_tokens: int = 8, salt: bytes = b"a", **sampling: object) -> Sequence:
    return Sequence(id, salt, prompt, SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
