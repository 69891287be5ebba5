"""`make bench`: how much Hocket gains by interleaving conversations, on this machine.

Runs one conversation alone and several at once in turn (A B A B ...), on one server, and prints tokens per second, time to first token, the
gap between pieces of text, and the ratio of the two with its spread.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

from benchmarks.load import Load, Result, run
from tests.serving import Server


def main() -> None:
    parser = argparse.ArgumentParser(prog="hocket bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8, help="how many at once, against one alone (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--turns", type=int, default=2, help="turns of each conversation (default: 2)")
    parser.add_argument("--url", help="a running server to measure; else one is started with the default settings")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = None if asked.url else Server(Path(folder) / "data").start()
        try:
            compare(asked.url or (server and server.url) or "", asked.conversations, asked.turns, asked.rounds)
        finally:
            if server:
                server.stop()


def compare(url: str, conversations: int, turns: int, rounds: int) -> None:
    asyncio.run(run(url, Load(1, turns=1, seed=-1)))  # warm
    print(f"{'conversations':>13} {'tokens/s':>9} {'TTFT p50':>9} {'gap p50':>8} {'gap p99':>8} {'prompt cached':>14}")
    ratios = []
    for seed in range(rounds):
        alone = report(1, asyncio.run(run(url, Load(1, turns=turns, seed=2 * seed))))
        together = report(conversations, asyncio.run(run(url, Load(conversations, turns=turns, seed=2 * seed + 1))))
        ratios.append(together / alone)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{conversations} conversations against 1: {statistics.median(ratios):.2f}x the tokens per second ({spread} over {rounds} pairs)")


def report(conversations: int, result: Result) -> float:
    gaps = sorted(gap for turn in result.turns for gap in turn.gaps)
    ttft = statistics.median(turn.ttft for turn in result.turns)
    cached = sum(turn.cached_tokens for turn in result.turns) / sum(turn.prompt_tokens for turn in result.turns)
    print(
        f"{conversations:>13} {result.tokens_per_second:>9.1f} {ttft * 1e3:>6.0f} ms {gaps[len(gaps) // 2] * 1e3:>5.0f} ms "
        f"{gaps[int(len(gaps) * 0.99)] * 1e3:>5.0f} ms {cached:>14.0%}"
    )
    return result.tokens_per_second


if __name__ == "__main__":
    main()
