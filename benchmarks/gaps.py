"""What readers notice when somebody else brings a long prompt: the gaps between tokens of 8 streams, quiet and beside its prefill.

Owns the measuring and its limit. Asks a real server over WebSockets, as clients see it: as it comes, and with the tightest `--max-step-ms`
of use here, to which the limit applies. Quiet is before the prompt and after it: the streams go on while it is read, and the longer they
are, the more KV their own steps read. With --full-pool, other prompts have filled the KV pool before, so that the long one pushes out what
they left: to the tier, if there is one, within the time of the same steps.

    python -m benchmarks.gaps [--full-pool] [flags of hocket serve]
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients import ResponsesClient
from benchmarks.load import Load, Turn, percentile
from tests.serving import Server

STREAMS, PROMPT, REPLY = 8, 4000, 2000
QUIET = 150  # tokens of each stream before the long prompt comes, and after it
SETTLED = 0.2  # seconds until the gap is over that the last of the prompt makes
ROUNDS = 3
FILLS = 8  # prompts of as many tokens, with --full-pool: as many as the pool holds by default
FULL_POOL = "--full-pool"
PATIENCE = 1200  # times 50 ms
TIGHT = 2.0  # times the quiet median
LIMIT = 4.0  # times the quiet median, at the 99th percentile


@dataclass(slots=True, frozen=True)
class Gaps:
    """Seconds between two tokens of a stream, of all streams."""

    before: list[float]  # the long prompt came
    beside: list[float]  # it, while it was read
    after: list[float]

    @property
    def quiet(self) -> float:
        return statistics.median([*self.before, *self.after])


async def measure(server: Server, number: int, fills: int = 0) -> tuple[Gaps, Turn]:
    """The gaps around a long prompt, and the turn that brought it. fills: how many other long prompts come before it, when the streams run
    already, so that the server was never idle since."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [ResponsesClient(server.url, server.model) for _ in range(STREAMS + 1 + fills)]
        for client in clients:
            await client.open()
            stack.push_async_callback(client.close)
        turns = [Turn(0, time.perf_counter()) for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(client.ask(Load(1, seed=f"gaps/{number}").question(at, 0), REPLY, turn))
            for at, (client, turn) in enumerate(zip(clients, turns, strict=False))
        ]
        for fill, client in enumerate(clients[STREAMS + 1 :]):
            await client.ask(Load(1, prompt_tokens=PROMPT, seed=f"gaps/{number}/{fill}").question(STREAMS, 0), 1, Turn(0, 0.0))
        first = max(len(turn.arrivals) for turn in turns) if fills else 0
        await _quiet(turns, first)
        long = Turn(0, time.perf_counter())
        await clients[STREAMS].ask(Load(1, prompt_tokens=PROMPT, seed=f"gaps/{number}").question(STREAMS, 0), 1, long)
        ended = time.perf_counter()
        await asyncio.sleep(SETTLED)
        await _quiet(turns, max(len(turn.arrivals) for turn in turns))
        for client in clients[:STREAMS]:
            await client.stop()
        await asyncio.gather(*streams)
    began = max(turn.arrivals[first + 10] for turn in turns)
    pairs = [(earlier, later) for turn in turns for earlier, later in zip(turn.arrivals, turn.arrivals[1:], strict=False)]
    last = min(turn.arrivals[-1] for turn in turns)
    before = [later - earlier for earlier, later in pairs if began <= earlier and later <= long.began]
    beside = [later - earlier for earlier, later in pairs if later >= long.began and earlier <= ended]
    after = [later - earlier for earlier, later in pairs if ended + SETTLED <= earlier and later <= last]
    return Gaps(before, beside, after), long


async def _quiet(turns: list[Turn], first: int) -> None:
    """Until every stream has so many tokens beyond its first ones."""
    for _ in range(PATIENCE):
        if all(len(turn.arrivals) >= first + QUIET for turn in turns):
            return
        await asyncio.sleep(0.05)


def told(flags: list[str]) -> tuple[float, list[float]]:
    """The quiet median in milliseconds, and what the 99th percentile beside the prompt is of it, for each round."""
    ratios, medians = [], []
    fills = FILLS if FULL_POOL in flags else 0
    flags = [flag for flag in flags if flag != FULL_POOL]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "data", *flags).start()
        try:
            asyncio.run(measure(server, -1))  # warm
            for number in range(ROUNDS):
                server.wait_until_idle()
                gaps, long = asyncio.run(measure(server, number, fills))
                medians.append(1e3 * gaps.quiet)
                ratios.append(percentile(gaps.beside, 99) / gaps.quiet)
                print(
                    f"  {STREAMS} streams: gaps {_ms(gaps.before)}; beside a prompt of {long.prompt_tokens} tokens, read in "
                    f"{long.ttft:.1f} s: {_ms(gaps.beside)}; after it {_ms(gaps.after)}",
                    flush=True,
                )
        finally:
            server.stop()
    return statistics.median(medians), ratios


def main(flags: list[str]) -> None:
    print("as it comes:")
    quiet, ratios = told(flags)
    print(f"p99 of the gaps beside it, against the quiet median: {_spread(ratios)}")
    most = f"{TIGHT * quiet:.0f}"
    print(f"with --max-step-ms {most}, {TIGHT:.0f} times the quiet median:")
    _, ratios = told([*flags, "--max-step-ms", most])
    over = ": over the limit" if statistics.median(ratios) > LIMIT else ""
    print(f"p99 of the gaps beside it, against the quiet median: {_spread(ratios)} (limit {LIMIT:.0f}x{over})")


def _ms(gaps: list[float]) -> str:
    return f"{statistics.median(gaps) * 1e3:.1f} ms, p99 {percentile(gaps, 99) * 1e3:.1f}"


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.1f}x, {min(ratios):.1f} to {max(ratios):.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
