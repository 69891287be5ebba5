"""Plain HTTP clients that go away: what runs for them is cancelled, since nobody can come back for it.

Owns the watch for it, which nothing has to be sent for: a prompt that is still being read ends as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from app.api.errors import ApiError

T = TypeVar("T")


class Work(Protocol):
    """A run, or several that are one request's."""

    def cancel(self) -> None: ...

    async def done(self) -> object: ...


async def begun(work: Coroutine[Any, Any, T], request: Request, cancel: bool) -> T:
    """What the work comes to, by which a request's runs are begun. If the client goes first, it is cancelled when `cancel` is set.

    Raises: what the work raises; ApiError for nobody when it was cancelled
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and cancel:
            raise ApiError("the client went away before its request had begun", None, "client_closed_request", 499)
        return await working
    finally:
        working.cancel()
        gone.cancel()
        if working.done() and not working.cancelled():
            working.exception()  # seen, also by who is cancelled just now


async def run_out(work: Work, request: Request, cancel: bool) -> None:
    """Wait for the work's end. If the client goes first, the work is cancelled when `cancel` is set."""
    done = asyncio.create_task(work.done())
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done() and cancel:
            work.cancel()
        await done
    finally:
        gone.cancel()


async def until_gone(events: AsyncIterator[T], work: Work, cancel: bool) -> AsyncGenerator[T, None]:
    """The events of a stream. If it is closed before its end, the work is cancelled when `cancel` is set."""
    try:
        async for event in events:
            yield event
    finally:
        if cancel:
            work.cancel()
        await close(events)


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone. Nothing else may receive meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def close(events: AsyncIterator[object]) -> None:
    """End a generator now, and not when it is next collected."""
    if isinstance(events, AsyncGenerator):
        await events.aclose()
