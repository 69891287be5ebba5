"""Turns for the tiny model, and reading what it says."""

from __future__ import annotations

from typing import Any

from app.conversations.run import Run
from app.conversations.turn import Said, Turn
from engine.core import SamplingParams


def turn(text: str = "hello you", owner: str = "ana", max_tokens: int = 12, **fields: Any) -> Turn:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logit_bias={0: -100.0, 1: -100.0, 2: -100.0})
    return Turn(owner=owner, items=[Said("user", text)], sampling=sampling, **fields)


async def text_of(run: Run) -> str:
    return "".join([entry.text async for _, entry in run.entries()])
