"""The load: conversations of several turns, their prompts, and what their clients saw.

Prompts are a function of (seed, conversation, turn) alone, so every run and every server gets the same ones. Replies are greedy and exactly
as long as asked for: a server that gives fewer tokens, or no count of them, fails the run. Knows no protocol: `clients` has those.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

WORDS = re.findall(  # each is one token in common vocabularies
    r"\w+",
    """
    time year people way day thing world life hand part child eye place work week case point company number group problem fact water room
    mother area money story month lot right study book word business issue side kind head house service friend father power hour
    """,
)
LEAD = "Write a long story about these words: "
LEAD_TOKENS = 8


class LoadError(Exception):
    """A server did not do what the load asks for; says what was expected and what came."""


@dataclass(slots=True, frozen=True)
class Load:
    """Conversations that begin together, each with its next turn as soon as the last one is answered."""

    conversations: int
    turns: int = 1
    prompt_tokens: int = 60  # of each turn's question
    reply_tokens: int = 64
    seed: str = "0"

    @property
    def tokens(self) -> int:
        """What all replies add up to."""
        return self.conversations * self.turns * self.reply_tokens

    def question(self, conversation: int, turn: int) -> str:
        chance = random.Random(f"{self.seed}/{self.prompt_tokens}/{conversation}/{turn}")
        return LEAD + " ".join(chance.choice(WORDS) for _ in range(max(1, self.prompt_tokens - LEAD_TOKENS)))


@dataclass(slots=True)
class Turn:
    """One reply as its client saw it; times in seconds of `time.perf_counter`."""

    number: int  # within its conversation, from 0
    began: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each piece of text
    pieces: list[str] = field(default_factory=list)
    tokens: int = -1  # -1: the server did not say
    prompt_tokens: int = -1
    cached_tokens: int | None = None  # None: the server does not say

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        """To the first visible text, or to the end of a reply that has none."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.began

    @property
    def gaps(self) -> list[float]:
        """Between one piece of text and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def decode_rate(self) -> float:
        """Tokens per second once the first one is there."""
        if len(self.arrivals) < 2:
            raise LoadError(f"expected a reply in several pieces to take the speed of, got {len(self.arrivals)}")
        return (self.tokens - 1) / (self.arrivals[-1] - self.arrivals[0])

    def piece(self, text: str) -> None:
        self.arrivals.append(time.perf_counter())
        self.pieces.append(text)


class Client(Protocol):
    """One conversation's side of a protocol."""

    async def ask(self, question: str, tokens: int, turn: Turn) -> None:
        """Send the conversation's next question and fill `turn` until its reply ends. Raises: LoadError"""

    async def close(self) -> None: ...


@dataclass(slots=True)
class Result:
    seconds: float
    client_share: float  # of one core that this process took meanwhile
    turns: list[Turn]  # in order of their end

    @property
    def tokens_per_second(self) -> float:
        return sum(turn.tokens for turn in self.turns) / self.seconds

    @property
    def first(self) -> list[float]:
        """Seconds to the first text, of first turns."""
        return [turn.ttft for turn in self.turns if turn.number == 0]

    @property
    def later(self) -> list[float]:
        """Seconds to the first text, of all other turns."""
        return [turn.ttft for turn in self.turns if turn.number > 0]

    @property
    def gaps(self) -> list[float]:
        return [gap for turn in self.turns for gap in turn.gaps]

    @property
    def cached(self) -> float | None:
        """Which part of later turns' prompts was not computed again; None: the server does not say, or there are none."""
        later = [turn for turn in self.turns if turn.number > 0]
        known = [turn.cached_tokens for turn in later if turn.cached_tokens is not None]
        return sum(known) / sum(turn.prompt_tokens for turn in later) if later and len(known) == len(later) else None


def percentile(values: list[float], percent: float) -> float:
    """Between the two nearest ranks; `values` is not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


async def run(client: Callable[[], Client], load: Load) -> Result:
    """Play every conversation at once and wait for the last. Raises: LoadError"""
    turns: list[Turn] = []
    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for number in range(load.conversations):
            group.create_task(_converse(client(), load, number, turns))
    seconds = time.perf_counter() - begin
    return Result(seconds, (time.process_time() - cpu) / seconds, turns)


async def _converse(client: Client, load: Load, number: int, turns: list[Turn]) -> None:
    try:
        for at in range(load.turns):
            turn = Turn(at, time.perf_counter())
            await client.ask(load.question(number, at), load.reply_tokens, turn)
            turn.ended = time.perf_counter()
            if turn.tokens != load.reply_tokens:
                said = "no count" if turn.tokens < 0 else f"{turn.tokens}"
                raise LoadError(f"expected a reply of {load.reply_tokens} tokens, got {said}")
            turns.append(turn)
    finally:
        await client.close()
