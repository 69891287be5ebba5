"""Where a step's time goes, stage by stage: a prompt's beginning, a long prompt, 16 decodes and one.

Owns the taking apart of a step: each stage is run by itself and timed. What that adds (threads start once a stage, not once a step) is the
difference of the last two lines. Drives Hocket's own engine in this process.

    python -m benchmarks.stages [flags of hocket serve]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from app.server import engine_options
from app.settings import load
from engine.core import SamplingParams, Sequence
from engine.engine import Engine
from engine.kernels.batch import Batch, Span
from engine.weights.cache import quiet

ROUNDS = 15  # of which the quickest counts, for each stage: what the code takes when nobody disturbs it
CONTEXT = 1024  # tokens that a long prompt has behind it
LAYER = ("norm", "q, k, v", "rope and store", "attention", "merge", "out", "norm", "gate, up, silu", "down")  # as the decoder builds it


@dataclass(slots=True, frozen=True)
class Work:
    name: str
    spans: list[tuple[int, int]]  # (rows, context up to and including the last)


@dataclass(slots=True)
class Profile:
    whole: float  # seconds of the step as it is run
    parts: dict[str, float]  # seconds of each kind of stage by itself


def works(rows: int) -> list[Work]:
    """`rows`: of a step of prefill."""
    return [
        Work(f"{rows} rows of a prompt, at {rows}", [(rows, rows)]),
        Work(f"{rows} rows of a prompt, at {CONTEXT}", [(rows, CONTEXT)]),
        Work("16 decodes at 300", [(1, 300)] * 16),
        Work("1 decode at 300", [(1, 300)]),
    ]


def main(flags: list[str]) -> None:
    engine = Engine.load(engine_options(load(flags, "python -m benchmarks.stages")), quiet)
    print(table(engine))


def table(engine: Engine) -> str:
    """Milliseconds of each kind of stage, in Markdown."""
    decoder: Any = engine.runner.decoder
    named = names(decoder)
    chosen = [work for work in works(engine.scheduler.limits.max_step_tokens) if _fits(work, engine)]
    profiles = [_profile(decoder, work, named) for work in chosen]
    lines = ["| milliseconds in | " + " | ".join(work.name for work in chosen) + " |", "| --- |" + " --- |" * len(chosen)]
    for name in dict.fromkeys(named):
        cells = [f"{1e3 * p.parts[name]:.1f} ({p.parts[name] / sum(p.parts.values()):.0%})" for p in profiles]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("| all of them, one by one | " + " | ".join(f"{1e3 * sum(p.parts.values()):.1f}" for p in profiles) + " |")
    lines.append("| the step as it is run | " + " | ".join(f"{1e3 * p.whole:.1f}" for p in profiles) + " |")
    return "\n".join(lines)


def names(decoder: Any) -> list[str]:
    """Of each stage of its program, in order. Raises: ValueError if it has more or fewer"""
    listed = ["embedding", *LAYER * decoder.config.layers, "norm", "head", "choice"]
    if len(listed) != len(decoder._program):
        raise ValueError(
            f"expected a program of {len(listed)} stages, {len(LAYER)} of them in each of {decoder.config.layers} layers, "
            f"got {len(decoder._program)}: the names in benchmarks/stages.py are not those of what engine/models/llama_cpu.py builds"
        )
    return listed


def _fits(work: Work, engine: Engine) -> bool:
    """Whether the engine has room for it: kernels do not look where they read and write."""
    limits, pool = engine.scheduler.limits, engine.scheduler.pool
    return (
        len(work.spans) <= limits.max_batch_size
        and all(rows <= context <= limits.context_length for rows, context in work.spans)
        and sum(pool.blocks_for(context) for _, context in work.spans) <= pool.blocks
    )


def _profile(decoder: Any, work: Work, named: list[str]) -> Profile:
    batch = _batch(work, decoder.config.vocab_size, decoder.block_size)
    greedy = SamplingParams(max_tokens=1, temperature=0)
    sequences = [Sequence(number, b"stages", [0], greedy) for number in range(len(work.spans))]
    team = decoder._team
    compiled = team.run
    rounds: list[dict[str, float]] = []

    def apart(program: np.ndarray[Any, Any], step: np.ndarray[Any, Any]) -> None:
        spent = dict.fromkeys(named, 0.0)
        for index, name in enumerate(named):
            begin = time.perf_counter()
            compiled(program[index : index + 1], step)
            spent[name] += time.perf_counter() - begin
        rounds.append(spent)

    wholes = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        decoder.choose(batch, sequences)
        wholes.append(time.perf_counter() - begin)
        team.run = apart
        try:
            decoder.choose(batch, sequences)
        finally:
            del team.run
    return Profile(min(wholes), {name: min(spent[name] for spent in rounds) for name in rounds[0]})


def _batch(work: Work, vocabulary: int, size: int) -> Batch:
    chance = Random(1)
    spans, positions, slots = [], [], []
    first = block = 0
    for rows, context in work.spans:
        table = np.arange(block, block + -(-context // size), dtype=np.int64)
        spans.append(Span(first, rows, context, table))
        at = np.arange(context - rows, context)
        positions.append(at)
        slots.append(table[at // size] * size + at % size)
        first, block = first + rows, block + len(table)
    tokens = np.array([chance.randrange(vocabulary) for _ in range(first)], np.int64)
    last = np.array([span.first + span.rows - 1 for span in spans], np.int64)
    return Batch(tokens, np.concatenate(positions), np.concatenate(slots), spans, last)


if __name__ == "__main__":
    main(sys.argv[1:])
