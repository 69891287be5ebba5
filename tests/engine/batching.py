"""A batcher on the tiny model, and what its tests ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.batcher import Batcher, Generation
from engine.core import Delta, EngineOptions, SamplingParams


async def until(condition: Callable[[], bool]) -> None:
    """For what the engine thread does and tells nobody."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


def options(folder: Path, **changes: float) -> EngineOptions:
    return EngineOptions(model=str(folder), cache_dir=folder.parent / "cache", kernels="reference", threads=1, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def batcher(tiny_folder: Path) -> AsyncIterator[Batcher]:
    made = Batcher(options(tiny_folder, max_batch_size=4, max_queue=2))
    made.start()
    await made.settled()
    yield made
    await made.close()


def greedy(max_tokens: int = 8, **sampling: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **sampling)  # type: ignore[arg-type]


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]
