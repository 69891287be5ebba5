"""A load generator: conversations of several turns over streaming chat completions, against any server that speaks them.

Prompts are a function of (seed, conversation, turn) alone, so every run and every server gets the same ones.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field

import httpx

WORDS = re.findall(
    r"\w+",
    """
    time year people way day thing world life hand part child eye place work week case point company number group problem fact water room
    mother area money story month lot right study book word business issue side kind head house service friend father power hour
    """,
)


@dataclass(slots=True, frozen=True)
class Load:
    conversations: int
    turns: int = 2
    prompt_words: int = 40
    reply_tokens: int = 48
    seed: int = 0


@dataclass(slots=True)
class Turn:
    """One reply as its client saw it; times in seconds."""

    began: float
    arrivals: list[float] = field(default_factory=list)  # of each piece of text
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(slots=True)
class Result:
    seconds: float
    turns: list[Turn]  # first turns and later ones, in order of their end

    @property
    def tokens_per_second(self) -> float:
        return sum(turn.tokens for turn in self.turns) / self.seconds


async def run(url: str, load: Load) -> Result:
    """Play every conversation at once and wait for the last."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        turns: list[Turn] = []
        begin = time.perf_counter()
        await asyncio.gather(*(_converse(client, load, number, turns) for number in range(load.conversations)))
        return Result(time.perf_counter() - begin, turns)


async def _converse(client: httpx.AsyncClient, load: Load, number: int, turns: list[Turn]) -> None:
    messages: list[dict[str, str]] = []
    for at in range(load.turns):
        chance = random.Random(f"{load.seed}/{number}/{at}")
        words = " ".join(chance.choice(WORDS) for _ in range(load.prompt_words))
        messages.append({"role": "user", "content": f"Write a story with these words: {words}"})
        turn = await _ask(client, messages, load.reply_tokens)
        turns.append(turn)
        messages.append({"role": "assistant", "content": turn.text})


async def _ask(client: httpx.AsyncClient, messages: list[dict[str, str]], tokens: int) -> Turn:
    body = {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    turn = Turn(time.perf_counter())
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    turn.arrivals.append(time.perf_counter())
                    turn.text += text
            if usage := chunk.get("usage"):
                turn.tokens, turn.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                turn.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return turn
