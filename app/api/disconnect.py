"""Plain HTTP clients that go away: their run is cancelled, since nobody can come back for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from starlette.requests import Request

from app.conversations.run import Run

T = TypeVar("T")


async def run_out(run: Run, request: Request, cancel: bool) -> None:
    """Wait for the run's end. If the client goes first, the run is cancelled when `cancel` is set."""
    done = asyncio.create_task(run.done())
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done() and cancel:
            run.cancel()
        await done
    finally:
        gone.cancel()


async def until_gone(events: AsyncIterator[T], run: Run, cancel: bool) -> AsyncIterator[T]:
    """The events of a stream. If it is closed before its end, the run is cancelled when `cancel` is set."""
    try:
        async for event in events:
            yield event
    finally:
        if cancel:
            run.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
