"""What a lone decode step takes at several lengths of context: the KV it reads, the time for each byte of it, and Python's share.

Owns the measuring. A prompt is not run, since 40,000 tokens take minutes, but given KV that was written once: a step's time does not
depend on the numbers. Drives Hocket's own engine in this process, so it is run in one of its own.

The default model's context is shorter, so random weights of its shape (but with a small vocabulary) and 65,536 positions stand in for it.
Another `--model` is measured at the lengths that it takes.

    python -m benchmarks.long_context [--quick] [flags of hocket serve]        # quick: a few steps, on two layers
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from gguf.constants import GGMLQuantizationType

from app.server import engine_options
from app.settings import load
from benchmarks import machine
from engine.core import EngineOptions, ModelConfig, SamplingParams, Sequence, StepPlan, StepResult
from engine.engine import Engine
from engine.weights.cache import quiet
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from tests.engine import tiny

CONTEXTS = (1_000, 4_000, 16_000, 40_000)  # tokens; times are told against the first, and times per byte against the second
STEPS = 12  # timed steps of a context in a round, of which the median counts
ROUNDS = 5  # every context in turn
WRITTEN = 0x3C  # the byte that KV is made of: a small number in every KV type

STAND_IN = ModelConfig(
    vocab_size=tiny.CONFIG.vocab_size,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    context_length=65_536,
    rms_eps=1e-5,
    rope_theta=100_000.0,
    tied_head=True,
)


@dataclass(slots=True)
class Spent:
    """Seconds of one decode step."""

    step: float = 0.0
    compiled: float = 0.0
    batch: float = 0.0  # of Python: block tables and rows to arrays
    blocks: float = 0.0  # of Python: attention's blocks

    @property
    def python(self) -> float:
        return self.step - self.compiled


def main(words: list[str], steps: int = STEPS, rounds: int = ROUNDS, config: ModelConfig = STAND_IN) -> None:
    quick = words[:1] == ["--quick"]
    options = engine_options(load(words[1:] if quick else words, "python -m benchmarks.long_context"))
    if quick:
        steps, rounds, config = 3, 2, replace(config, layers=2)
    here = machine.measure()
    print(f"{here}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(report(new_engine(options, Path(folder), config), here.bandwidth, steps, rounds))


def new_engine(options: EngineOptions, folder: Path, config: ModelConfig = STAND_IN) -> Engine:
    """An engine whose pool holds the longest of CONTEXTS that the model takes; `folder` is where a stand-in is kept, while it lives."""
    checkpoint = _checkpoint(options, folder, config)
    longest = min(checkpoint.config.context_length, max(CONTEXTS) + 1_000)
    engine = Engine(checkpoint, replace(options, max_total_tokens=max(longest, options.max_total_tokens)), quiet)
    decoder: Any = engine.runner.decoder
    decoder._cache.fill(WRITTEN)
    return engine


def _checkpoint(options: EngineOptions, folder: Path, config: ModelConfig) -> Checkpoint:
    if options.model != "default":
        return prepare(options.model, options.cache_dir, quiet)
    path = tiny.write_gguf(folder / "random.gguf", config, kind=GGMLQuantizationType.Q4_1)
    return prepare(str(path), folder)


def report(engine: Engine, bandwidth: float, steps: int = STEPS, rounds: int = ROUNDS) -> str:
    """Markdown. bandwidth: bytes per second that the machine reads at most."""
    contexts = [context for context in CONTEXTS if context + steps + 2 <= engine.scheduler.longest]
    taken = [[median_step(engine, context, steps) for context in contexts] for _ in range(rounds)]
    decoder: Any = engine.runner.decoder
    a_token = decoder.kv_bytes / (engine.scheduler.pool.blocks * engine.scheduler.pool.block_size)
    read = [context * a_token for context in contexts]
    lines = [
        f"lone decode steps, {a_token:,.0f} bytes of KV for each token of context, {rounds} rounds:\n",
        "| context | step, ms | KV read, MB | beyond the first, of the memory's bandwidth | time for a byte beyond the first, against the "
        "second's | Python, ms (share) | tables and rows, ms | attention's blocks, ms |",
        "| --- |" + " --- |" * 7,
    ]
    for at, context in enumerate(contexts):
        spent = [one[at] for one in taken]
        a_byte = [_a_byte(one, read, at) for one in taken] if at else []
        cells = [
            f"{context:,}",
            _told([1e3 * each.step for each in spent]),
            f"{read[at] / 1e6:,.1f}",
            _told([1 / (each * bandwidth) for each in a_byte]),
            _told([each / _a_byte(one, read, 1) for each, one in zip(a_byte, taken, strict=True)] if at > 1 else []),
            f"{_median(1e3 * each.python for each in spent):.3f} ({_median(each.python / each.step for each in spent):.1%})",
            f"{_median(1e3 * each.batch for each in spent):.3f}",
            f"{_median(1e3 * each.blocks for each in spent):.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _a_byte(one: list[Spent], read: list[float], at: int) -> float:
    """Seconds for each byte of KV more than the first context has."""
    return (one[at].step - one[0].step) / (read[at] - read[0])


def _median(numbers: Iterator[float]) -> float:
    return statistics.median(numbers)


def _told(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})" if numbers else ""


def median_step(engine: Engine, context: int, steps: int) -> Spent:
    """Of `steps` decode steps after a prompt of `context` tokens whose KV nobody computed: each part's median."""
    chance = random.Random(context)
    prompt = [chance.randrange(engine.checkpoint.config.vocab_size) for _ in range(context)]
    sequence = Sequence(context, b"long context", prompt, SamplingParams(max_tokens=steps + 2, temperature=0, ignore_eos=True))
    with mock.patch.object(engine.runner, "run", _unrun):
        engine.step([sequence])
        while not sequence.output:
            engine.step()
    engine.step()  # the first one brings the code into the caches
    taken = []
    while not engine.idle:
        with _timed(engine) as spent:
            engine.step()
        taken.append(spent)
    return Spent(*(statistics.median(getattr(spent, part) for spent in taken) for part in Spent.__slots__))


def _unrun(plan: StepPlan) -> StepResult:
    return StepResult([0 for chunk in plan.chunks if chunk.samples])


@contextmanager
def _timed(engine: Engine) -> Iterator[Spent]:
    spent = Spent()
    decoder: Any = engine.runner.decoder

    def timing(owner: Any, name: str, part: str) -> Any:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            setattr(spent, part, getattr(spent, part) + time.perf_counter() - begin)
            return result

        return mock.patch.object(owner, name, timed)

    with timing(decoder._team, "run", "compiled"), timing(engine.runner, "batch", "batch"), timing(decoder, "_blocks", "blocks"):
        begin = time.perf_counter()
        yield spent
        spent.step = time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1:])
