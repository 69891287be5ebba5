"""What the engine thread does between steps, on the tiny model: its inbox, the batch window, tidying up, its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine import core
from engine.batcher import Batcher
from engine.core import FinishReason
from engine.engine import TOUCHED_AHEAD, Deltas
from tests.engine.batching import batcher, collect, greedy, options, until

__all__ = ["batcher"]


class Overtaking(threading.Condition):
    """The batcher's condition, where the engine thread always takes what has come just before anyone else comes in."""

    def __init__(self, batcher: Batcher) -> None:
        super().__init__()
        self._batcher = batcher
        self.rounds = threading.Semaphore(0)

    def __enter__(self) -> bool:
        if threading.current_thread() is not self._batcher._thread:
            while self.rounds.acquire(blocking=False):
                pass
            for _ in range(2):
                self.acquire()
                self.notify()
                self.release()
                assert self.rounds.acquire(timeout=30)
        return super().__enter__()


async def test_nothing_is_lost_that_comes_while_the_engine_thread_looks(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.batcher.BEAT_SECONDS", 0.01)
    batcher = Batcher(options(tiny_folder))
    overtaking = batcher._wake = Overtaking(batcher)
    batcher.start()
    await batcher.settled()
    assert batcher._engine
    real = batcher._engine.step

    def step(*inbox: list[core.Sequence]) -> Deltas:
        deltas = real(*inbox)
        overtaking.rounds.release()
        return deltas

    monkeypatch.setattr(batcher._engine, "step", step)
    generation = batcher.session(b"a").generate([3], greedy(200))
    await anext(aiter(generation))
    generation.cancel()
    assert (await collect(generation))[-1].finish is FinishReason.CANCELLED
    await batcher.close()


class Watched(threading.Condition):
    """The batcher's condition, telling when the engine thread waits though something has arrived."""

    def __init__(self, batcher: Batcher) -> None:
        super().__init__()
        self._batcher = batcher
        self.gathering = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if self._batcher._arrivals:
            self.gathering.set()
        return super().wait(timeout)


@pytest.fixture
async def gatherer(tiny_folder: Path) -> AsyncIterator[Batcher]:
    """A batcher that waits for ever, as far as a test goes, for others to come."""
    made = Batcher(options(tiny_folder, max_batch_size=4, batch_window_ms=3_600_000))
    made._wake = Watched(made)
    made.start()
    await made.settled()
    yield made
    await made.close()


async def gathering(batcher: Batcher) -> bool:
    assert isinstance(batcher._wake, Watched)
    return await asyncio.to_thread(batcher._wake.gathering.wait, 30)


async def test_a_full_batch_is_gathered_into_one_first_step_and_then_waits_no_longer(gatherer: Batcher) -> None:
    session = gatherer.session(b"a")
    taken = [session.generate([3] * 5, greedy())]
    assert await gathering(gatherer)
    taken += [session.generate([4 + i] * 5, greedy()) for i in range(3)]
    await asyncio.gather(*map(collect, taken))
    assert gatherer._engine
    assert gatherer._engine.steps[0].prefills == tuple((generation.id, 5) for generation in taken)


async def test_the_window_has_an_end(tiny_folder: Path) -> None:
    batcher = Batcher(options(tiny_folder, batch_window_ms=20))
    batcher._wake = Watched(batcher)
    batcher.start()
    await batcher.settled()
    generation = batcher.session(b"a").generate([3], greedy())
    assert await gathering(batcher)
    assert (await collect(generation))[-1].finish is FinishReason.LENGTH
    await batcher.close()


async def test_what_comes_while_the_engine_works_waits_for_nobody(gatherer: Batcher) -> None:
    session = gatherer.session(b"a")
    longer = [session.generate([4 + i], greedy(200)) for i in range(3)]
    await collect(session.generate([3], greedy(1)))
    assert (await collect(session.generate([3], greedy(1))))[-1].finish is FinishReason.LENGTH
    assert gatherer.live == 3
    await asyncio.gather(*map(collect, longer))


async def test_a_cancel_and_a_close_end_the_window(gatherer: Batcher) -> None:
    session = gatherer.session(b"a")
    doomed, other = session.generate([3], greedy()), session.generate([4], greedy())
    assert await gathering(gatherer)
    doomed.cancel()
    assert [deltas[-1].finish for deltas in await asyncio.gather(collect(doomed), collect(other))] == [
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    assert isinstance(gatherer._wake, Watched)
    gatherer._wake.gathering.clear()
    last = session.generate([3], greedy())
    assert await gathering(gatherer)
    await gatherer.close()
    assert (await collect(last))[-1].finish is FinishReason.CANCELLED
    assert gatherer._thread
    assert not gatherer._thread.is_alive()


async def test_an_idle_engine_tidies_up_while_there_is_something_to(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.batcher.BEAT_SECONDS", 3600.0)
    done, left = threading.Event(), iter([True, True, True, False])

    def rest() -> bool:
        more = next(left, False)
        if not more:
            done.set()
        return more

    assert batcher._engine
    monkeypatch.setattr(batcher._engine, "rest", rest)
    await collect(batcher.session(b"a").generate([3], greedy()))
    assert await asyncio.to_thread(done.wait, 30), "it slept with work left"
    assert next(left, None) is None


async def test_an_idle_engine_has_memory_for_what_comes_next(batcher: Batcher) -> None:
    assert batcher._engine
    engine = batcher._engine
    await collect(batcher.session(b"a").generate([3], greedy()))
    coming = engine.scheduler.pool.upcoming(TOUCHED_AHEAD)
    assert coming
    await until(lambda: engine.runner._touched >= set(coming))


async def test_what_arrives_goes_before_tidying_up(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping without an end, and not while anything runs."""
    assert batcher._engine
    engine, idle = batcher._engine, []
    monkeypatch.setattr(engine, "rest", lambda: not idle.append(engine.idle))
    for _ in range(3):
        generations = [batcher.session(b"a").generate([3 + i], greedy(20)) for i in range(3)]
        for deltas in await asyncio.gather(*map(collect, generations)):
            assert deltas[-1].finish is FinishReason.LENGTH
    seen, count = batcher._seen, len(idle)
    await until(lambda: len(idle) > count + 2)
    assert batcher._seen > seen, "it is seen meanwhile"
    assert all(idle)


@pytest.mark.parametrize("way", ["closed", "died"])
async def test_the_engine_is_closed_in_its_thread_at_the_end(batcher: Batcher, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    assert batcher._engine
    closed: list[threading.Thread] = []
    monkeypatch.setattr(batcher._engine, "close", lambda: closed.append(threading.current_thread()))
    if way == "died":
        monkeypatch.setattr(batcher._engine, "step", lambda *_: 1 / 0)
        assert (await collect(batcher.session(b"a").generate([3], greedy())))[-1].finish is FinishReason.ERROR
    await batcher.close()
    assert closed == [batcher._thread]
