"""`max_step_ms`: what a step that has decodes takes by prediction."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.core import Chunk, Load, Phase, Save, Sequence, StepPlan
from engine.cost import StepCost
from engine.room import LEAST_ROWS, LEAST_SAVES, LONGEST_MS
from engine.scheduler import Scheduler
from engine.tier import Tier
from tests.engine.fakes import FakeRunner, sequence
from tests.engine.test_scheduler import A_ROW, BLOCK, check, make, step
from tests.engine.test_storms import Workload


def plans(scheduler: Scheduler, runner: FakeRunner, count: int, arrivals: Iterable[Sequence] = ()) -> list[list[tuple[int, int]]]:
    """Of so many steps, each chunk's sequence and how many tokens."""
    told = []
    for _ in range(count):
        plan = scheduler.plan(arrivals)
        arrivals = ()
        told.append([(chunk.sequence.id, len(chunk.tokens)) for chunk in plan.chunks])
        runner.move(plan.moves)
        scheduler.advance(plan, runner.run(plan))
        check(scheduler)
    return told


def beside_a_decode(most: float = 30, **options: object) -> tuple[Scheduler, FakeRunner]:
    """Sequence 0 decodes, and each row takes a millisecond."""
    scheduler = make(**{"budget": 100, "context": 400, "blocks": 400, "cost": A_ROW, "max_step_ms": most} | options)  # type: ignore[arg-type]
    runner = FakeRunner(BLOCK)
    assert plans(scheduler, runner, 1, [sequence(0, [1] * 40, 50, ignore_eos=True)]) == [[(0, 40)]], "alone it has all tokens of a step"
    return scheduler, runner


def test_beside_decodes_a_prompt_has_the_time_that_is_left() -> None:
    scheduler, runner = beside_a_decode()
    assert plans(scheduler, runner, 2, [sequence(1, [3] * 100, 20)]) == [[(0, 1), (1, 29)]] * 2


def test_where_decodes_alone_take_too_long_a_prompt_has_a_few_rows() -> None:
    """It must come to an end."""
    scheduler, runner = beside_a_decode(0.5)
    told = plans(scheduler, runner, 4, [sequence(1, [3] * 100, 20), sequence(2, [4] * 100, 20)])
    assert told == [[(0, 1), (1, LEAST_ROWS)]] * 4


def test_a_prompt_that_fits_the_time_of_a_step_is_not_parted() -> None:
    """One that does not fit behind another waits for the next step; one that fits none takes what is left. The few rows that always fit
    are those of the first prompt only."""
    scheduler, runner = beside_a_decode()
    arrivals = [sequence(id, [id + 1] * rows, 20, ignore_eos=True) for id, rows in enumerate((20, 20, 40), start=1)]
    assert plans(scheduler, runner, 4, arrivals) == [
        [(0, 1), (1, 20)],
        [(0, 1), (1, 1), (2, 20), (3, 8)],
        [(0, 1), (1, 1), (2, 1), (3, 27)],
        [(0, 1), (1, 1), (2, 1), (3, 5)],
    ]


def test_a_machine_that_is_slower_than_it_was_reads_fewer_rows() -> None:
    scheduler, runner = beside_a_decode(60)
    scheduler.drift.ratio = 2.0
    assert plans(scheduler, runner, 1, [sequence(1, [3] * 100, 20)]) == [[(0, 1), (1, 29)]]


def test_both_budgets_count() -> None:
    """Of tokens there are fewer here."""
    scheduler, runner = beside_a_decode(budget=40, most=60)
    arrivals = [sequence(1, [2] * 30, 20, ignore_eos=True), sequence(2, [3] * 30, 20)]
    assert plans(scheduler, runner, 2, arrivals) == [[(0, 1), (1, 30)], [(0, 1), (1, 1), (2, 30)]]


@pytest.mark.parametrize("most", [30, 30.5])
def test_whoever_has_no_rows_in_a_step_is_not_let_in(most: float) -> None:
    """It would hold blocks for nothing, and not find what others compute meanwhile."""
    scheduler, runner = beside_a_decode(most)
    assert plans(scheduler, runner, 1, [sequence(id, [7] * 100, 20) for id in range(1, 6)]) == [[(0, 1), (1, 29)]]
    assert len(scheduler.running) == 2


@pytest.mark.parametrize("owner", [b"a", b"b"])
def test_a_prompt_that_just_fits_a_step_is_not_put_off_for_ever(owner: bytes) -> None:
    """By small ones that come all the time, so that there is never a whole step when the turn is theirs."""
    scheduler, runner = beside_a_decode(batch=20)
    large, steps = sequence(1000, [9] * 20, 2, owner), 0
    while not large.output:
        arrivals = [sequence(2000 * (steps > 5) + 10 * steps + at, [steps, at, 1], 2) for at in range(1, 4)]
        step(scheduler, runner, [*arrivals, large] if steps == 5 else arrivals)
        steps += 1
        assert steps < 10


def test_blocks_that_come_back_take_their_time_too() -> None:
    """At 5 ms each, 6 of them begin in 29 ms; then the prompt's rest runs."""
    cost = StepCost(A_ROW.rows, 0, 0, load=5.0)
    scheduler = make(blocks=20, budget=100, context=80, tier=Tier(40), cost=cost, max_step_ms=30)
    runner = FakeRunner(BLOCK)
    plans(scheduler, runner, 1, [sequence(1, list(range(1, 42)), 1)])
    plans(scheduler, runner, 1, [sequence(2, [50] * 79, 1)])  # now the tier has the first one's
    plans(scheduler, runner, 1, [sequence(0, [1], 50, ignore_eos=True)])
    again = sequence(3, list(range(1, 42)), 2)
    steps = []
    while not again.output:
        plan = scheduler.plan([again] if not steps else [])
        steps.append((sum(isinstance(move, Load) for move in plan.moves), sum(len(chunk.tokens) for chunk in plan.chunks)))
        assert not runner.move(plan.moves)
        scheduler.advance(plan, runner.run(plan))
    assert steps == [(6, 1), (4, 2)]


@pytest.mark.parametrize("part", range(4))
def test_in_storms_steps_with_decodes_keep_to_the_time_and_none_of_these_misses_one(part: int) -> None:
    """E9: but for the few rows that a prompt always has, the last block that comes back, or the one that is always saved."""
    watched = 0
    for seed in range(part, 240, 4):
        workload = Workload(seed)
        if workload.scheduler.limits.max_step_ms:
            watched += 1
            watch(workload.scheduler)
            workload.run()
    assert watched > 20


def watch(scheduler: Scheduler) -> None:
    """Check each plan."""
    planned = scheduler.plan

    def plan(arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> StepPlan:
        decoding = {s.id for s in scheduler.running if s.length - s.computed == 1 and not s.pending}
        plan = planned(arrivals, aborts)
        assert decoding & {s.id for s in scheduler.running} <= {chunk.sequence.id for chunk in plan.chunks}, "a decode misses a step"
        # One that gave way and came back in the same step reads its prompt again.
        decodes = [chunk for chunk in plan.chunks if chunk.sequence.id in decoding and len(chunk.tokens) == 1]
        if decodes and scheduler.cost:
            in_time(plan, decodes, scheduler.cost, scheduler.limits.max_step_ms)
        return plan

    scheduler.plan = plan  # type: ignore[method-assign]


def in_time(plan: StepPlan, decodes: list[Chunk], cost: StepCost, most: float) -> None:
    loads, saves = (sum(isinstance(move, kind) for move in plan.moves) for kind in (Load, Save))
    prompts = [chunk for chunk in plan.chunks if chunk not in decodes]
    moved = cost.load * loads + cost.save * max(0, saves - LEAST_SAVES)
    took = cost.of_step(plan.chunks) + moved
    limit = max(most, cost.of_step(decodes) + 0.1) + 1e-9
    if took <= limit:
        return
    without = [took - cost.load] if loads else []
    if len(prompts) == 1 and len(prompts[0].tokens) <= LEAST_ROWS:
        without.append(cost.of_step(decodes) + moved)
    assert without, f"{took:.2f} ms, {limit:.2f} at most"
    assert min(without) <= limit


def test_a_step_that_was_preempted_out_of_its_decodes_has_no_such_bound() -> None:
    """Nobody waits for a token then."""
    scheduler, runner = make(batch=1, budget=60, blocks=40, context=160, cost=A_ROW, max_step_ms=5), FakeRunner(BLOCK)
    background = sequence(0, [1] * 4, 30, ignore_eos=True)
    background.priority = 1
    plans(scheduler, runner, 1, [background])
    assert plans(scheduler, runner, 1, [sequence(1, [2] * 50, 3)]) == [[(1, 50)]]
    assert background.phase is Phase.WAITING


@pytest.mark.parametrize("most", [0, 60])
def test_where_nobody_waits_for_a_token_a_step_is_bounded_too(most: float) -> None:
    """A newcomer and a cancel wait for its end: on a slow machine a long prompt comes in steps of a second at most."""
    slow = StepCost(rows=((1, 10.0), (2, 20.0)), pair=0, read=0)
    scheduler, runner = make(budget=800, context=1600, blocks=400, cost=slow, max_step_ms=most), FakeRunner(BLOCK)
    assert plans(scheduler, runner, 2, [sequence(0, [1] * 250, 2)]) == [[(0, LONGEST_MS / 10)]] * 2
    scheduler.drift.ratio = 2.0
    assert plans(scheduler, runner, 2) == [[(0, LONGEST_MS / 20)], [(0, 1)]]


def test_without_a_bound_a_step_takes_what_it_takes_also_where_its_time_is_known() -> None:
    slow = StepCost(rows=((0, 0.0), (1000, 22_000.0)), pair=0, read=0)
    scheduler, runner = beside_a_decode(0, cost=slow, budget=60)
    assert plans(scheduler, runner, 1, [sequence(1, [3] * 100, 20)]) == [[(0, 1), (1, 59)]]
