"""The well-known claims about serving language models, measured on Hocket's own engine and this machine.

    make bench ARGS="claims [flags of hocket serve]"

Each claim is two ways of doing the same work, taken in turn (A B A B ...), and told as the ratio of their times with its spread. No
sockets: the engine is driven a step at a time, as the batcher does.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.server import engine_options
from app.settings import load
from benchmarks import machine
from engine.core import EngineOptions, SamplingParams, Sequence
from engine.engine import Engine
from engine.weights.cache import quiet

PAIRS = 3
CONTEXTS = (64, 256, 512, 1024, 2048, 4096)  # tokens
STEPS = 24  # decode steps whose median is a step's time


@dataclass(slots=True, frozen=True)
class Timing:
    """When a request's tokens came, in seconds since it was given to the engine."""

    tokens: list[float]

    @property
    def first(self) -> float:
        return self.tokens[0]

    @property
    def last(self) -> float:
        return self.tokens[-1]


class Bench:
    """Requests of random tokens on one engine. Each has a salt of its own unless told otherwise: no prefix is found in the cache."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = Engine.load(options, quiet)
        self.vocab = self.engine.checkpoint.config.vocab_size
        self.context = min(self.engine.checkpoint.config.context_length, options.max_total_tokens)
        self.batch = options.max_batch_size
        self.pool = options.max_total_tokens
        self._numbers = itertools.count()
        self._chance = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return [self._chance.randrange(self.vocab) for _ in range(length)]

    def request(self, prompt: list[int], tokens: int, salt: bytes | None = None) -> Sequence:
        number = next(self._numbers)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Sequence(number, str(number).encode() if salt is None else salt, prompt, sampling)

    def together(self, requests: list[Sequence]) -> list[Timing]:
        """Run requests that arrive at once to their ends. Raises: RuntimeError if one ends with an error"""
        times: dict[int, list[float]] = {request.id: [] for request in requests}
        begin, arrivals = time.perf_counter(), requests
        while arrivals or not self.engine.idle:
            for number, delta in self.engine.step(arrivals):
                if delta.error:
                    raise RuntimeError(delta.error)
                times[number] += [time.perf_counter() - begin] * len(delta.ids)
            arrivals = []
        return [Timing(times[request.id]) for request in requests]

    def one_by_one(self, requests: list[Sequence]) -> list[Timing]:
        """The same, as a server would that takes the next one when the last is done."""
        timings, waited = [], 0.0
        for request in requests:
            (timing,) = self.together([request])
            timings.append(Timing([waited + at for at in timing.tokens]))
            waited += timing.last
        return timings


def in_turn(slow: Callable[[], float], fast: Callable[[], float], pairs: int = PAIRS) -> list[float]:
    """slow / fast of each pair."""
    return [slow() / fast() for _ in range(pairs)]


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} pairs)"


def kv_cache(bench: Bench, prompt_length: int = 256, tokens: int = 32) -> str:
    """Keys and values kept, against the whole prefix run again for every token."""

    def kept() -> float:
        return bench.together([bench.request(bench.prompt(prompt_length), tokens)])[0].last

    def recomputed() -> float:
        prompt, seconds = bench.prompt(prompt_length), 0.0
        for _ in range(tokens):
            request = bench.request(list(prompt), 1)
            seconds += bench.together([request])[0].last
            prompt.append(request.output[0])
        return seconds

    ratios = in_turn(recomputed, kept)
    return f"a KV cache, {tokens} tokens after {prompt_length}: {spread(ratios)} as fast as running all again for each token"


def step_time(bench: Bench) -> str:
    """How long one token takes at several lengths of context, and against the shortest."""
    contexts = [context for context in CONTEXTS if context + STEPS < bench.context]
    rounds = [[_step(bench, context) for context in contexts] for _ in range(PAIRS)]
    lines = ["step of one row against context length:"]
    for at, context in enumerate(contexts):
        seconds = statistics.median(one[at] for one in rounds)
        lines.append(f"  {context:>5} tokens: {seconds * 1e3:6.2f} ms, {spread([one[at] / one[0] for one in rounds])} the shortest")
    return "\n".join(lines)


def _step(bench: Bench, context: int) -> float:
    """Seconds: the median of STEPS decode steps with `context` tokens before them."""
    (timing,) = bench.together([bench.request(bench.prompt(context), STEPS + 1)])
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(timing.tokens))


def batching(bench: Bench, count: int = 16, prompt_length: int = 60, tokens: int = 64) -> str:
    """Requests that arrive together, interleaved in shared steps against one after the other."""
    count = min(count, bench.batch)
    total: list[float] = []
    first: list[float] = []
    mean: list[float] = []
    worst: list[float] = []
    for _ in range(PAIRS):
        prompts = [bench.prompt(prompt_length) for _ in range(count)]
        alone, shared = (run([bench.request(prompt, tokens) for prompt in prompts]) for run in (bench.one_by_one, bench.together))
        total.append(max(timing.last for timing in alone) / max(timing.last for timing in shared))
        first.append(statistics.mean(timing.first for timing in alone) / statistics.mean(timing.first for timing in shared))
        mean.append(statistics.mean(timing.last for timing in alone) / statistics.mean(timing.last for timing in shared))
        worst.append(_longest_gap(shared) / _longest_gap(alone, 1))
    return "\n".join(
        [
            f"{count} requests interleaved, against one by one:",
            f"  throughput: {spread(total)}",
            f"  mean time to the first token: {spread(first)} shorter",
            f"  mean time to the last token: {spread(mean)} shorter",
            f"  price, the longest wait between two tokens of one reply: {spread(worst)} longer",
        ]
    )


def _longest_gap(timings: list[Timing], count: int | None = None) -> float:
    """Of the first `count` requests."""
    return max(later - earlier for timing in timings[:count] for earlier, later in itertools.pairwise(timing.tokens))


def batch_sizes(bench: Bench, prompt_length: int = 256) -> str:
    """A step's time and tokens per second as rows share its weights."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= bench.batch and size * (prompt_length + 3 * STEPS) <= bench.pool]
    rounds = [[_crowd_step(bench, size, prompt_length) for size in sizes] for _ in range(PAIRS)]
    lines = [f"decode step against rows, {prompt_length} tokens of context each:"]
    for at, size in enumerate(sizes):
        seconds = statistics.median(one[at] for one in rounds)
        gains = [size * one[0] / one[at] for one in rounds]
        lines.append(f"  rows {size:>2}: {seconds * 1e3:6.2f} ms, {size / seconds:5.0f} tokens/s, {spread(gains)} the throughput of one")
    return "\n".join(lines)


def _crowd_step(bench: Bench, size: int, prompt_length: int) -> float:
    """Seconds: the median step in which all `size` requests decode. Their prompts are in the cache, so that all begin at once."""
    prompts = [bench.prompt(prompt_length) for _ in range(size)]
    bench.together([bench.request(prompt, 1, b"crowd") for prompt in prompts])
    timings = bench.together([bench.request(prompt, 2 * STEPS, b"crowd") for prompt in prompts])
    begin, end = max(timing.first for timing in timings), min(timing.last for timing in timings)
    times = [at for at in timings[0].tokens if begin <= at <= end]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def prefix_cache(bench: Bench, prompt_length: int = 1024) -> str:
    """Time to the first token of a prompt whose KV exists, against one that is new."""
    length = min(prompt_length, bench.context // 2)

    def cold() -> float:
        return bench.together([bench.request(bench.prompt(length), 1)])[0].first

    def warm() -> float:
        prompt = bench.prompt(length)
        bench.together([bench.request(prompt, 1, b"shared")])
        return bench.together([bench.request([*prompt, 5], 1, b"shared")])[0].first

    return f"a prefix cache, {length} tokens seen before: {spread(in_turn(cold, warm))} shorter time to the first token"


def main(flags: list[str]) -> None:
    options = engine_options(load(flags, "hocket bench claims"))
    print(f"{machine.measure()}\n", flush=True)
    bench = Bench(options)
    bench.together([bench.request(bench.prompt(64), 8) for _ in range(2)])  # warm
    for claim in (kv_cache, step_time, batch_sizes, batching, prefix_cache):
        print(f"{claim(bench)}\n", flush=True)
