"""Traces: who asks what, when, and how long each reply is going to be.

Owns the shape of the load (owners, arrivals, turns, lengths, pauses) and every token of it, all functions of a seed. Knows no scheduler and
no policy: what a conversation says never depends on how it is served, only when it says it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

BYTES = 256  # ids below this are what is said; from here on they name conversations


@dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """Of a trace. Lengths and pauses are log-normal: half are below the median, and the tail is long."""

    conversations: int = 10_000
    owners: int = 8
    heavy: float = 0.0  # the first owner's share of the conversations; the others', and all without it, are equal
    turns: float = 3.0  # of a conversation, on average; geometric
    prompt: float = 60.0  # tokens of a turn's message, median
    reply: float = 120.0  # tokens of a reply, median
    spread: float = 0.8  # sigma of the logarithm of both
    think: float = 20.0  # seconds between a reply's end and the next message, median
    think_spread: float = 1.0
    system: int = 0  # tokens that all conversations of an owner begin with
    background: float = 0.0  # share of the conversations that nobody waits for
    context: int = 8192  # tokens; a turn that would need more is not taken, nor any after it
    seed: int = 0

    def __post_init__(self) -> None:
        if self.conversations < 1 or self.owners < 1:
            raise ValueError(f"expected at least one conversation and one owner, got {self.conversations} and {self.owners}")
        if not (0 <= self.heavy <= 1 and 0 <= self.background <= 1):
            raise ValueError(f"expected shares from 0 to 1, got heavy {self.heavy} and background {self.background}")
        if self.turns < 1 or min(self.prompt, self.reply) < 1 or min(self.spread, self.think, self.think_spread, self.system) < 0:
            raise ValueError(f"expected one turn, one token and no time at least, got {self}")
        if self.context < self.system + 3:
            raise ValueError(f"expected a context that holds {self.system} system tokens and a turn, got {self.context}")


@dataclass(slots=True, frozen=True)
class Turn:
    message: int  # tokens, those of a system prompt included, > 0
    reply: int  # tokens, > 0
    think: float  # seconds after the turn before has ended


@dataclass(slots=True, frozen=True)
class Conversation:
    id: int
    owner: bytes
    priority: int  # as a sequence has it
    start: float  # when it begins, in mean times between two conversations
    turns: tuple[Turn, ...]
    system: int  # tokens
    seed: int

    @property
    def length(self) -> int:
        return sum(turn.message + turn.reply for turn in self.turns)

    def tokens(self) -> list[int]:
        """All that is ever said in it, messages and replies in turn. No other conversation has more than the system prompt in common."""
        shared = Random(f"{self.seed} system {self.owner!r}").randbytes(self.system)
        rest = self.length - self.system - 1
        return [*shared, BYTES + self.id, *Random(f"{self.seed} conversation {self.id}").randbytes(rest)]


@dataclass(slots=True, frozen=True)
class Work:
    """What a trace asks of anyone who serves it, if all that was run before is still there."""

    conversations: int
    replied: int  # tokens
    fresh: int  # tokens of messages, but for system prompts
    seen: int  # positions that the replies' tokens attend to, in all

    @property
    def context(self) -> float:
        """Tokens that a reply's token has before it, on average."""
        return self.seen / self.replied


def work(trace: Sequence[Conversation]) -> Work:
    replied = fresh = seen = 0
    for conversation in trace:
        length = 0
        fresh -= conversation.system
        for turn in conversation.turns:
            length += turn.message
            seen += turn.reply * length + turn.reply * (turn.reply + 1) // 2
            length += turn.reply
            replied, fresh = replied + turn.reply, fresh + turn.message
    return Work(len(trace), replied, fresh, seen)


def make(shape: Shape) -> list[Conversation]:
    """Conversations in order of their beginnings, which are a Poisson process."""
    chance = Random(f"trace {shape.seed}")
    starts = accumulate(chance.expovariate(1.0) for _ in range(shape.conversations))
    return [_conversation(shape, chance, id, start) for id, start in enumerate(starts)]


def owner(number: int) -> bytes:
    return b"owner %d" % number


def _conversation(shape: Shape, chance: Random, id: int, start: float) -> Conversation:
    turns: list[Turn] = []
    left = shape.context
    while not turns or chance.random() >= 1 / shape.turns:
        system = 0 if turns else shape.system
        message, reply = (_length(chance, median, shape.spread) for median in (shape.prompt, shape.reply))
        think = _lognormal(chance, shape.think, shape.think_spread) if turns else 0.0
        if not turns:  # the first is taken, as far as it fits
            message = min(message, left - system - 2)
            reply = min(reply, left - system - message - 1)
        left -= system + message + reply
        if left < 1:
            break
        turns.append(Turn(system + message, reply, think))
    return Conversation(id, _owner(shape, chance), int(chance.random() < shape.background), start, tuple(turns), shape.system, shape.seed)


def _owner(shape: Shape, chance: Random) -> bytes:
    if shape.owners == 1 or (shape.heavy and chance.random() < shape.heavy):
        return owner(0)
    return owner(chance.randrange(bool(shape.heavy), shape.owners))


def _length(chance: Random, median: float, spread: float) -> int:
    return max(1, round(_lognormal(chance, median, spread)))


def _lognormal(chance: Random, median: float, spread: float) -> float:
    return median * math.exp(chance.gauss(0.0, spread))
