from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.core import FinishReason, Phase, Sequence
from engine.prefix_cache import PrefixCache
from engine.scheduler import Limits, Sampled, Scheduler
from tests.engine.fakes import FakeRunner, sequence

BLOCK = 4


def make(blocks: int = 64, batch: int = 8, budget: int = 16, context: int = 200, cache: PrefixCache | None = None) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK, cache), Limits(batch, budget, context, frozenset({0})))


def check(scheduler: Scheduler) -> None:
    scheduler.pool.check([s.table for s in scheduler.running])
    assert not any(s.table for s in scheduler.waiting)


def step(
    scheduler: Scheduler, runner: FakeRunner, arrivals: list[Sequence] | None = None, aborts: list[Sequence] | None = None
) -> list[Sampled]:
    plan = scheduler.plan(arrivals or [], aborts or [])
    alone = len(scheduler.running) + len(scheduler.waiting) == 1
    assert plan.tokens <= max(scheduler.limits.max_step_tokens, scheduler.limits.lone_step_tokens if alone else 0)
    sampled = scheduler.advance(plan, runner.run(plan))
    check(scheduler)
    return sampled


def run_out(scheduler: Scheduler, runner: FakeRunner, limit: int = 2000) -> list[Sampled]:
    """Step until nothing is left to do."""
    sampled: list[Sampled] = []
    for _ in range(limit):
        if scheduler.idle:
            return sampled
        sampled += step(scheduler, runner)
    raise AssertionError("the scheduler does not come to an end")


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(8, 40), batch=st.integers(1, 6), budget=st.integers(6, 40), collide=st.booleans())
def test_any_schedule_keeps_every_block_and_every_prefix_right(seed: int, blocks: int, batch: int, budget: int, collide: bool) -> None:
    """Random arrivals, aborts and shared prefixes in a small pool: invariants after each step, and everyone is served (E2, E4, E8)."""
    cache = PrefixCache(BLOCK, digest=lambda parent, content: b"same") if collide else None
    scheduler, runner, chance = make(blocks, batch, budget, blocks * BLOCK, cache), FakeRunner(BLOCK, seed, vocab=4), random.Random(seed)
    scheduler.limits = replace(scheduler.limits, lone_step_tokens=chance.choice((0, 2 * budget)))
    sequences: list[Sequence] = []
    finished: dict[int, FinishReason] = {}
    for _ in range(60):
        arrivals = []
        for _ in range(chance.choice((0, 0, 1, 2))):
            prompt = [chance.randrange(1, 3) for _ in range(chance.randrange(1, blocks * BLOCK // 2))]
            arrivals.append(sequence(len(sequences), prompt, chance.randrange(1, 20), chance.choice((b"a", b"b"))))
            sequences += arrivals[-1:]
        aborts = [s for s in sequences if s.phase is not Phase.FINISHED and chance.random() < 0.05]
        for sampled in step(scheduler, runner, arrivals, aborts):
            if sampled.finish:
                finished[sampled.sequence.id] = sampled.finish
        finished |= {s.id: FinishReason.CANCELLED for s in aborts}
    finished |= {s.sequence.id: s.finish for s in run_out(scheduler, runner) if s.finish}
    assert sorted(finished) == list(range(len(sequences)))
    assert scheduler.pool.owned == 0


def test_decodes_come_first_and_a_newcomer_starts_within_two_steps() -> None:
    scheduler, runner = make(batch=9), FakeRunner(BLOCK)
    eight = [sequence(i, [i + 1] * 5, 50, ignore_eos=True) for i in range(8)]
    step(scheduler, runner, eight)
    while not all(s.output for s in eight):
        step(scheduler, runner)
    ninth = sequence(8, [9] * 6)
    sampled = step(scheduler, runner, [ninth])
    assert {s.sequence.id for s in sampled} == set(range(9))


def test_a_long_prefill_never_takes_a_decode_out_of_a_step() -> None:
    """E9: eight streams and a long prompt; each step still serves all eight."""
    scheduler, runner = make(blocks=200, batch=9, budget=16, context=800), FakeRunner(BLOCK)
    eight = [sequence(i, [i + 1], 60, ignore_eos=True) for i in range(8)]
    step(scheduler, runner, eight)
    long = sequence(8, [7] * 300)
    served = step(scheduler, runner, [long])
    while not long.output:
        assert {s.sequence.id for s in served} >= set(range(8))
        served = step(scheduler, runner)


def test_a_prompt_that_fits_a_step_is_not_parted() -> None:
    """Two that do not fit together take a step each, the first one short; what does not fit a step by itself takes what is left."""
    scheduler, runner = make(budget=16), FakeRunner(BLOCK)
    plans = []
    arrivals = [sequence(0, [1] * 10, 50), sequence(1, [2] * 10, 50), sequence(2, [3] * 30, 50), sequence(3, [4] * 3, 50)]
    while not all(s.output for s in arrivals) and len(plans) < 10:
        plan = scheduler.plan(arrivals if not plans else ())
        plans.append([(chunk.sequence.id, len(chunk.tokens)) for chunk in plan.chunks])
        scheduler.advance(plan, runner.run(plan))
        check(scheduler)
    assert plans == [[(0, 10)], [(0, 1), (1, 10), (2, 5)], [(0, 1), (1, 1), (2, 14)], [(0, 1), (1, 1), (2, 11), (3, 3)]]


def test_a_prompt_that_is_alone_has_larger_steps() -> None:
    """Until another comes, and while others wait for each token it has the step that all have."""
    pool = BlockPool(200, BLOCK)
    scheduler, runner = Scheduler(pool, Limits(4, 8, 800, frozenset({0}), lone_step_tokens=32)), FakeRunner(BLOCK)
    plans = []
    for arrivals in ([sequence(0, [1] * 100, 5)], [], [sequence(1, [2] * 3, 5)], [], []):
        plan = scheduler.plan(arrivals)
        plans.append([(chunk.sequence.id, len(chunk.tokens)) for chunk in plan.chunks])
        scheduler.advance(plan, runner.run(plan))
        check(scheduler)
    assert plans == [[(0, 32)], [(0, 32)], [(0, 8)], [(0, 8)], [(0, 8)]]


def test_a_prompt_that_waits_for_the_next_step_finds_what_this_one_computes() -> None:
    scheduler, runner = make(budget=16), FakeRunner(BLOCK)
    arrivals = [sequence(id, [*[1] * 12, 2 + id, 9], 50) for id in range(4)]
    step(scheduler, runner, arrivals)
    assert [s.phase for s in arrivals] == [Phase.RUNNING] + [Phase.WAITING] * 3
    while not all(s.output for s in arrivals):
        step(scheduler, runner)
    assert [s.cached for s in arrivals] == [0, 12, 12, 12]


def test_a_known_prefix_is_shared_and_one_token_is_always_left_to_run() -> None:
    """E15: a block-aligned prompt sent again."""
    scheduler, runner = make(), FakeRunner(BLOCK)
    first = sequence(0, list(range(1, 1 + 3 * BLOCK)), 1)
    step(scheduler, runner, [first])
    again = sequence(1, list(first.prompt), 1)
    sampled = step(scheduler, runner, [again])
    assert again.cached == 2 * BLOCK
    assert sampled[0].finish is FinishReason.LENGTH


def test_salts_never_share() -> None:
    """E1, E3: neither another salt nor one that spells a neighbour's fields finds anything."""
    scheduler, runner = make(), FakeRunner(BLOCK)
    prompt = list(range(1, 40))
    step(scheduler, runner, [sequence(0, prompt[:16], 1, salt=b"x")])
    for id, salt in enumerate((b"y", b"", b"salt:x", b"x\0"), start=1):
        other = sequence(id, prompt[:16], 1, salt=salt)
        run_out(scheduler, runner)
        step(scheduler, runner, [other])
        assert other.cached == 0


def test_the_reply_is_reused_too() -> None:
    scheduler, runner = make(), FakeRunner(BLOCK)
    turn = sequence(0, [1, 2, 3], 14, ignore_eos=True)
    step(scheduler, runner, [turn])
    run_out(scheduler, runner)
    following = sequence(1, turn.prompt + turn.output + [5, 6], 1)
    step(scheduler, runner, [following])
    assert following.cached == (len(turn.prompt) + len(turn.output) - 1) // BLOCK * BLOCK  # the last token was never run (E11)


def test_two_that_do_not_fit_together_take_turns_without_thrashing() -> None:
    """E4: preemptions are bounded, the oldest progresses, both finish."""
    scheduler, runner = make(blocks=10, context=40), FakeRunner(BLOCK)
    both = [sequence(i, [i + 1] * 8, 30, ignore_eos=True) for i in range(2)]
    step(scheduler, runner, both)
    run_out(scheduler, runner)
    assert [len(s.output) for s in both] == [30, 30]
    assert both[0].preemptions == 0
    assert both[1].preemptions <= 2


def test_a_preempted_sequence_goes_before_those_who_came_later() -> None:
    scheduler, runner = make(blocks=10, context=40), FakeRunner(BLOCK)
    old, young = (sequence(i, [i + 1] * 12, 28, ignore_eos=True) for i in range(2))
    late = sequence(2, [9] * 30, 2, ignore_eos=True)
    step(scheduler, runner, [old, young])
    while not young.preemptions:
        step(scheduler, runner, [late] if late.phase is Phase.WAITING and late not in scheduler.waiting else [])
    assert list(scheduler.waiting) == [young, late]
    run_out(scheduler, runner)


def test_a_cancelled_sequence_owns_nothing_one_step_later() -> None:
    """C7, E8: at every step of its life."""
    for steps in range(12):
        scheduler, runner = make(budget=8), FakeRunner(BLOCK)
        doomed, other = sequence(0, [1] * 30, 5, ignore_eos=True), sequence(1, [2] * 9, 40, ignore_eos=True)
        step(scheduler, runner, [doomed, other])
        for _ in range(steps):
            step(scheduler, runner)
        step(scheduler, runner, aborts=[doomed])
        assert doomed.phase is Phase.FINISHED
        assert doomed not in scheduler.running
        assert scheduler.pool.owned == len(other.table)
        assert not any(s.sequence is doomed for s in run_out(scheduler, runner))


@pytest.mark.parametrize(
    ("token", "sampling", "finish"),
    [
        (0, {}, FinishReason.STOP),
        (0, {"ignore_eos": True}, None),
        (7, {"stop_ids": (7,)}, FinishReason.STOP),
        (7, {"stop_ids": (7,), "ignore_eos": True}, FinishReason.STOP),
        (7, {"max_tokens": 1}, FinishReason.LENGTH),
        (7, {}, None),
    ],
)
def test_why_a_sequence_ends(token: int, sampling: dict[str, object], finish: FinishReason | None) -> None:
    scheduler, runner = make(), FakeRunner(BLOCK)
    runner.random.randrange = lambda vocab: token  # type: ignore[method-assign, assignment, misc]
    asked = sequence(0, [1, 2], **sampling)  # type: ignore[arg-type]
    assert step(scheduler, runner, [asked])[0].finish is finish


def test_the_context_ends_a_sequence() -> None:
    scheduler, runner = make(context=12), FakeRunner(BLOCK)
    asked = sequence(0, [1] * 8, 100, ignore_eos=True)
    step(scheduler, runner, [asked])
    assert run_out(scheduler, runner)[-1].finish is FinishReason.LENGTH
    assert asked.length == 12


def test_a_budget_that_cannot_hold_every_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens"):
        make(batch=8, budget=7)
