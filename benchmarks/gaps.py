"""What readers notice when somebody else brings a long prompt: the gaps between tokens of 8 streams, quiet and beside its prefill.

Owns the measuring and its limit. Asks a real server over WebSockets, as clients see it: as it comes, and with the tightest `--max-step-ms`
of use here, to which the limit applies.

    python -m benchmarks.gaps [flags of hocket serve]
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.clients import ResponsesClient
from benchmarks.load import Load, Turn, percentile
from tests.serving import Server

STREAMS, PROMPT, REPLY = 8, 4000, 2000
QUIET = 150  # tokens of each stream before the long prompt comes
ROUNDS = 3
PATIENCE = 1200  # times 50 ms
TIGHT = 2.0  # times the quiet median
LIMIT = 4.0  # times the quiet median, at the 99th percentile


async def measure(server: Server, number: int) -> tuple[list[float], list[float], Turn]:
    """Gaps of all streams before the long prompt and while it is read, in seconds, and the turn that brought it."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [ResponsesClient(server.url, server.model) for _ in range(STREAMS + 1)]
        for client in clients:
            await client.open()
            stack.push_async_callback(client.close)
        turns = [Turn(0, time.perf_counter()) for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(client.ask(Load(1, seed=f"gaps/{number}").question(at, 0), REPLY, turn))
            for at, (client, turn) in enumerate(zip(clients, turns, strict=False))
        ]
        for _ in range(PATIENCE):
            if all(len(turn.arrivals) >= QUIET for turn in turns):
                break
            await asyncio.sleep(0.05)
        long = Turn(0, time.perf_counter())
        await clients[-1].ask(Load(1, prompt_tokens=PROMPT, seed=f"gaps/{number}").question(STREAMS, 0), 1, long)
        ended = time.perf_counter()
        await asyncio.sleep(0.2)  # until the gap is over that the last of it makes
        for client in clients[:STREAMS]:
            await client.stop()
        await asyncio.gather(*streams)
    began = max(turn.arrivals[10] for turn in turns)
    pairs = [(earlier, later) for turn in turns for earlier, later in zip(turn.arrivals, turn.arrivals[1:], strict=False)]
    quiet = [later - earlier for earlier, later in pairs if began <= earlier and later <= long.began]
    beside = [later - earlier for earlier, later in pairs if later >= long.began and earlier <= ended]
    return quiet, beside, long


def told(flags: list[str]) -> tuple[float, list[float]]:
    """The quiet median in milliseconds, and what the 99th percentile beside the prompt is of it, for each round."""
    ratios, medians = [], []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "data", *flags).start()
        try:
            asyncio.run(measure(server, -1))  # warm
            for number in range(ROUNDS):
                server.wait_until_idle()
                quiet, beside, long = asyncio.run(measure(server, number))
                medians.append(1e3 * statistics.median(quiet))
                ratios.append(1e3 * percentile(beside, 99) / medians[-1])
                print(
                    f"  {STREAMS} streams: gaps {medians[-1]:.1f} ms, p99 {percentile(quiet, 99) * 1e3:.1f}; beside a prompt of "
                    f"{long.prompt_tokens} tokens, read in {long.ttft:.1f} s: {statistics.median(beside) * 1e3:.1f} ms, "
                    f"p99 {percentile(beside, 99) * 1e3:.1f}",
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


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.1f}x, {min(ratios):.1f} to {max(ratios):.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
