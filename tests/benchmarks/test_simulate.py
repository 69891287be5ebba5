"""The simulator: its traces, its clock, what it tells, and the policies it is there to compare."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import presets, simulate, traces
from benchmarks.replay import RETRIES, Replay, Setup
from benchmarks.tally import FINE, Tally, jain, percentile, percentile_of
from benchmarks.traces import Conversation, Shape, Turn
from engine.core import Phase, Sequence
from engine.cost import StepCost
from engine.engine import Engine
from engine.scheduler import Limits

COST = StepCost(rows=((1, 8.0), (32, 8.0), (64, 16.0), (128, 32.0)), pair=1e-5, read=1e-4, load=0.1)
SMALL = Shape(conversations=60, owners=3, turns=3, prompt=20, reply=20, think=2, context=600)


def setup(batch: int = 8, budget: int = 64, pool: int = 4000, policy: str = "fcfs", **others: Any) -> Setup:
    limits = Limits(batch, budget, 600, frozenset(), policy=policy, max_step_ms=others.pop("max_step_ms", 0.0))
    return Setup(**{"cost": COST, "limits": limits, "pool_tokens": pool, "overhead": 0.5, **others})


def alone(*turns: Turn, start: float = 0.0, id: int = 0, owner: bytes = b"a", system: int = 0) -> Conversation:
    return Conversation(id, owner, 0, start, turns, system, 0)


def numbers(tally: Tally) -> dict[str, Any]:
    return {name: value for name, value in vars(tally).items() if name != "wall"}


# Traces


def test_a_trace_is_a_function_of_its_seed() -> None:
    first, again, other = (traces.make(dataclasses.replace(SMALL, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert [each.turns for each in first] != [each.turns for each in other]
    assert [each.tokens() for each in first[:5]] == [each.tokens() for each in again[:5]]


def test_a_trace_has_the_shape_that_was_asked_for() -> None:
    shape = Shape(conversations=4000, owners=5, heavy=0.5, turns=3, prompt=60, reply=120, spread=0.8, think=20, background=0.2, seed=3)
    trace = traces.make(shape)
    owners = Counter(conversation.owner for conversation in trace)
    turns = [turn for conversation in trace for turn in conversation.turns]
    assert owners[traces.owner(0)] / 4000 == pytest.approx(0.5, abs=0.03)
    assert min(owners[traces.owner(number)] for number in range(1, 5)) / 4000 == pytest.approx(0.125, abs=0.02)
    assert len(turns) / 4000 == pytest.approx(3, rel=0.05)
    assert statistics.median(turn.message for turn in turns) == pytest.approx(60, rel=0.05)
    assert statistics.median(turn.reply for turn in turns) == pytest.approx(120, rel=0.05)
    assert percentile((turn.reply for turn in turns), 99) > 600, "a long tail"
    assert statistics.median(turn.think for conversation in trace for turn in conversation.turns[1:]) == pytest.approx(20, rel=0.1)
    assert statistics.mean(conversation.priority for conversation in trace) == pytest.approx(0.2, abs=0.03)
    gaps = [later.start - earlier.start for earlier, later in itertools.pairwise(trace)]
    assert statistics.mean(gaps) == pytest.approx(1, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1, rel=0.1), "arrivals are a Poisson process"


def test_conversations_share_their_owner_s_system_prompt_and_no_more() -> None:
    trace = traces.make(dataclasses.replace(SMALL, system=30))
    for one in trace:
        assert len(one.tokens()) == one.length <= SMALL.context
        for other in trace[: one.id]:
            common = next(at for at, (a, b) in enumerate(zip(one.tokens(), other.tokens(), strict=False)) if a != b)
            assert common == 30 if one.owner == other.owner else common < 30


def test_a_first_turn_that_does_not_fit_is_cut_and_a_later_one_is_not_taken() -> None:
    long = traces.make(Shape(conversations=50, turns=9, prompt=500, reply=500, context=600, system=100))
    assert all(conversation.length <= 600 and conversation.turns for conversation in long)
    assert all(turn.message > 100 * (not at) and turn.reply > 0 for each in long for at, turn in enumerate(each.turns))


@pytest.mark.parametrize("wrong", [{"owners": 0}, {"heavy": 1.5}, {"turns": 0.5}, {"context": 40, "system": 40}])
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        dataclasses.replace(SMALL, **wrong)


# The clock


def test_time_is_the_cost_of_the_steps() -> None:
    """A prompt of 40 in one step, then five decodes that each see one position more."""
    tally = Replay([alone(Turn(40, 6, 0.0))], 1.0, setup(cost=dataclasses.replace(COST, read=0.01))).run()
    prefill = 8.0 + (40 - 32) * 8 / 32 + max(1e-5 * 40 * 41 / 2, 0.01 * 40) + 0.5
    assert tally.first_turns == pytest.approx([prefill / 1e3])
    assert sorted(tally.gaps) == [round(FINE * (8.0 + 0.01 * seen + 0.5)) for seen in range(41, 46)]
    assert tally.now.seconds == pytest.approx((prefill + sum(8.5 + 0.01 * seen for seen in range(41, 46))) / 1e3)


def test_an_idle_engine_waits_for_who_comes_next_and_arrivals_come_at_the_rate() -> None:
    replay = Replay([alone(Turn(9, 2, 0.0), Turn(3, 1, 7.0)), alone(Turn(9, 1, 0.0), start=40.0, id=1)], 2.0, setup())
    tally = replay.run()
    assert [round(wait, 4) for wait in tally.waits] == [0.0085] * 3, "each turn found the engine idle"
    assert tally.now.seconds == pytest.approx(20.0085, abs=1e-4)
    assert tally.steps == 4


def test_a_next_turn_comes_a_pause_after_the_last_has_ended_with_all_of_it_as_its_prompt() -> None:
    asked: list[tuple[float, list[int]]] = []

    class Watched(Replay):
        def _sequence(self, turn: Any) -> Sequence:
            sequence = super()._sequence(turn)
            asked.append((self.now, list(sequence.prompt)))
            return sequence

    conversation = alone(Turn(20, 5, 0.0), Turn(4, 3, 1.5), Turn(6, 2, 0.25))
    Watched([conversation], 1.0, setup()).run()
    assert [len(prompt) for _, prompt in asked] == [20, 29, 38]
    assert all(prompt == conversation.tokens()[: len(prompt)] for _, prompt in asked), "the replies are the trace's own"
    ended = 0.0085 * 5
    assert [when for when, _ in asked] == pytest.approx([0, ended + 1.5, ended + 1.5 + 0.0085 * 3 + 0.25], abs=1e-3)


def test_blocks_that_come_from_the_tier_take_their_time() -> None:
    """Another conversation has pushed the first one out of a pool that holds one; computing 400 tokens would take 7 steps."""
    trace = [alone(Turn(400, 1, 0.0), Turn(5, 1, 100.0)), alone(Turn(595, 1, 0.0), start=50.0, id=1)]
    tally = Replay(trace, 1.0, setup(pool=608, tier_tokens=2000)).run()
    assert tally.loads == 25
    assert tally.saves >= 25
    (wait,) = tally.later_turns
    assert wait == pytest.approx((8.0 + 25 * COST.load + 0.5) / 1e3, rel=0.1)


def test_a_tier_that_is_no_quicker_than_computing_is_left_out() -> None:
    trace = traces.make(SMALL)
    assert Replay(trace, 8.0, setup(pool=700, tier_tokens=9000, cost=dataclasses.replace(COST, load=50.0))).run().saves == 0
    assert Replay(trace, 8.0, setup(pool=700, tier_tokens=9000)).run().saves > 0


# What is told


@pytest.mark.parametrize("policy", simulate.POLICIES)
def test_the_same_seed_gives_the_same_numbers(policy: str) -> None:
    shape = dataclasses.replace(SMALL, heavy=0.5, background=0.2, system=20)
    one, again = (numbers(Replay(traces.make(shape), 9.0, setup(pool=1200, policy=policy)).run()) for _ in range(2))
    one.pop("now"), again.pop("now")
    assert one == again
    other = Replay(traces.make(dataclasses.replace(shape, seed=1)), 9.0, setup(pool=1200, policy=policy)).run()
    assert other.waits != one["first_turns"] + one["later_turns"]


def test_the_cache_has_all_of_every_history_if_the_pool_is_large_enough() -> None:
    """All but the last token of each reply, which was chosen and never run."""
    trace = traces.make(SMALL)
    tally = Replay(trace, 4.0, setup(pool=40_000)).run()
    histories = [sum(turn.message + turn.reply for turn in each.turns[:at]) for each in trace for at in range(1, len(each.turns))]
    assert tally.cached == sum(histories) - len(histories)
    assert tally.rows == tally.prompts - tally.cached + tally.replied - tally.turns
    assert tally.again == 0


def test_the_cache_has_each_owner_s_system_prompt_once_it_was_run() -> None:
    """One at a time, so that nobody asks for it while it is still being computed."""
    trace = [dataclasses.replace(each, turns=each.turns[:1]) for each in traces.make(dataclasses.replace(SMALL, system=37))]
    tally = Replay(trace, 0.01, setup(pool=40_000)).run()
    assert tally.cached == 37 * (len(trace) - 3)


def test_rows_that_are_run_again_are_counted() -> None:
    tally = Replay(traces.make(dataclasses.replace(SMALL, reply=60, prompt=40)), 9.0, setup(pool=608)).run()
    assert tally.preemptions > 5
    assert tally.rows == tally.prompts - tally.cached + tally.replied - tally.turns + tally.again
    assert tally.again > 0


@pytest.mark.parametrize("policy", simulate.POLICIES)
@pytest.mark.parametrize("others", [{"pool": 640}, {"pool": 640, "tier_tokens": 3000}, {"pool": 1000, "max_step_ms": 12.0}])
def test_every_request_ends_and_no_block_is_lost(policy: str, others: dict[str, Any]) -> None:
    """Too small a pool, owners, background requests, and more than can be served."""
    trace = traces.make(dataclasses.replace(SMALL, heavy=0.6, background=0.3, system=20))
    replay = Replay(trace, 12.0, setup(policy=policy, **others))
    scheduler = replay.scheduler
    while not replay.over:
        replay.step()
        if replay.tally.steps % 23 == 0:
            scheduler.pool.check([sequence.table for sequence in scheduler.running])
            assert all(sequence.phase is Phase.WAITING and not sequence.table for sequence in scheduler.waiting)
    scheduler.pool.check([])
    tally = replay.tally
    assert tally.turns == sum(len(conversation.turns) for conversation in trace) == len(tally.waits + tally.background)
    assert len(tally.background) == sum(len(conversation.turns) for conversation in trace if conversation.priority)
    assert tally.replied == traces.work(trace).replied == tally.now.tokens
    assert tally.gaps.total() == tally.replied - tally.turns
    assert tally.preemptions > 0
    assert not replay._live, "what has ended is dropped"
    assert not tally._requests


def test_who_is_refused_comes_again_and_then_gives_up() -> None:
    """Three places, kept for longer than anyone is told to wait."""
    trace = [alone(Turn(5, 595, 0.0), Turn(1, 1, 0.0), start=float(at), id=at, owner=b"%d" % (at > 5)) for at in range(9)]
    trace = [dataclasses.replace(each, turns=(Turn(5, 590, 0.0), Turn(1, 1, 0.0))) for each in trace]
    tally = Replay(trace, 1e3, setup(batch=2, max_queue=1)).run()
    assert tally.given_up > 0
    assert tally.refused >= tally.given_up * (RETRIES + 1)
    assert tally.turns == 2 * (len(trace) - tally.given_up), "with a request that is given up the conversation ends"
    unbounded = Replay(trace, 1e3, setup(batch=2)).run()
    assert unbounded.refused == 0
    assert unbounded.turns == 2 * len(trace)


def test_percentiles_and_evenness() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, rank) for rank in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert [percentile_of(Counter({5: 98, 7: 1, 900: 1}), rank) for rank in (50, 98, 99, 100)] == [5, 5, 7, 900]
    assert percentile([], 50) == percentile_of(Counter(), 50) == 0
    assert jain([3, 3, 3, 3]) == 1
    assert jain([8, 0, 0, 0]) == 0.25


def test_evenness_is_told_of_owners_who_all_wait() -> None:
    shape = Shape(conversations=600, owners=4, turns=1, prompt=20, reply=40, spread=0.3, context=600)
    tally = Replay(traces.make(shape), 1e4, setup()).run()
    assert len(tally.fairness) > 1
    assert min(tally.fairness) > 0.98
    assert Replay(traces.make(dataclasses.replace(shape, owners=1)), 1e4, setup()).run().fairness == []


# Policies


def test_lpm_answers_hot_prefixes_sooner_where_the_pool_is_tight() -> None:
    """One owner, whose conversations come back before their history is gone. By the time they are served in order of arrival, it is."""
    waits: dict[str, list[float]] = {"fcfs": [], "lpm": []}
    cached: dict[str, int] = dict.fromkeys(waits, 0)
    for seed in range(4):
        trace = traces.make(Shape(conversations=150, owners=1, turns=4, prompt=60, reply=20, think=1, context=600, seed=seed))
        for policy in waits:
            tally = Replay(trace, 8.0, setup(pool=4000, policy=policy)).run()
            waits[policy] += tally.waits
            cached[policy] += tally.cached
    assert cached["lpm"] > 1.5 * cached["fcfs"]
    assert statistics.median(waits["lpm"]) < 0.7 * statistics.median(waits["fcfs"])


@pytest.mark.parametrize("policy", simulate.POLICIES)
def test_a_light_owner_hardly_waits_beside_a_heavy_one(policy: str) -> None:
    """Ten times what can be served, nearly all of it from one owner."""
    shape = Shape(conversations=300, owners=3, heavy=0.95, turns=1, prompt=30, reply=40, context=600)
    tally = Replay(traces.make(shape), 60.0, setup(pool=8000, policy=policy)).run()
    heavy = tally.owners[traces.owner(0)]
    light = tally.owners[traces.owner(1)] + tally.owners[traces.owner(2)]
    assert percentile(heavy, 50) > 5
    assert len(light) > 8
    assert max(light) < 0.5


# Costs


def test_the_gpu_s_costs_are_those_of_the_arithmetic_that_is_shown() -> None:
    preset = presets.h200_8b()
    cost = preset.cost
    assert presets.LLAMA_8B.kv_bytes == 131_072
    assert cost.of_rows(1) == cost.of_rows(206) == pytest.approx(5.58, abs=0.01)
    assert cost.of_rows(2060) == pytest.approx(10 * cost.of_rows(206)), "after the knee each row takes as long as any other"
    assert cost.of_rows(1000) / 1000 == pytest.approx(0.0271, abs=1e-4)
    assert 256 * cost.of_decode(1000) == pytest.approx(11.6, abs=0.1)
    assert cost.pair == pytest.approx(8.8e-7, rel=0.01)
    assert cost.load == pytest.approx(0.055, abs=0.001)
    assert preset.pool_tokens == pytest.approx(899_000, rel=0.001)
    assert presets.h200_8b(1.0).cost.of_rows(1) == pytest.approx(3.35, abs=0.01)


def test_capacity_is_what_full_batches_take() -> None:
    """All at once, in a batch of 8: as many conversations per second as the estimate has, within a tenth."""
    trace = traces.make(Shape(conversations=400, owners=1, turns=1, prompt=30, reply=60, spread=0.3, context=600))
    replayed = setup(pool=40_000)
    estimate = simulate.capacity(traces.work(trace), replayed)
    assert 400 / Replay(trace, 1e6, replayed).run().now.seconds == pytest.approx(estimate, rel=0.1)


def test_this_machine_can_be_measured(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda options, progress: cpu_engine)
    cost = presets.measured("--max-step-tokens 64", rounds=2)
    assert [count for count, _ in cost.rows] == [1, 16, 32, 64]
    assert all(took > 0 for _, took in cost.rows)


# The command


def test_policies_are_compared_in_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "simulate",
        "--preset",
        "cpu",
        "--conversations",
        "40",
        "--think",
        "1",
        "--heavy",
        "0.5",
        "--background",
        "0.2",
        "--load",
        "1.5",
    ]
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["hocket bench", *words])
        bench.main()
        printed.append([line for line in capsys.readouterr().out.splitlines() if "replayed in" not in line])
    assert printed[0] == printed[1]
    assert printed[0][0].startswith("40 conversations, ")
    rows = {cells[1]: cells[2:-1] for line in printed[0] if line.startswith("|") and (cells := [cell.strip() for cell in line.split("|")])}
    assert rows[""] == ["fcfs", "lpm"]
    for title in ("first token, s: p50 / p90 / p99", "between tokens, ms: p50 / p99 / longest", "other owners, the same"):
        assert all(re.fullmatch(r"[\d.,]+( / [\d.,]+)+", cell) for cell in rows[title])
    assert all(0 < float(cell.replace(",", "")) < 1000 for cell in rows["tokens/s"])
    assert "refused / given up" not in rows, "what did not happen has no line"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "fcfs,sjf"], "expected policies of fcfs, lpm, got sjf"),
        (["--batch", "64", "--step-tokens", "32"], "expected step tokens of at least the batch, got 32 and 64"),
        (["--pool-tokens", "100"], "expected a pool that holds a context of 8192 tokens, got 100"),
        (["--turns", "0"], "expected one turn"),
        (["--load", "0"], "expected a rate or a load above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.main([*words, "--conversations", "10"])
    assert ended.value.code == simulate.MISUSED
    assert said in capsys.readouterr().err


def test_every_command_of_the_documentation_can_be_run() -> None:
    text = (Path(simulate.__file__).parent.parent / "docs" / "scheduling.md").read_text()
    commands = re.findall(r"`python -m benchmarks\.simulate (.*?)`", text)
    assert len(commands) > 5
    for command in commands:
        asked = simulate._arguments().parse_args(shlex.split(command))
        preset = simulate.PRESETS[asked.preset](asked.efficiency)
        for policy in simulate._policies(asked.policies):
            assert simulate._setup(asked, preset, policy).limits.policy == policy


def test_ten_thousand_conversations_take_less_than_a_minute() -> None:
    """By the time this process has for itself, of a twentieth of them; as they come when most of the batch is taken."""
    preset = presets.h200_8b()
    limits = Limits(preset.batch, preset.step_tokens, preset.context, frozenset(), preset.lone_step_tokens)
    trace = traces.make(Shape(conversations=500, think=1.0))
    replay = Replay(trace, 60.0, Setup(cost=preset.cost, limits=limits, pool_tokens=preset.pool_tokens, overhead=preset.overhead))
    begin = time.process_time()
    replay.run()
    assert 20 * (time.process_time() - begin) < 60
