"""Which part of a chat that has outgrown the context is run: `truncation: auto`.

Owns the choice, as a pure function of the chat and of where its messages end in tokens. Whole turns are left out, the oldest first; the
instructions and system messages in front and the newest input always stay.

A window that moved on by one turn at a time would change the front of every prompt, and all of it would be computed anew at each turn.
So whenever it passes the limit it is cut to half of it, and then the front stays put for many turns. Nothing is remembered of earlier
cuts: all turns are gone through from the oldest on, as they came, each decided by what was known when it was asked, so the same history
gives the same cuts again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.store.records import Item
from engine.core import Message


@dataclass(slots=True, frozen=True)
class _Turn:
    """What is said to the model, and its reply."""

    start: int  # index of its first message
    asked: int  # tokens up to the reply
    tokens: int  # of all


def room(max_tokens: int, context: int) -> int:
    """Tokens to leave for a reply: `max_tokens`, but at most half of the context; a quarter if it is not limited (0).

    In eighths of the context, so that clients that ask now for more and now for less do not move the window each time.
    """
    eighth = max(1, context // 8)
    return eighth * min(4, -(-max_tokens // eighth) if max_tokens else 2)


def newest(new: Sequence[Item]) -> int:
    """How many of a chat's last messages are its newest input, of which nothing may be left out: of `new`, what follows the last reply."""
    count = 0
    for item in reversed(new):
        if item.role == "assistant":
            break
        count += item.spoken
    return max(1, count)


def windows(messages: Sequence[Message], ends: Sequence[int], limit: int, newest: int) -> Iterator[list[Message]]:
    """The window of `limit` tokens or less, if the newest input alone is not longer; then smaller ones, should it turn out not to fit.

    `ends`: where each message ends, in tokens from the chat's beginning; `newest`: how many messages at the end must stay.
    """
    front = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    turns = _turns(messages, ends, front)
    last = max(0, bisect.bisect_right([turn.start for turn in turns], len(messages) - newest) - 1)
    shown = len(messages) + 1
    for most in (limit, limit // 2, 0):
        first = _first(turns, most - _end(ends, front), last)
        window = [*messages[:front], *messages[turns[first].start :]] if turns else list(messages)
        if len(window) < shown:
            shown = len(window)
            yield window


def _first(turns: Sequence[_Turn], limit: int, last: int) -> int:
    """Index of the window's first turn, at most `last`."""
    first = held = 0
    for index, turn in enumerate(turns):
        if held + turn.asked > limit:
            while first < min(index, last) and held + turn.asked > limit // 2:
                held -= turns[first].tokens
                first += 1
        held += turn.tokens
    return first


def _turns(messages: Sequence[Message], ends: Sequence[int], front: int) -> list[_Turn]:
    """A turn begins with what follows a reply; a user message after another (whose reply had no text, perhaps) begins one too."""
    starts = [
        index
        for index in range(front, len(messages))
        if index == front
        or (messages[index - 1].role == "assistant" != messages[index].role)
        or messages[index - 1].role == messages[index].role == "user"
    ]
    turns = []
    for start, stop in itertools.pairwise([*starts, len(messages)]):
        reply = next((index for index in range(start, stop) if messages[index].role == "assistant"), stop)
        before = _end(ends, start)
        turns.append(_Turn(start, _end(ends, reply) - before, _end(ends, stop) - before))
    return turns


def _end(ends: Sequence[int], index: int) -> int:
    """Tokens before the message at `index`."""
    return ends[index - 1] if index else 0
