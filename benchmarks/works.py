"""What is measured: each work is a load, and gives figures that servers are compared by.

Owns the rows of the table. Knows neither protocols nor servers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.load import Load, Result, percentile


@dataclass(slots=True, frozen=True)
class Sample:
    """What one server made of one round of a work."""

    results: list[Result]  # of each repeat
    memory: int | None  # resident bytes of the server when the last reply had ended; None: out of sight


@dataclass(slots=True, frozen=True)
class Figure:
    title: str
    read: Callable[[Sample], float | None]  # None: not to be had from this server
    show: Callable[[float], str]
    more_is_better: bool = True

    def of(self, sample: Sample) -> str:
        value = self.read(sample)
        return "?" if value is None else self.show(value)


@dataclass(slots=True, frozen=True)
class Work:
    name: str
    conversations: int
    turns: int
    prompt_tokens: int
    reply_tokens: int
    repeats: int
    figures: tuple[Figure, ...]

    def loads(self, round: int) -> list[Load]:
        """The same for every server; new prompts in each round and repeat, so that no cache knows them."""
        return [
            Load(self.conversations, self.turns, self.prompt_tokens, self.reply_tokens, f"{self.name}/{round}/{repeat}")
            for repeat in range(self.repeats)
        ]


def works(quick: bool = False) -> list[Work]:
    """All of them, in the table's order; quick: in a small form that takes seconds and proves little."""
    if quick:
        return [_crowd(4, 2, 16, True), _crowd(8, 2, 16), _single("short", 40, 32), _single("long", 300, 32), _prefill(256)]
    return [_crowd(16, 4, 64, True), _crowd(32, 4, 64), _single("short", 64, 128), _single("long", 1500, 128), _prefill(1024)]


def _crowd(conversations: int, turns: int, reply_tokens: int, detailed: bool = False) -> Work:
    title = f"{conversations} conversations"
    figures = [Figure(f"{title} x {turns} turns, tokens/s", _throughput, "{:.0f}".format)]
    if detailed:
        later = f"{'turn 2' if turns == 2 else f'turns 2 to {turns}'}, TTFT p50, {title}"
        figures.append(Figure(later, lambda sample: statistics.median(_later(sample)), "{:.2f} s".format, more_is_better=False))
        figures.append(Figure(f"resident memory, {title}", _memory, "{:.0f} MB".format, more_is_better=False))
    return Work(f"crowd{conversations}", conversations, turns, 60, reply_tokens, 1, tuple(figures))


def _single(name: str, prompt_tokens: int, reply_tokens: int) -> Work:
    context = "short context" if name == "short" else f"{prompt_tokens} tokens of context"
    return Work(name, 1, 1, prompt_tokens, reply_tokens, 3, (Figure(f"one stream, {context}, tokens/s", _decode_rate, "{:.1f}".format),))


def _prefill(prompt_tokens: int) -> Work:
    return Work(
        "prefill", 1, 1, prompt_tokens, 1, 3, (Figure(f"prefill of {prompt_tokens} tokens, tokens/s", _prefill_rate, "{:.0f}".format),)
    )


def _throughput(sample: Sample) -> float:
    return sample.results[0].tokens_per_second


def _later(sample: Sample) -> list[float]:
    return [ttft for result in sample.results for ttft in result.later]


def _memory(sample: Sample) -> float | None:
    return None if sample.memory is None else sample.memory / 1e6


def _decode_rate(sample: Sample) -> float:
    return statistics.median(turn.decode_rate for result in sample.results for turn in result.turns)


def _prefill_rate(sample: Sample) -> float:
    """Of all the prompt's tokens: nothing of it is cached, apart from what every chat begins with."""
    return statistics.median(turn.prompt_tokens / turn.ttft for result in sample.results for turn in result.turns)


def detail(sample: Sample) -> str:
    """What else the clients saw, in one line."""
    results = sample.results
    parts = [f"TTFT first turns {_percentiles([ttft for result in results for ttft in result.first], 50, 95)}"]
    if later := _later(sample):
        parts.append(f"later turns {_percentiles(later, 50, 95)}")
    if gaps := [gap for result in results for gap in result.gaps]:
        parts.append(f"gaps {_percentiles(gaps, 50, 99)}")
    if (cached := results[0].cached) is not None:
        parts.append(f"{cached:.0%} of later prompts cached")
    if sample.memory is not None:
        parts.append(f"{sample.memory / 1e6:.0f} MB resident")
    parts.append(f"client {max(result.client_share for result in results):.0%} of a core")
    return ", ".join(parts)


def _percentiles(seconds: list[float], *ranks: int) -> str:
    return " / ".join(f"p{rank} {percentile(seconds, rank) * 1e3:.0f}" for rank in ranks) + " ms"
