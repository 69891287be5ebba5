"""What a conversation's past costs: its next turn when its KV is there, and when it has to come back from disk.

Owns the measuring and the limits that each number is told with. Asks a real server over a WebSocket, as a client sees it; and, for what the
new tokens alone cost, runs the same rows at the same context on Hocket's own engine in this process.

    python -m benchmarks.history [flags of hocket serve]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from app.server import engine_options
from app.settings import load
from benchmarks.clients import ResponsesClient
from benchmarks.load import Load, Turn
from engine.calibrate import one_batch
from engine.core import SamplingParams, Sequence
from engine.engine import Engine
from engine.weights.cache import quiet
from tests.serving import Server

TURNS, QUESTION, REPLY = 15, 60, 145  # 3,000 tokens before the last question
LONG = 2000  # tokens of a conversation that is opened again
ROUNDS = 5

# What the median must not exceed.
CHUNK_LIMIT = 1.15  # times one step of the same rows at the same context
TURN_LIMIT = 3.0  # times turn 2
REOPEN_LIMIT = 1.0  # times computing it


@dataclass(slots=True, frozen=True)
class Told:
    what: str
    ratios: list[float]
    limit: float

    def __str__(self) -> str:
        value = statistics.median(self.ratios)
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f} over {len(self.ratios)}"
        return f"{self.what}: {value:.2f}x ({spread}; limit {self.limit}x{': over the limit' if value > self.limit else ''})"


class Conversation:
    """A client's view of one conversation over its server's restarts."""

    def __init__(self, server: Server, seed: str) -> None:
        self._server = server
        self._seed = seed
        self._previous: str | None = None
        self._turns = 0

    async def ask(self, prompt_tokens: int, reply_tokens: int) -> Turn:
        client = ResponsesClient(self._server.url, self._server.model)
        client.previous = self._previous
        turn = Turn(self._turns, time.perf_counter())
        try:
            await client.open()
            turn.began = time.perf_counter()
            await client.ask(Load(1, prompt_tokens=prompt_tokens, seed=self._seed).question(0, self._turns), reply_tokens, turn)
        finally:
            await client.close()
        self._previous, self._turns = client.previous, self._turns + 1
        return turn


def main(flags: list[str]) -> None:
    for told in (*_turns(flags), *_reopened(flags)):
        print(told, flush=True)


def _turns(flags: list[str]) -> list[Told]:
    """A late turn, against an early one of its conversation, and against one step of its new tokens: run right after it, since a machine is
    not as quick at all times."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the engine thread does: these threads and the server's take turns
    later, inside, outside = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(engine_options(load(flags, "python -m benchmarks.history")), quiet)
        server = Server(Path(folder) / "data", *flags).start()
        try:
            for number in range(ROUNDS):
                second, last, known = asyncio.run(_conversation(server, number))
                prompt, rows = last.prompt_tokens, last.prompt_tokens - known
                chunk, whole = _chunk(engine, number, known, rows)
                later.append(last.ttft / second.ttft)
                inside.append(whole / chunk)
                outside.append(last.ttft / chunk)
        finally:
            server.stop()
            engine.close()
    return [
        Told(f"TTFT of turn {TURNS}, {prompt} tokens of prompt, against turn 2", later, TURN_LIMIT),
        Told(f"  in the engine, against one step of its {rows} new tokens at that context", inside, CHUNK_LIMIT),
        Told("  as the client sees it, against the same", outside, CHUNK_LIMIT),
    ]


async def _conversation(server: Server, number: int) -> tuple[Turn, Turn, int]:
    """Its second turn, its last one, and how many tokens had been run before that."""
    conversation = Conversation(server, f"history/{number}")
    turns = [await conversation.ask(QUESTION, REPLY) for _ in range(TURNS - 1)]
    last = await conversation.ask(QUESTION, 4)
    known = turns[-1].prompt_tokens + turns[-1].tokens - 1  # the last token of a reply that was cut is never run
    assert last.cached_tokens == known, f"{last.cached_tokens} tokens came from the cache, of {known} that were run"
    return turns[1], last, known


def _chunk(engine: Engine, number: int, context: int, rows: int) -> tuple[float, float]:
    """Seconds of one step of `rows` rows after `context` tokens, and of a turn in the engine that has as many new tokens after as many
    known ones."""
    chance, vocabulary = Random(number), engine.checkpoint.config.vocab_size
    history = [chance.randrange(vocabulary) for _ in range(context)]
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    salt, ids = b"history %d" % number, iter(range(100 * number, 100 * number + 100))

    def turn(prompt: list[int]) -> float:
        begin = time.perf_counter()
        engine.step([Sequence(next(ids), salt, prompt, sampling)])
        while not engine.idle:
            engine.step()
        return time.perf_counter() - begin

    turn(history)
    pool = engine.scheduler.pool
    batch = one_batch([(rows, context + rows)], np.arange(pool.blocks, dtype=np.int64), pool.block_size)
    steps, turns = [], []
    for _ in range(3):
        begin = time.perf_counter()
        engine.runner.decoder.choose(batch, [Sequence(0, salt, [0], sampling)])
        steps.append(time.perf_counter() - begin)
        turns.append(turn([*history, *(chance.randrange(vocabulary) for _ in range(rows))]))
    return statistics.median(steps), statistics.median(turns)


def _reopened(flags: list[str]) -> list[Told]:
    """A long conversation's next turn when its KV is on disk, against computing all of it: while the server runs, and after a restart."""
    ratios: dict[str, list[float]] = {"pushed out of the pool": [], "after a restart": [], "after kill -9": []}
    with tempfile.TemporaryDirectory() as folder:
        small = ["--max-total-tokens", "4096", "--offload-dir", str(Path(folder) / "kv")]
        server = Server(Path(folder) / "data", *flags, *small).start()
        try:
            for number in range(ROUNDS):
                for how, got in ratios.items():
                    conversation = Conversation(server, f"reopened/{number}/{how}")
                    cold = asyncio.run(conversation.ask(LONG, 4)).ttft
                    if how == "pushed out of the pool":
                        for other in range(3):
                            asyncio.run(Conversation(server, f"other/{number}/{other}").ask(LONG, 4))
                    else:
                        time.sleep(1)  # an idle moment, in which blocks are written behind
                        server.restart(kill=how == "after kill -9")
                    turn = asyncio.run(conversation.ask(8, 4))
                    assert turn.cached_tokens and turn.cached_tokens >= LONG, f"{turn.cached_tokens} tokens of {LONG} came back"
                    got.append(turn.ttft / cold)
        finally:
            server.stop()
    return [Told(f"a conversation of {LONG} tokens {how}, against computing it", got, REOPEN_LIMIT) for how, got in ratios.items()]


if __name__ == "__main__":
    main(sys.argv[1:])
