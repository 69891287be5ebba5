"""What a step costs, seen from inside: against the machine's memory, Python's share, the event loop beside it. And how long a start takes,
with everything in the cache and with no kernel in it.

Owns the measuring and the limits that each number is told with; `machine.py` owns the floor. Drives Hocket's own engine in this process, so
it is run in one of its own.

    python -m benchmarks.steps [--quick] [flags of hocket serve]        # quick: without compiling, which takes a minute
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numba

from app.server import engine_options
from app.settings import load
from benchmarks import machine
from benchmarks.load import percentile
from engine.batcher import Batcher, Generation
from engine.core import EngineOptions, SamplingParams, Sequence
from engine.engine import Engine
from engine.weights.cache import quiet
from tests.serving import Server

STEPS = 60  # timed steps of a run
ROUNDS = 5
TICK = 0.001  # seconds
CROWD = 16  # rows

# What the median of several runs, or the only number of one, must not exceed.
FLOOR_LIMIT = 1.6  # times what reading the weights takes
PYTHON_LIMIT = 0.10  # of a step of CROWD rows
LAG_LIMIT = 10e-3  # seconds, at the 99th percentile
READY_LIMIT = 3.0  # seconds
COMPILE_LIMIT = 180.0  # seconds


@dataclass(slots=True, frozen=True)
class Told:
    line: str
    value: float  # the one that has a limit: the median of several runs, or the only one
    limit: float
    words: str  # the limit, as it is said

    def __str__(self) -> str:
        return f"{self.line} ({self.words}{': over the limit' if self.value > self.limit else ''})"


def main(words: list[str]) -> None:
    quick = words[:1] == ["--quick"]
    flags = words[1:] if quick else words
    options = engine_options(load(flags, "python -m benchmarks.steps"))
    here = machine.measure()
    engine = Engine.load(options, quiet)
    print(_alone(engine, here), flush=True)
    print(_together(engine, min(CROWD, options.max_batch_size)), flush=True)
    decoder: Any = engine.runner.decoder
    decoder.close()
    print(asyncio.run(_lag(options)), flush=True)
    print(_start(flags), flush=True)
    if not quick:
        print(_compile(), flush=True)  # last: it takes a minute


def _alone(engine: Engine, here: machine.Machine) -> Told:
    decoder: Any = engine.runner.decoder
    read = decoder.packed.nbytes
    steps = [_timed(engine, 1, seed)[0] for seed in range(ROUNDS)]
    times = statistics.median(steps) / (read / here.bandwidth)
    return Told(machine.floor_line(here, steps, read), times, FLOOR_LIMIT, f"limit {FLOOR_LIMIT}x")


def _together(engine: Engine, rows: int) -> Told:
    steps, kernels = zip(*(_timed(engine, rows, 100 + seed) for seed in range(ROUNDS)), strict=True)
    share = statistics.median(1 - kernel / step for step, kernel in zip(steps, kernels, strict=True))
    return Told(machine.python_line([*steps], [*kernels], rows), share, PYTHON_LIMIT, f"limit {PYTHON_LIMIT:.0%}")


def _timed(engine: Engine, rows: int, seed: int) -> tuple[float, float]:
    """Mean seconds of a decode step of so many sequences with a short context, and of its compiled part."""
    chance, decoder = Random(seed), engine.runner.decoder
    spent = [0.0]
    team: Any = decoder._team  # type: ignore[attr-defined]
    compiled = team.run

    def run(*arguments: Any) -> None:
        begin = time.perf_counter()
        compiled(*arguments)
        spent[0] += time.perf_counter() - begin

    vocabulary = engine.checkpoint.config.vocab_size
    sampling = SamplingParams(max_tokens=STEPS + 8, temperature=0, ignore_eos=True)
    prompts = [[chance.randrange(vocabulary) for _ in range(32)] for _ in range(rows)]
    sequences = [Sequence(1000 * seed + index, b"steps", prompt, sampling) for index, prompt in enumerate(prompts)]
    engine.step(sequences)
    while any(sequence.computed < len(sequence.prompt) for sequence in sequences):
        engine.step()
    team.run = run
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - begin
    del team.run
    while not engine.idle:
        engine.step()
    return seconds / STEPS, spent[0] / STEPS


async def _lag(options: EngineOptions) -> Told:
    """How late the loop's ticks are while 16 conversations stream and a prompt of 1,000 tokens is prefilled."""
    batcher = Batcher(options)
    batcher.start()
    ready = await batcher.settled()
    chance = Random(7)

    def ask(tokens: int, reply: int) -> Generation:
        ids = [chance.randrange(ready.vocab_size) for _ in range(tokens)]
        return batcher.session(b"lag").generate(ids, SamplingParams(max_tokens=reply, temperature=0, ignore_eos=True))

    async def read(generation: Generation) -> None:
        async for _ in generation:
            pass

    streams = asyncio.gather(*(read(ask(60, 200)) for _ in range(CROWD)))
    lags: list[float] = []
    prefill = None
    while not streams.done():
        begin = time.perf_counter()
        await asyncio.sleep(TICK)
        lags.append(max(0.0, time.perf_counter() - begin - TICK))
        if prefill is None and len(lags) > 200:
            prefill = asyncio.create_task(read(ask(1000, 1)))
    await streams
    if prefill is not None:
        await prefill
    await batcher.close()
    p50, p99, worst = (percentile(lags, rank) for rank in (50, 99, 100))
    shown = f"lag p50 {p50 * 1e3:.2f}, p99 {p99 * 1e3:.2f}, worst {worst * 1e3:.2f} ms"
    line = f"event loop beside {CROWD} streams and a prefill of 1,000 tokens: {shown}"
    return Told(line, p99, LAG_LIMIT, f"limit {LAG_LIMIT * 1e3:.0f} ms at p99")


def _start(flags: list[str]) -> Told:
    """How long a server takes to listen, and to be ready, with everything in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        server = Server(Path(folder), *flags).start(wait=False)
        listening = time.perf_counter() - begin
        try:
            server.wait_until_ready()
            ready = time.perf_counter() - begin
        finally:
            server.stop()
    line = f"start with a warm cache: the page after {listening:.1f} s, the model after {ready:.1f} s"
    return Told(line, ready, READY_LIMIT, f"limit {READY_LIMIT:.0f} s")


def _compile() -> Told:
    """How long all kernels take to compile, in a child as always. What this process compiles is kept where it was before."""
    from engine.kernels.cpu import attention, build, choose, kv, linear, rows  # noqa: F401  (they declare the stages)
    from engine.kernels.cpu.stage import STAGES

    config: Any = numba.config
    kept = config.CACHE_DIR
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        try:
            build.prepare(Path(folder), STAGES, quiet)
        finally:
            config.CACHE_DIR = kept
        seconds = time.perf_counter() - begin
    return Told(f"all {len(STAGES)} kernels compiled in {seconds:.0f} s", seconds, COMPILE_LIMIT, f"limit {COMPILE_LIMIT:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
