"""How many blocks a step saves, and which, in a scheduler whose time is told by its cost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.core import Save, Sequence, StepPlan
from engine.cost import StepCost
from engine.room import BEHIND, BEHIND_MOST, LONGEST_MS, SAVED
from engine.scheduler import RETRY, Scheduler
from engine.tier import Tier
from tests.engine.fakes import FakeRunner, sequence
from tests.engine.test_scheduler import A_ROW, BLOCK, check, make

COST = StepCost(A_ROW.rows, pair=0, read=0, load=2.0, save=2.0)  # a millisecond for each row
NEVER = 10**9


def step(scheduler: Scheduler, runner: FakeRunner, arrivals: Iterable[Sequence] = ()) -> tuple[StepPlan, int]:
    """The plan, and how many blocks were saved for it."""
    plan = scheduler.plan(arrivals)
    saves = sum(isinstance(move, Save) for move in plan.moves)
    if failed := runner.move(plan.moves):
        plan = scheduler.lost(plan, failed)
    scheduler.advance(plan, runner.run(plan))
    check(scheduler)
    return plan, saves


def run_out(scheduler: Scheduler, runner: FakeRunner, *arrivals: Sequence) -> None:
    step(scheduler, runner, arrivals)
    while not scheduler.idle:
        step(scheduler, runner)


def full_of_unsaved(most: float = 60, blocks: int = 400, streams: int = 4, **options: object) -> tuple[Scheduler, FakeRunner]:
    """A pool full of what nobody uses and the tier has not, and streams beside which nothing is written behind."""
    scheduler = make(
        blocks=blocks, budget=100, context=4 * blocks, tier=Tier(4 * blocks), cost=COST, max_step_ms=most, lone_step_tokens=4000, **options
    )  # type: ignore[arg-type]
    scheduler._quiet_until = NEVER
    runner = FakeRunner(BLOCK)
    for id in range(4):
        run_out(scheduler, runner, sequence(1000 + id, [id + 1] * (blocks - 4), 1))
    if streams:
        step(scheduler, runner, [sequence(id, [50 + id], 3 * blocks // 8, ignore_eos=True) for id in range(streams)])
    return scheduler, runner


def test_a_step_saves_no_more_than_it_has_time_for() -> None:
    """A prompt that takes the whole pool pushes hundreds of blocks out at once; nobody's token waits for them."""
    scheduler, runner = full_of_unsaved()
    plan, saves = step(scheduler, runner, [sequence(100, [9] * 1200, 1)])
    assert saves == SAVED * (60 - 4) / COST.save == 14
    assert COST.of_step(plan.chunks) + saves * COST.save <= 60
    assert plan.tokens == 60 - 2 * saves


def test_of_what_is_given_up_at_once_the_least_recently_used_is_forgotten() -> None:
    """What is saved follows nothing that was forgotten, so that it can come back."""
    scheduler, runner = full_of_unsaved(streams=0)
    pool = scheduler.pool
    oldest_first = [block for block in pool._idle if block in pool._unsaved]
    nodes = [pool._nodes[block] for block in oldest_first]
    _, saves = step(scheduler, runner, [sequence(100, [9] * 800, 1)])
    given_up = 200 - (400 - len(oldest_first))
    assert saves == SAVED * 60 / COST.save == 15, "also where nobody's token waits: the newcomer's does"
    assert [node.slot >= 0 for node in nodes[:given_up]] == [False] * (given_up - saves) + [True] * saves
    assert [node.parent is None for node in nodes[:given_up]] == [True] * (given_up - saves) + [False] * saves
    assert all(node.block >= 0 for node in nodes[given_up:])


def test_several_that_start_in_one_step_share_what_may_be_saved() -> None:
    scheduler, runner = full_of_unsaved(batch=20)
    assert not scheduler.pool._free, "each pushes something out"
    plan, saves = step(scheduler, runner, [sequence(100 + id, [20 + id] * 8, 1, b"%d" % id) for id in range(5)])
    assert len(plan.chunks) == 4 + 5
    assert 1 < saves <= SAVED * (60 - 4) / COST.save
    assert COST.of_step(plan.chunks) + saves * COST.save <= 60


def test_what_another_prompt_has_taken_of_a_step_is_not_there_for_saves() -> None:
    scheduler, runner = full_of_unsaved()
    pool = scheduler.pool
    pool.forget(pool.cache.match(b"a", [1] * BLOCK).chain[0])  # and so there are free blocks for one
    plan, saves = step(scheduler, runner, [sequence(100, [9] * 48, 1, b"b"), sequence(101, [8] * 1200, 1)])
    assert [len(chunk.tokens) for chunk in plan.chunks] == [1] * 4 + [48, 4]
    assert saves == SAVED * (60 - 4 - 48) / COST.save


def test_decodes_that_need_room_save_no_more_either() -> None:
    """All of them go on to a next block in the same step."""
    scheduler, runner = full_of_unsaved(streams=8)
    most = 0
    for _ in range(3 * BLOCK):
        plan, saves = step(scheduler, runner)
        assert len(plan.chunks) == 8
        most = max(most, saves)
    assert 0 < most <= 8
    scheduler, runner = full_of_unsaved(12, streams=8)
    most = 0
    for _ in range(3 * BLOCK):
        plan, saves = step(scheduler, runner)
        assert len(plan.chunks) == 8
        most = max(most, saves)
    assert most == SAVED * (12 - 8) / COST.save == 1


def test_where_a_step_may_take_any_time_saves_may_not() -> None:
    scheduler, runner = full_of_unsaved(0, blocks=1200)
    _, saves = step(scheduler, runner, [sequence(100, [9] * 4400, 1)])
    assert saves == int(SAVED * (LONGEST_MS - 4) / COST.save)


def test_a_slow_machine_saves_less() -> None:
    scheduler, runner = full_of_unsaved()
    scheduler.drift.ratio = 2.0
    _, saves = step(scheduler, runner, [sequence(100, [9] * 1200, 1)])
    assert saves == int(SAVED * (30 - 4) / COST.save)


# Beside those who run


def unsaved(scheduler: Scheduler) -> int:
    return len(scheduler.pool._unsaved)


def test_what_a_chat_leaves_is_saved_beside_a_stream() -> None:
    """A server that is never idle keeps it too: a block at least in each step, in no more than a share of its time."""
    scheduler = make(blocks=400, budget=100, context=400, tier=Tier(400), cost=COST, max_step_ms=60)
    runner = FakeRunner(BLOCK)
    step(scheduler, runner, [sequence(0, [50], 300, ignore_eos=True)])
    ended = sequence(1, [9] * 150, 5, ignore_eos=True)
    step(scheduler, runner, [ended])
    while not ended.output or ended in scheduler.running:
        step(scheduler, runner)
    left = unsaved(scheduler)
    assert left > 30
    for _ in range(left):
        plan, saves = step(scheduler, runner)
        assert saves == 1
        assert len(plan.chunks) == 1
    assert not unsaved(scheduler)
    assert scheduler.pool.cache.match(b"a", ended.tokens(0, 154)).tokens(BLOCK) == 154
    assert step(scheduler, runner)[1] == 0


@pytest.mark.parametrize("save", [0.0, 0.01, 0.5])
def test_more_is_saved_where_that_is_quick_but_a_few_blocks_at_most(save: float) -> None:
    scheduler = make(blocks=400, budget=100, context=400, tier=Tier(400), cost=StepCost(COST.rows, 0, 0, 1.0, save), max_step_ms=60)
    runner = FakeRunner(BLOCK)
    run_out(scheduler, runner, sequence(1, [9] * 150, 5))
    scheduler._quiet_until = 0
    plan, saves = step(scheduler, runner, [sequence(id, [50 + id] * 4, 30, b"%d" % id) for id in range(4)])
    assert saves == (min(BEHIND_MOST, int(BEHIND * plan.tokens / save)) if save else BEHIND_MOST)


def test_a_step_without_time_left_saves_one() -> None:
    """Or nothing would ever be kept on a server whose steps are always full."""
    scheduler = make(blocks=400, budget=100, context=400, tier=Tier(400), cost=COST, max_step_ms=4)
    runner = FakeRunner(BLOCK)
    run_out(scheduler, runner, sequence(1, [9] * 150, 5))
    step(scheduler, runner, [sequence(id, [50 + id], 30, b"%d" % id, ignore_eos=True) for id in range(8)])
    before = unsaved(scheduler)
    assert before > 20
    for at in range(1, 6):
        plan, saves = step(scheduler, runner)
        assert (len(plan.chunks), saves, unsaved(scheduler)) == (8, 1, before - at)


@pytest.mark.parametrize("trouble", ["no room on the disk", "no slot to spare"])
def test_what_cannot_be_saved_is_not_tried_in_each_step(trouble: str) -> None:
    full = trouble == "no room on the disk"
    scheduler = make(blocks=600, budget=100, context=2000, tier=Tier(400 if full else 1), cost=COST, max_step_ms=60)
    runner = FakeRunner(BLOCK)
    run_out(scheduler, runner, sequence(1, [9] * 150, 5))
    runner.full = 1.0 if full else 0.0
    step(scheduler, runner, [sequence(0, [50], 1000, ignore_eos=True)])
    tried = [step(scheduler, runner)[1] for _ in range(2 * RETRY)]
    assert sum(tried) <= 3
    runner.full = 0.0
    if full:
        for _ in range(RETRY + unsaved(scheduler)):
            step(scheduler, runner)
        assert not unsaved(scheduler), "it is tried again"


def test_what_a_chat_had_in_common_with_one_that_goes_on_is_saved_too() -> None:
    """Nobody would find the rest of it without it."""
    scheduler = make(blocks=400, budget=100, context=400, tier=Tier(400), cost=COST, max_step_ms=60)
    runner, head = FakeRunner(BLOCK), list(range(200, 240))
    step(scheduler, runner, [sequence(0, [*head, 50], 300, ignore_eos=True)])
    ended = sequence(1, [*head, *[9] * 50], 1)
    step(scheduler, runner, [ended])
    while scheduler.pool.behind or not ended.output:
        step(scheduler, runner)
    chain = scheduler.pool.cache.match(b"a", ended.tokens(0, 90)).chain
    assert ended.cached == 40
    assert len(chain) == 90 // BLOCK
    assert all(node.slot >= 0 for node in chain)
