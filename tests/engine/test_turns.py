"""Places that owners take in turn."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from engine.turns import Turns


class Crowd:
    """Those who want a place, one after the other; `had` says in which order they had it. Each keeps it until it is let go."""

    def __init__(self, places: int) -> None:
        self.turns = Turns(places)
        self.had: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self.leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._want(name))
            await asyncio.sleep(0)

    async def _want(self, name: str) -> None:
        async with self.turns.place(name[:1].encode()):
            self.had.append(name)
            await self.leave[name].wait()

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await self.tasks[name]
            await asyncio.sleep(0)


async def test_owners_take_turns_however_many_of_ones_wait() -> None:
    crowd = Crowd(2)
    await crowd.come("a1", "a2", "a3", "a4", "a5", "b1", "c1", "b2")
    assert crowd.had == ["a1", "a2"]
    await crowd.go("a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5")
    assert crowd.had == ["a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5"]
    await crowd.come("d1", "d2")
    assert crowd.had[-2:] == ["d1", "d2"], "both places are free again"
    await crowd.go("d1", "d2")


@pytest.mark.parametrize("given", [False, True])
async def test_who_does_not_wait_any_more_keeps_no_place(given: bool) -> None:
    """Also if it was given one just now."""
    crowd = Crowd(1)
    await crowd.come("a1", "b1", "c1")
    if given:
        crowd.leave["a1"].set()
        await asyncio.sleep(0)
    crowd.tasks["b1"].cancel()
    with suppress(asyncio.CancelledError):
        await crowd.tasks["b1"]
    if not given:
        await crowd.go("a1")
    await crowd.go("c1")
    assert crowd.had == ["a1", "c1"]
    await crowd.come("d1")
    assert crowd.had[-1] == "d1"
    await crowd.go("d1")


async def test_those_of_an_owner_who_left_cost_it_no_turn() -> None:
    crowd = Crowd(1)
    await crowd.come("c1", "a1", "a2", "a3", "a4", "b1", "b2", "b3")
    for name in ("a1", "a2", "a3"):
        crowd.tasks[name].cancel()
    await asyncio.gather(*(crowd.tasks[name] for name in ("a1", "a2", "a3")), return_exceptions=True)
    assert (crowd.turns.waiting(b"a"), crowd.turns.waiting(b"b"), crowd.turns.waiting(b"d")) == (1, 3, 0)
    await crowd.go("c1", "a4", "b1", "b2", "b3")
    assert crowd.had == ["c1", "a4", "b1", "b2", "b3"]


async def test_a_place_is_given_back_by_who_fails() -> None:
    turns = Turns(1)
    with pytest.raises(ValueError, match="failed"):
        async with turns.place(b"a"):
            raise ValueError("failed")
    async with asyncio.timeout(10), turns.place(b"b"):
        pass
