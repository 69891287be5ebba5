"""The simulator: the server's scheduler and KV pool under a load of thousands of conversations, on hardware that need not be here.

Replays a trace once for each policy, by a clock that only the predicted cost of each step moves, and prints what each policy gave: time to
the first token, gaps, throughput, cache hits, preemptions, and how evenly owners were served. The same seed gives the same numbers.

  python -m benchmarks.simulate                                        10,000 conversations on an H200, load 0.8
  python -m benchmarks.simulate --preset cpu --conversations 500       on a small CPU
  python -m benchmarks.simulate --load 1.2 --heavy 0.5 --owners 16     overload, half of it from one owner
  python -m benchmarks.simulate --calibrate "--threads 2"              on this machine, measured now

docs/scheduling.md has results and what to conclude from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks import presets, traces
from benchmarks.presets import Preset
from benchmarks.replay import Replay, Setup
from benchmarks.tally import FINE, Tally, percentile, percentile_of
from benchmarks.traces import Conversation, Shape, Work
from engine.scheduler import Limits

POLICIES = ("fcfs", "lpm")
MISUSED = 2  # the exit code for arguments that cannot be meant, as argparse has it

PRESETS: dict[str, Callable[[float], Preset]] = {"h200-8b": presets.h200_8b, "cpu": lambda efficiency: presets.cpu()}


@dataclass(slots=True, frozen=True)
class Line:
    """Of the table."""

    title: str
    cell: Callable[[Tally], str]


def main(words: list[str]) -> None:
    asked = _arguments().parse_args(words)
    try:
        preset = PRESETS[asked.preset](asked.efficiency) if asked.calibrate is None else presets.cpu(presets.measured(asked.calibrate))
        if asked.calibrate is not None:
            print(f"{preset.cost}\n", flush=True)
        setups = [_setup(asked, preset, policy) for policy in _policies(asked.policies)]
        trace = traces.make(_shape(asked, setups[0].limits.context_length))
        if min(asked.rate, asked.load) < 0 or not (asked.rate or asked.load):
            raise ValueError(f"expected a rate or a load above 0, got {asked.rate} and {asked.load}")
        rate = asked.rate or asked.load * capacity(traces.work(trace), setups[0])
    except ValueError as fault:
        sys.stderr.write(f"hocket bench simulate: {fault}\n")
        sys.exit(MISUSED)
    print(f"{told(trace, rate, setups[0])}\n", flush=True)
    tallies = [Replay(trace, rate, setup).run() for setup in setups]
    print(table([setup.limits.policy for setup in setups], tallies))
    print(f"\nreplayed in {' and '.join(f'{tally.wall:.1f}' for tally in tallies)} s")


def capacity(work: Work, setup: Setup) -> float:
    """Conversations that can begin in a second, if every batch is full and the cache finds all that was run before.

    Full is what the batch may have, or what the pool holds at the trace's mean context.
    """
    cost, limits = setup.cost, setup.limits
    batch = min(limits.max_batch_size, setup.pool_tokens / work.context)
    steps = max(work.replied / batch, (work.replied + work.fresh) / limits.max_step_tokens)
    rows = round((work.replied + work.fresh) / steps)
    attending = cost.read * work.seen + cost.pair * work.fresh * work.context
    return 1e3 * work.conversations / (steps * (cost.of_rows(rows) + setup.overhead) + attending)


def told(trace: list[Conversation], rate: float, setup: Setup) -> str:
    """What is replayed, on what."""
    work = traces.work(trace)
    turns = sum(len(conversation.turns) for conversation in trace)
    share = rate / capacity(work, setup)
    return (
        f"{len(trace):,} conversations, {turns:,} turns, {work.replied:,} tokens of replies and {work.fresh:,} of messages; "
        f"{rate:.3g} conversations/s begin: {share:.0%} of what full batches and a cache that finds everything could take. "
        f"Batch {setup.limits.max_batch_size}, {setup.limits.max_step_tokens} tokens a step, pool of {setup.pool_tokens:,} tokens."
    )


def table(names: list[str], tallies: list[Tally]) -> str:
    """Markdown, a column for each."""
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for line in LINES:
        cells = [line.cell(tally) for tally in tallies]
        if any(cells):
            lines.append([line.title, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(values: Iterable[float], ranks: tuple[int, ...] = (50, 90, 99)) -> str:
    kept = list(values)
    return " / ".join(_short(percentile(kept, rank)) for rank in ranks) if kept else ""


def _short(number: float) -> str:
    """Three digits, and no more zeros than it takes."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _gaps(tally: Tally) -> str:
    return " / ".join(_short(percentile_of(tally.gaps, rank) / FINE) for rank in (50, 99, 100))


def _stalls(tally: Tally) -> str:
    stalls = sum(count for gap, count in tally.gaps.items() if gap > 1000 * FINE)
    return _short(1000 * stalls / max(1, tally.turns)) if stalls else ""


def _heaviest(tally: Tally) -> bytes:
    """Of those who asked, the owner who asked most."""
    return max(tally.owners, key=lambda owner: (len(tally.owners[owner]), owner), default=b"")


def _heavy(tally: Tally) -> str:
    return _seconds(tally.owners[_heaviest(tally)], (50, 99)) if len(tally.owners) > 1 else ""


def _light(tally: Tally) -> str:
    return _seconds((wait for owner, waits in tally.owners.items() if owner != _heaviest(tally) for wait in waits), (50, 99))


def _worst_light(tally: Tally) -> str:
    medians = [percentile(waits, 50) for owner, waits in tally.owners.items() if owner != _heaviest(tally)]
    return _short(max(medians)) if medians else ""


def _evenness(tally: Tally) -> str:
    fairness = tally.fairness
    return f"{sum(fairness) / len(fairness):.3f} ({min(fairness):.3f}, {len(fairness)})" if fairness else ""


def _tier(tally: Tally) -> str:
    return f"{tally.loads:,} / {tally.saves:,}" if tally.loads or tally.saves else ""


def _refusals(tally: Tally) -> str:
    return f"{tally.refused:,} / {tally.given_up:,}" if tally.refused else ""


LINES = (
    Line("first token, s: p50 / p90 / p99", lambda tally: _seconds(tally.waits)),
    Line("- of a first turn", lambda tally: _seconds(tally.first_turns)),
    Line("- of a later turn", lambda tally: _seconds(tally.later_turns)),
    Line("- longest", lambda tally: _seconds(tally.waits, (100,))),
    Line("- in the background: p50 / p90 / p99", lambda tally: _seconds(tally.background)),
    Line("between tokens, ms: p50 / p99 / longest", _gaps),
    Line("- gaps over a second, for 1,000 turns", _stalls),
    Line("tokens/s", lambda tally: _short(tally.rate)),
    Line("prompt tokens from the cache", lambda tally: f"{tally.cached / max(1, tally.prompts):.1%}"),
    Line("preemptions / most of one turn", lambda tally: f"{tally.preemptions:,} / {tally.most_preempted}"),
    Line("rows run again for them", lambda tally: f"{tally.again / max(1, tally.rows):.1%}"),
    Line("blocks from / to the tier", _tier),
    Line("batch occupied", lambda tally: f"{tally.occupancy:.0%}"),
    Line("refused / given up", _refusals),
    Line("heaviest owner, first token, s: p50 / p99", _heavy),
    Line("other owners, the same", _light),
    Line("- worst owner's p50", _worst_light),
    Line("Jain's index: mean (least, windows)", _evenness),
    Line("steps / rows / simulated seconds", lambda tally: f"{tally.steps:,} / {tally.rows:,} / {_short(tally.now.seconds)}"),
)


def _policies(named: str) -> list[str]:
    chosen = named.split(",")
    if unknown := [policy for policy in chosen if policy not in POLICIES]:
        raise ValueError(f"expected policies of {', '.join(POLICIES)}, got {', '.join(unknown)}")
    return chosen


def _setup(asked: argparse.Namespace, preset: Preset, policy: str) -> Setup:
    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    cost = preset.cost if asked.load_ms is None else dataclasses.replace(preset.cost, load=asked.load_ms, save=asked.load_ms)
    limits = Limits(
        int(given(asked.batch, preset.batch)),
        int(given(asked.step_tokens, preset.step_tokens)),
        int(given(asked.context, preset.context)),
        frozenset(),
        int(given(asked.lone_step_tokens, preset.lone_step_tokens)),
        policy,
        given(asked.max_step_ms, preset.max_step_ms),
    )
    if limits.max_step_tokens < limits.max_batch_size:
        raise ValueError(f"expected step tokens of at least the batch, got {limits.max_step_tokens} and {limits.max_batch_size}")
    pool = int(given(asked.pool_tokens, preset.pool_tokens))
    if pool < limits.context_length:
        raise ValueError(f"expected a pool that holds a context of {limits.context_length} tokens, got {pool}")
    return Setup(
        cost=cost,
        limits=limits,
        pool_tokens=pool,
        tier_tokens=asked.tier_tokens,
        overhead=given(asked.overhead, preset.overhead),
        max_queue=asked.max_queue,
    )


def _shape(asked: argparse.Namespace, context: int) -> Shape:
    names = (field.name for field in dataclasses.fields(Shape))
    return Shape(**{name: getattr(asked, name) for name in names if name != "context"}, context=context)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hocket bench simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = parser.add_argument_group("the trace")
    for field in dataclasses.fields(Shape):
        if field.name != "context":
            kind: type = int if isinstance(field.default, int) else float
            flag = f"--{field.name.replace('_', '-')}"
            load.add_argument(flag, type=kind, default=field.default, metavar="N", help=f"{SAID[field.name]} (default: {field.default})")
    load.add_argument("--load", type=float, default=0.8, metavar="N", help="arrivals, as a share of capacity (default: 0.8)")
    load.add_argument("--rate", type=float, default=0.0, metavar="N", help="arrivals, in conversations per second, instead of --load")
    served = parser.add_argument_group("what it is replayed on; by default what the preset has")
    served.add_argument("--preset", choices=sorted(PRESETS), default="h200-8b", help="hardware and model (default: h200-8b)")
    served.add_argument(
        "--efficiency",
        type=float,
        default=presets.EFFICIENCY,
        metavar="N",
        help=f"share of its peaks that a GPU keeps up ({presets.EFFICIENCY})",
    )
    served.add_argument(
        "--calibrate", metavar="FLAGS", help="instead of a preset: this machine, measured with these flags of `hocket serve`"
    )
    served.add_argument("--policies", default=",".join(POLICIES), metavar="NAMES", help=f"to compare (default: {','.join(POLICIES)})")
    for flag, what in (
        ("--batch", "sequences that run at once"),
        ("--step-tokens", "tokens in a step"),
        ("--lone-step-tokens", "the same when there is one request only"),
        ("--context", "tokens of a conversation"),
        ("--pool-tokens", "tokens the KV pool holds"),
    ):
        served.add_argument(flag, type=int, metavar="N", help=what)
    served.add_argument("--max-step-ms", type=float, metavar="N", help="of a step that has decodes, at most; 0: any")
    served.add_argument("--max-queue", type=int, default=0, metavar="N", help="requests that may wait (default: 0, any number)")
    served.add_argument("--tier-tokens", type=int, default=0, metavar="N", help="tokens the tier behind the pool holds (default: 0)")
    served.add_argument("--load-ms", type=float, metavar="N", help="what a block takes to come back from the tier, or to go there")
    served.add_argument("--overhead", type=float, metavar="N", help="milliseconds of a step outside the cost model")
    return parser


SAID = {
    "conversations": "how many there are",
    "owners": "how many send them",
    "heavy": "the first owner's share of them; 0: all send alike",
    "turns": "of a conversation, mean",
    "prompt": "tokens of a message, median",
    "reply": "tokens of a reply, median",
    "spread": "sigma of the logarithm of both",
    "think": "seconds from a reply to the next message, median",
    "think_spread": "sigma of its logarithm",
    "system": "tokens that all conversations of an owner begin with",
    "background": "share of the conversations that nobody waits for",
    "seed": "the same one gives the same numbers",
}


if __name__ == "__main__":
    main(sys.argv[1:])
