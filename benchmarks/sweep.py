"""What each of the scheduler's parameters does to throughput and waiting: one is changed, the others stay as they are.

Owns the parameters' values, the load and the table; `plots.py` draws. Every round plays the same load against a fresh server of each
setting in turn, so that a slow minute of the machine falls on all of them alike.

    python -m benchmarks.sweep [--rounds N] [--knob NAME] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.clients import ResponsesClient
from benchmarks.load import Load, LoadError, Turn, percentile
from tests.serving import Server

CONVERSATIONS, TURNS, REPLY = 16, 2, 64
QUESTIONS = (40, 60, 80, 600)  # tokens, in turn
ARRIVING = 1.0  # seconds in which conversations begin
THINKING = 0.3  # seconds between a reply and the next question, on average


@dataclass(slots=True, frozen=True)
class Knob:
    flag: str
    values: tuple[str, ...]
    default: str
    beside: tuple[str, ...] = ()  # other flags, without which it would have nothing to do


KNOBS = (
    Knob("block-size", ("16", "32", "64"), "16"),
    Knob("max-batch-size", ("4", "8", "16", "32"), "32"),
    Knob("max-step-tokens", ("32", "64", "128", "256"), "128"),
    Knob("max-step-ms", ("20", "50", "100", "0"), "100"),
    Knob("schedule-policy", ("fcfs", "lpm"), "fcfs", ("--max-batch-size", "4")),
    Knob("batch-window-ms", ("0", "20", "100"), "0"),
)


@dataclass(slots=True, frozen=True)
class Figures:
    throughput: float  # tokens a second
    first: float  # TTFT p50, seconds
    late: float  # TTFT p95, seconds
    gap: float  # p99 between tokens, seconds


Samples = dict[tuple[Knob, str], list[Figures]]


async def play(server: Server, seed: str, conversations: int = CONVERSATIONS) -> Figures:
    """Conversations that begin within a second, think between turns, and are of unequal length. Raises: LoadError"""
    turns: list[Turn] = []

    async def converse(number: int) -> None:
        chance = Random(f"{seed}/{number}")
        client = ResponsesClient(server.url, server.model)
        await client.open()
        await asyncio.sleep(chance.uniform(0, ARRIVING))
        for at in range(TURNS):
            question = Load(1, prompt_tokens=QUESTIONS[(number + at) % len(QUESTIONS)], seed=seed).question(number, at)
            turn = Turn(at, time.perf_counter())
            await client.ask(question, REPLY, turn)
            turn.ended = time.perf_counter()
            turns.append(turn)
            await asyncio.sleep(chance.expovariate(1 / THINKING))
        await client.close()

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(conversations):
            group.create_task(converse(number))
    seconds = max(turn.ended for turn in turns) - begin
    ttfts = [turn.ttft for turn in turns]
    gaps = [gap for turn in turns for gap in turn.gaps]
    return Figures(sum(turn.tokens for turn in turns) / seconds, percentile(ttfts, 50), percentile(ttfts, 95), percentile(gaps, 99))


def measure(knobs: list[Knob], rounds: int) -> Samples:
    samples: Samples = defaultdict(list)
    for number in range(rounds):
        for knob in knobs:
            for value in knob.values:
                with tempfile.TemporaryDirectory() as folder:
                    server = Server(Path(folder) / "data", f"--{knob.flag}", value, *knob.beside).start()
                    try:
                        asyncio.run(play(server, "warm", 2))
                        figures = asyncio.run(play(server, f"sweep/{number}"))
                    finally:
                        server.stop()
                samples[knob, value].append(figures)
                print(f"{knob.flag} {value}: {figures.throughput:.0f} tokens/s, TTFT p50 {figures.first:.2f} s", flush=True)
    return samples


def table(samples: Samples) -> str:
    """Medians and ranges, in Markdown; the default of each parameter in bold."""
    lines = ["| parameter | value | tokens/s | TTFT p50 | TTFT p95 | gap p99 |", "| --- | --- | --- | --- | --- | --- |"]
    for (knob, value), taken in samples.items():
        shown = f"**{value}**" if value == knob.default else value
        cells = [
            _spread(taken, lambda figures: figures.throughput, "{:.0f}"),
            _spread(taken, lambda figures: figures.first, "{:.2f}", " s"),
            _spread(taken, lambda figures: figures.late, "{:.2f}", " s"),
            _spread(taken, lambda figures: 1e3 * figures.gap, "{:.0f}", " ms"),
        ]
        beside = f" ({' '.join(knob.beside)})" if knob.beside else ""
        lines.append(f"| `--{knob.flag}`{beside} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(taken: list[Figures], read: Callable[[Figures], float], form: str, unit: str = "") -> str:
    values = [read(figures) for figures in taken]
    return f"{form.format(statistics.median(values))}{unit} ({form.format(min(values))} to {form.format(max(values))})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds in turn (default: 3)")
    parser.add_argument("--knob", action="append", default=[], metavar="NAME", help="this parameter only; may be given several times")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the figures there, too")
    asked = parser.parse_args()
    if unknown := set(asked.knob) - {knob.flag for knob in KNOBS}:
        parser.error(f"expected parameters of {', '.join(knob.flag for knob in KNOBS)}, got {', '.join(sorted(unknown))}")
    try:
        samples = measure([knob for knob in KNOBS if not asked.knob or knob.flag in asked.knob], asked.rounds)
    except* LoadError as faults:
        parser.exit(1, f"{faults.exceptions[0]}\n")
    print(f"\n{table(samples)}")
    if asked.plot:
        from benchmarks import plots  # it brings matplotlib in

        plots.sweep(samples, asked.plot)


if __name__ == "__main__":
    main()
