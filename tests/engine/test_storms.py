"""Storms: random workloads in pools of a few blocks, with everything that can go wrong going wrong, and the invariants after every step."""

from __future__ import annotations

import random

import pytest

from engine.blocks import BlockPool
from engine.core import FinishReason, Phase, Sequence
from engine.cost import StepCost
from engine.prefix_cache import PrefixCache
from engine.scheduler import Limits, Scheduler
from engine.tier import Tier
from tests.engine.fakes import FakeRunner, sequence

WORKLOADS, PARTS = 1000, 8
ARRIVING = 60  # steps during which requests come
LONGEST = 3000  # steps in which every workload must end
COST = StepCost(rows=((1, 1.0), (64, 8.0)), pair=0.01, read=0.005, load=0.1, save=0.2)


class Workload:
    """One scheduler and those who come to it, all chosen by a seed."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        size, blocks, batch = chance.choice((1, 2, 4)), chance.randrange(6, 40), chance.randrange(1, 7)
        self.context = blocks * size
        self.shared = [chance.randrange(1, 3) for _ in range(size * chance.randrange(0, 3))]
        cache = PrefixCache(size, [self.shared] if self.shared else [])
        tier = Tier(chance.randrange(1, 2 * blocks)) if chance.random() < 0.6 else None
        limits = Limits(
            batch,
            chance.randrange(batch, 40),
            self.context,
            frozenset({0}),
            lone_step_tokens=chance.choice((0, 60)),
            policy=chance.choice(("fcfs", "lpm")),
            max_step_ms=chance.choice((0, 2.0, 6.0)),
            age=chance.choice((4, 50)),
        )
        self.scheduler = Scheduler(BlockPool(blocks, size, cache, tier), limits, COST)
        trouble = chance.choice((0, 0, 0.1, 0.5))
        self.runner = FakeRunner(size, seed, vocab=chance.choice((3, 50)), damage=trouble, full=trouble)
        self.sequences: list[Sequence] = []
        self.finished: dict[int, FinishReason] = {}
        self.steps = 0

    def run(self) -> None:
        for _ in range(ARRIVING):
            self.step([self.newcomer() for _ in range(self.chance.choice((0, 0, 1, 2)))], self.chance.random() < 0.05)
        while not self.scheduler.idle:
            assert self.steps < LONGEST, "the scheduler does not come to an end"
            self.step([], False)
        assert sorted(self.finished) == list(range(len(self.sequences))), "every request ends"
        assert self.scheduler.pool.owned == 0
        assert self.scheduler.waiting.owners == 0

    def newcomer(self) -> Sequence:
        """A new chat, or the next turn of one that has ended, or a branch from the middle of it."""
        chance, longest = self.chance, self.context - 1
        over = [s for s in self.sequences if s.phase is Phase.FINISHED and s.length < longest]
        prompt = [chance.randrange(1, 3) for _ in range(chance.randrange(1, self.context // 2))]
        salt = chance.choice((b"a", b"a", b"b", b"c"))
        if over and chance.random() < 0.6:
            before = chance.choice(over)
            salt, history = before.salt, before.tokens(0, chance.choice((before.length, chance.randrange(1, before.length + 1))))
            prompt = (history + prompt[: chance.randrange(1, 6)])[:longest]
        elif chance.random() < 0.5:
            prompt = (self.shared + prompt)[:longest]
        newcomer = sequence(len(self.sequences), prompt, chance.randrange(1, 20), salt)
        newcomer.priority = int(chance.random() < 0.3)
        self.sequences.append(newcomer)
        return newcomer

    def step(self, arrivals: list[Sequence], abort: bool) -> None:
        self.steps += 1
        scheduler, limits = self.scheduler, self.scheduler.limits
        aborts = [s for s in self.sequences if s.phase is not Phase.FINISHED and abort and self.chance.random() < 0.3]
        plan = scheduler.plan([s for s in arrivals if s not in aborts], [s for s in aborts if s not in arrivals])
        self.finished |= {s.id: FinishReason.CANCELLED for s in aborts}
        for newborn in (s for s in aborts if s in arrivals):
            newborn.phase = Phase.FINISHED
        assert plan.tokens <= max(limits.max_step_tokens, limits.lone_step_tokens)
        assert len(scheduler.running) <= limits.max_batch_size
        if failed := self.runner.move(plan.moves):
            plan = scheduler.lost(plan, failed)
        for sampled in scheduler.advance(plan, self.runner.run(plan)):
            if sampled.finish:
                assert sampled.sequence.id not in self.finished, "a request ends once"
                self.finished[sampled.sequence.id] = sampled.finish
        self.check()
        if scheduler.pool.tier and self.chance.random() < 0.2:
            scheduler.pool.write_behind(self.chance.randrange(1, 4))
            for move in self.runner.move(scheduler.pool.take_moves()):
                scheduler.pool.unsaved(move)  # type: ignore[arg-type]
            self.check()

    def check(self) -> None:
        self.scheduler.pool.check([s.table for s in self.scheduler.running])
        assert not any(s.table or s.chain or s.pending for s in self.scheduler.waiting)
        for running in self.scheduler.running:
            assert [node.block for node in running.chain] == running.table[: len(running.chain)]


@pytest.mark.parametrize("part", range(PARTS))
def test_storms(part: int) -> None:
    """No lost block, no wrong token, every request ends once, however it is preempted, moved out, damaged, cancelled (E2, E4, E8, E17)."""
    workloads = [Workload(seed) for seed in range(part, WORKLOADS, PARTS)]
    for workload in workloads:
        workload.run()
    assert sum(workload.steps for workload in workloads) >= 100_000 / PARTS
    assert any(s.preemptions for workload in workloads for s in workload.sequences)
    assert any(workload.runner.loads for workload in workloads)
    assert any(s.cached % workload.scheduler.pool.block_size for workload in workloads for s in workload.sequences)
