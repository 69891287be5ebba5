from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.core import FinishReason, Phase, Sequence
from engine.cost import StepCost
from engine.scheduler import Limits, Sampled, Scheduler
from engine.tier import Tier
from tests.engine.fakes import FakeRunner, sequence

BLOCK = 4
A_ROW = StepCost(((1, 1.0), (2, 2.0)), pair=0, read=0)  # a millisecond for each, whatever it sees


def make(
    blocks: int = 64,
    batch: int = 8,
    budget: int = 16,
    context: int = 200,
    size: int = BLOCK,
    tier: Tier | None = None,
    cost: StepCost | None = None,
    **limits: Any,
) -> Scheduler:
    return Scheduler(BlockPool(blocks, size, tier=tier), Limits(batch, budget, context, frozenset({0}), **limits), cost)


def check(scheduler: Scheduler) -> None:
    scheduler.pool.check([s.table for s in scheduler.running])
    assert not any(s.table for s in scheduler.waiting)


def step(
    scheduler: Scheduler, runner: FakeRunner, arrivals: list[Sequence] | None = None, aborts: list[Sequence] | None = None
) -> list[Sampled]:
    plan = scheduler.plan(arrivals or [], aborts or [])
    alone = len(scheduler.running) + len(scheduler.waiting) == 1
    assert plan.tokens <= max(scheduler.limits.max_step_tokens, scheduler.limits.lone_step_tokens if alone else 0)
    if failed := runner.move(plan.moves):
        plan = scheduler.lost(plan, failed)
    sampled = scheduler.advance(plan, runner.run(plan))
    check(scheduler)
    return sampled


def run_out(scheduler: Scheduler, runner: FakeRunner, limit: int = 2000, arrivals: list[Sequence] | None = None) -> list[Sampled]:
    """Step until nothing is left to do."""
    sampled = step(scheduler, runner, arrivals) if arrivals else []
    for _ in range(limit):
        if scheduler.idle:
            return sampled
        sampled += step(scheduler, runner)
    raise AssertionError("the scheduler does not come to an end")


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
        runner.move(plan.moves)
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
        runner.move(plan.moves)
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
    assert again.cached == len(again.prompt) - 1
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
    assert following.cached == len(turn.prompt) + len(turn.output) - 1  # the last token was never run (E11)


def test_two_that_do_not_fit_together_take_turns_without_thrashing() -> None:
    """E4: preemptions are bounded, the oldest progresses, both finish."""
    scheduler, runner = make(blocks=10, context=40), FakeRunner(BLOCK)
    both = [sequence(i, [i + 1] * 8, 30, ignore_eos=True) for i in range(2)]
    step(scheduler, runner, both)
    run_out(scheduler, runner)
    assert [len(s.output) for s in both] == [30, 30]
    assert both[0].preemptions == 0
    assert both[1].preemptions <= 2


@pytest.mark.parametrize("blocks", [8, 20, 64])
@pytest.mark.parametrize("many", [2, 3, 9])
def test_preemptions_for_want_of_blocks_are_bounded(blocks: int, many: int) -> None:
    """E4: each time one is crowded out it waits for twice the room, until it has the pool to itself. The oldest is never preempted."""
    scheduler, runner = make(blocks=blocks, batch=many, context=blocks * BLOCK), FakeRunner(BLOCK)
    asked = [sequence(id, [id + 1] * 3, blocks * BLOCK - 8, ignore_eos=True) for id in range(many)]
    step(scheduler, runner, asked)
    run_out(scheduler, runner, limit=10_000)
    assert all(len(s.output) == s.sampling.max_tokens for s in asked)
    assert asked[0].preemptions == 0
    assert 0 < max(s.preemptions for s in asked) <= math.ceil(math.log2(blocks)) + 1


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


def prepare(phase: str) -> tuple[Scheduler, FakeRunner, Sequence]:
    """A sequence in some phase of its life, beside another that decodes."""
    cost = StepCost(((1, 1.0), (2, 2.0)), pair=0, read=0, load=2.0)
    scheduler, runner = make(blocks=14, batch=2, budget=8, context=50, tier=Tier(20), cost=cost), FakeRunner(BLOCK)
    before = sequence(0, list(range(1, 29)), 1)
    run_out(scheduler, runner, arrivals=[before])
    run_out(scheduler, runner, arrivals=[sequence(1, [50] * 45, 1)])  # and what the pool knew is in the tier
    doomed, other = sequence(2, list(range(1, 33)), 9, ignore_eos=True), sequence(3, [70] * 3, 17, ignore_eos=True)
    match phase:
        case "waiting":
            step(scheduler, runner, [other, sequence(4, [60] * 5, 3, ignore_eos=True)])
            step(scheduler, runner, [doomed])
            assert doomed in scheduler.waiting
        case "loading":
            step(scheduler, runner, [doomed, other])
            assert doomed.pending
            assert doomed.chain
        case "prefill":
            doomed.prompt = [80] * 32
            step(scheduler, runner, [doomed, other])
            assert 0 < doomed.computed < len(doomed.prompt)
        case "decoding":
            step(scheduler, runner, [doomed, other])
            while len(doomed.output) < 3:
                step(scheduler, runner)
        case "preempted":
            doomed.priority = 1
            step(scheduler, runner, [doomed, other])
            while len(doomed.output) < 3:
                step(scheduler, runner)
            step(scheduler, runner, [sequence(4, [60] * 3, 3, ignore_eos=True)])
            assert (doomed.phase, doomed.preemptions) == (Phase.WAITING, 1)
    return scheduler, runner, doomed


@pytest.mark.parametrize("phase", ["waiting", "loading", "prefill", "decoding", "preempted"])
def test_cancelling_loses_no_block_and_no_history(phase: str) -> None:
    """E8: whatever it was doing, it owns nothing, is served nothing, and its next turn finds right what was computed."""
    scheduler, runner, doomed = prepare(phase)
    begun = list(doomed.output)
    sampled = step(scheduler, runner, aborts=[doomed])
    assert doomed.phase is Phase.FINISHED
    assert (doomed.table, doomed.chain, doomed.pending) == ([], [], [])
    assert doomed not in scheduler.waiting
    sampled += run_out(scheduler, runner)
    assert not any(s.sequence is doomed for s in sampled)
    assert doomed.output == begun
    assert scheduler.pool.owned == scheduler.waiting.owners == 0
    again = sequence(9, doomed.prompt + doomed.output + [5], 2)
    run_out(scheduler, runner, arrivals=[again])
    assert len(again.output) in (1, 2)


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


SMALL = st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 6), st.sampled_from((b"a", b"b")), st.booleans())


@settings(deadline=None, max_examples=300)
@given(
    st.lists(SMALL, min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(("fcfs", "lpm")),
    st.sampled_from((0, 0.5, 4.0)),
)
def test_everyone_is_served_in_the_smallest_of_servers(
    asking: list[tuple[int, int, int, bytes, bool]], batch: int, more: int, size: int, blocks: int, policy: str, most: float
) -> None:
    """One place, a budget of one token, blocks of one token, prompts of one token, hardly room for one request."""
    scheduler = make(blocks, batch, batch + more, 100, size, cost=A_ROW, policy=policy, max_step_ms=most, age=3)
    runner = FakeRunner(size)
    asked = []
    for step_number in range(7):
        arrivals = []
        for when, prompt, reply, owner, background in asking:
            if when == step_number:
                arrivals.append(sequence(len(asked), [1] * min(prompt, max(1, scheduler.longest - 1)), reply, owner, ignore_eos=True))
                arrivals[-1].priority = int(background)
                asked.append(arrivals[-1])
        step(scheduler, runner, arrivals)
    run_out(scheduler, runner, limit=400)
    assert all(len(s.output) == min(s.sampling.max_tokens, max(1, scheduler.longest - len(s.prompt))) for s in asked)
    assert scheduler.pool.owned == scheduler.waiting.owners == 0
