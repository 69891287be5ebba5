"""What a step costs, seen from inside: against the machine's memory, Python's share, the event loop beside it. And how long a start takes.

Owns the measuring; `machine.py` owns the floor. Drives Hocket's own engine in this process, so it is run in one of its own.

    python -m benchmarks.steps [flags of hocket serve]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

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


def main(flags: list[str]) -> None:
    settings = load(flags, "python -m benchmarks.steps")
    options = engine_options(settings)
    here = machine.measure()
    engine = Engine.load(options, quiet)
    decoder: Any = engine.runner.decoder
    read = decoder.packed.nbytes
    alone = [_timed(engine, 1, seed)[0] for seed in range(ROUNDS)]
    print(machine.floor_line(here, alone, read))
    together = [_timed(engine, 16, 100 + seed) for seed in range(ROUNDS)]
    print(machine.python_line([step for step, _ in together], [kernel for _, kernel in together]))
    decoder.close()
    print(asyncio.run(_lag(options)))
    print(_start(flags))


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


async def _lag(options: EngineOptions) -> str:
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

    streams = asyncio.gather(*(read(ask(60, 200)) for _ in range(16)))
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
    p50, p99, worst = (percentile(lags, rank) * 1e3 for rank in (50, 99, 100))
    return f"event loop beside 16 streams and a prefill of 1,000 tokens: lag p50 {p50:.2f}, p99 {p99:.2f}, worst {worst:.2f} ms"


def _start(flags: list[str]) -> str:
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
    return f"start: the page after {listening:.1f} s, the model after {ready:.1f} s"


if __name__ == "__main__":
    main(sys.argv[1:])
