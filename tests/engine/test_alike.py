"""What prompts of one owner begin with in common is computed once, also when they come at once. In steps and rows, never in seconds."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from engine.alike import PATIENCE, Alike
from engine.core import Sequence, StepPlan
from engine.scheduler import Scheduler
from tests.engine.fakes import FakeRunner, sequence
from tests.engine.test_scheduler import BLOCK, check, make

HEAD = list(range(200, 240))  # a system prompt of ten blocks


def one(id: int, own: int = 5, owner: bytes = b"a", head: list[int] = HEAD, reply: int = 3, **sampling: object) -> Sequence:
    """Its prompt is like no other's after `head`."""
    return sequence(id, [*head, 1000 + id, *[7] * (own - 1)], reply, owner, ignore_eos=True, **sampling)


def step(scheduler: Scheduler, runner: FakeRunner, arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> StepPlan:
    plan = scheduler.plan(arrivals, aborts)
    assert not runner.move(plan.moves)
    scheduler.advance(plan, runner.run(plan))
    check(scheduler)
    return plan


def prompts(plan: StepPlan) -> dict[int, int]:
    """How many tokens of whose prompt were run."""
    return {chunk.sequence.id: len(chunk.tokens) for chunk in plan.chunks if not chunk.sequence.output or len(chunk.tokens) > 1}


def read(scheduler: Scheduler, runner: FakeRunner, arrivals: list[Sequence], limit: int = 200) -> list[dict[int, int]]:
    """Step until all have begun their replies."""
    told = []
    for at in range(limit):
        plan = scheduler.plan(arrivals if not at else ())
        told.append({chunk.sequence.id: len(chunk.tokens) for chunk in plan.chunks if not chunk.sequence.output})
        assert not runner.move(plan.moves)
        scheduler.advance(plan, runner.run(plan))
        check(scheduler)
        if all(asked.output for asked in arrivals):
            return told
    raise AssertionError("they do not begin")


@pytest.mark.parametrize(("budget", "head", "count"), [(2048, 100, 17), (2048, 1000, 17), (300, 40, 6), (17, 100, 17)])
def test_many_at_once_compute_what_they_have_in_common_once(budget: int, head: int, count: int) -> None:
    """Whatever fits a step. What ends inside a block is copied."""
    scheduler, runner = make(blocks=2000, batch=count, budget=budget, context=2000), FakeRunner(BLOCK)
    asked = [sequence(id, [7] * head + [100 + id] * 20, 1) for id in range(count)]
    told = read(scheduler, runner, asked)
    assert sum(sum(rows.values()) for rows in told) == head + 20 * count
    assert [one.cached for one in asked] == [0, *[head] * (count - 1)]
    if budget > head + 20 * count:
        assert [rows.keys() for rows in told[:2]] == [{0}, set(range(1, count))], "all of them in the step after"


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_those_who_begin_otherwise_do_not_wait(policy: str) -> None:
    """Neither others of the owner, nor other owners, though these begin alike."""
    scheduler, runner = make(blocks=200, budget=120, policy=policy), FakeRunner(BLOCK)
    arrivals = [one(0), one(1), one(2, head=[50] * 8), one(3, owner=b"b"), one(4)]
    assert prompts(step(scheduler, runner, arrivals)) == {0: 45, 2: 13, 3: 45}
    assert prompts(step(scheduler, runner)) == {1: 5, 4: 5}


def test_one_that_shares_less_than_a_block_more_than_is_known_does_not_wait() -> None:
    scheduler, runner = make(blocks=200, budget=200), FakeRunner(BLOCK)
    read(scheduler, runner, [one(0, head=HEAD[:8])])
    told = prompts(step(scheduler, runner, [one(1, head=[*HEAD[:8], 5, 5, 5]), one(2, head=[*HEAD[:8], 5, 5, 5])]))
    assert told.keys() == {1, 2}
    assert prompts(step(scheduler, runner, [one(3, head=[*HEAD[:8], 6, 6, 6, 6]), one(4, head=[*HEAD[:8], 6, 6, 6, 6])])).keys() == {3}


def test_a_longer_one_waits_for_what_another_that_waited_reads() -> None:
    """One behind the other, each for what it has in common with the one before."""
    scheduler, runner = make(blocks=400, budget=400, context=400), FakeRunner(BLOCK)
    middle = [*HEAD, *range(300, 340)]
    asked = [one(0), one(1, head=middle), one(2, head=middle), one(3)]
    assert read(scheduler, runner, asked) == [{0: 45}, {1: 45, 3: 5}, {2: 5}]


def test_when_the_other_is_cancelled_it_goes_on() -> None:
    scheduler, runner = make(blocks=100, budget=20), FakeRunner(BLOCK)
    reader, waits = one(0), one(1)
    assert prompts(step(scheduler, runner, [reader, waits])) == {0: 20}
    assert prompts(step(scheduler, runner, aborts=[reader])) == {1: 20}
    assert waits.cached == 20, "what it had read is there"


def test_when_the_other_is_preempted_it_goes_on() -> None:
    """In the same step: an owner with more than its share gives way, and of two that wait neither waits for the other."""
    scheduler, runner = make(blocks=100, budget=20), FakeRunner(BLOCK)
    reader, waits = one(0), one(1)
    step(scheduler, runner, [reader, waits])
    assert scheduler._held(waits)
    scheduler._preempt(reader)
    assert not scheduler._held(waits)
    assert prompts(step(scheduler, runner)).keys() == {0}, "it was there first, and what it had read is there"


def test_one_that_waits_may_be_cancelled() -> None:
    scheduler, runner = make(blocks=100, budget=20), FakeRunner(BLOCK)
    reader, waits = one(0), one(1)
    step(scheduler, runner, [reader, waits])
    step(scheduler, runner, aborts=[waits])
    assert not scheduler._alike._holds
    while not scheduler.idle:
        step(scheduler, runner)


def test_nobody_waits_for_one_with_less_right_to_its_turns() -> None:
    """Else an interactive request would wait behind whatever goes before the background."""
    scheduler, runner = make(blocks=400, budget=20), FakeRunner(BLOCK)
    background, interactive = one(0), one(1)
    background.priority = 1
    step(scheduler, runner, [background])
    assert prompts(step(scheduler, runner, [interactive])) == {1: 20}
    scheduler, runner = make(blocks=400, budget=100), FakeRunner(BLOCK)
    interactive, background = one(0), one(1)
    background.priority = 1
    assert prompts(step(scheduler, runner, [interactive, background])) == {0: 45}, "the other way round it waits"


def test_one_whose_prompt_is_to_be_scored_does_not_wait() -> None:
    """It has to run it all."""
    scheduler = make(blocks=400, budget=200)
    asked = [one(0), one(1, prompt_logprobs=True), one(2)]
    plan = scheduler.plan(asked)
    assert [chunk.sequence.id for chunk in plan.chunks] == [0, 1]


class Still:
    """Those who run, by hand."""

    def __init__(self) -> None:
        self.looks = 0
        self.alike = Alike(BLOCK, self.known, lambda asked: asked.length - 1)

    def known(self, asked: Sequence) -> int:
        self.looks += 1
        return 0

    def held(self, asked: Sequence) -> bool:
        return self.alike.held(asked, lambda each: each.priority)


def test_it_goes_on_when_that_is_computed_however_much_else_the_other_reads() -> None:
    still, reader, waits = Still(), one(0, own=200), one(1)
    for at in range(len(reader.prompt)):
        reader.computed = at
        still.alike.begin([reader], at)
        assert still.held(waits) == (at < len(HEAD))


def test_nobody_waits_for_one_that_comes_no_further() -> None:
    still, reader, waits = Still(), one(0), one(1)
    for at in range(1, 3 * PATIENCE):
        reader.computed = min(at, PATIENCE)  # of 45
        still.alike.begin([reader], at)
        assert still.held(waits) == (at < 2 * PATIENCE)


def test_one_that_was_preempted_does_not_wait() -> None:
    still, waits = Still(), one(1)
    waits.preemptions = 1
    still.alike.begin([one(0)], 1)
    assert not still.held(waits)


def test_each_of_a_crowd_is_compared_once() -> None:
    still, reader, crowd = Still(), one(0), [one(id) for id in range(1, 257)]
    for at in range(1, 20):
        reader.computed = at
        still.alike.begin([reader], at)
        assert all(still.held(asked) for asked in crowd)
    assert still.looks == len(crowd)
    others = [one(id, head=[id] * 8) for id in range(300, 400)]
    assert not any(still.held(asked) for asked in others)
    assert still.looks == len(crowd), "those who begin otherwise need no look into the cache"


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("seed", range(40))
def test_in_crowds_no_block_of_a_common_head_is_computed_twice(seed: int, policy: str) -> None:
    """Of several owners, in a pool that holds them all: whoever comes when."""
    chance = random.Random(seed)
    heads = {owner: [chance.randrange(3, 99) for _ in range(BLOCK * chance.randrange(1, 12))] for owner in (b"a", b"b")}
    scheduler = make(blocks=3000, batch=chance.randrange(2, 12), budget=chance.randrange(12, 90), policy=policy)
    runner, rows, steps = FakeRunner(BLOCK, seed), dict.fromkeys(heads, 0), 0
    asked = [one(id, own=chance.randrange(1, 9), owner=(owner := chance.choice((b"a", b"b"))), head=heads[owner]) for id in range(60)]
    coming = list(asked)
    while coming or not scheduler.idle:
        arrivals, coming = (coming[: (count := chance.choice((0, 1, 8)))], coming[count:])
        for chunk in step(scheduler, runner, arrivals).chunks:
            if not chunk.sequence.preemptions:
                stop = min(chunk.start + len(chunk.tokens), len(heads[chunk.sequence.salt]))
                rows[chunk.sequence.salt] += max(0, stop - chunk.start)
        steps += 1
        assert steps < 2000
    for owner, head in heads.items():
        if not any(each.preemptions for each in asked):
            # The last block of a head is run again by those of which not one token more is their own: one has to run.
            assert rows[owner] <= len(head) + sum(each.salt == owner and len(each.prompt) <= len(head) + 1 for each in asked) * BLOCK
