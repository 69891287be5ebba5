"""A client that goes away from a Responses WebSocket, seen by a lane that sends before the reader sees it. On the tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.models import Models
from app.api.responses.socket import ResponsesSocket
from app.conversations.run import Run
from app.conversations.service import Conversations, Shelf
from app.conversations.turn import Turn
from app.store.memory import MemoryStore
from engine.batcher import Batcher
from tests.engine.batching import options, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batcher(tiny_folder: Path) -> AsyncIterator[Batcher]:
    made = Batcher(options(tiny_folder))
    made.start()
    await made.settled()
    yield made
    await made.close()


CREATE: dict[str, Any] = {
    "type": "response.create",
    "input": "hello you",
    "ignore_eos": True,
    "max_output_tokens": 100,
    "logit_bias": {"0": -100, "1": -100, "2": -100},
}


class Gone(WebSocket):
    """Takes some events, fails as starlette does, and tells its reader of `late` frames and of the end when `told` is set."""

    def __init__(self, *frames: dict[str, Any], late: tuple[dict[str, Any], ...] = (), takes: int = 2) -> None:
        self.frames, self.late = list(map(json.dumps, frames)), list(map(json.dumps, late))
        self.takes = takes
        self.told = asyncio.Event()
        self.broken = asyncio.Event()

    async def receive(self) -> dict[str, Any]:  # type: ignore[override]
        if not self.frames:
            await self.told.wait()
            self.frames, self.late = self.late, []
        if self.frames:
            return {"type": "websocket.receive", "text": self.frames.pop(0)}
        return {"type": "websocket.disconnect", "code": 1006}

    async def send_text(self, data: str) -> None:
        self.takes -= 1
        if self.takes == -1:
            raise WebSocketDisconnect(1006)
        if self.takes < -1:
            self.broken.set()
            raise RuntimeError('Cannot call "send" once a close message has been sent.')
        if self.takes == 0:
            self.broken.set()


class Watched(Conversations):
    """Remembers its runs, however short they are."""

    begun: list[Run]

    async def submit(self, turn: Turn, scratch: Shelf | None = None) -> Run:
        self.begun.append(await super().submit(turn, scratch))
        return self.begun[-1]


async def served(batcher: Batcher, socket: Gone, runs: int) -> list[Run]:
    """The runs of a connection, once the reader has seen its end too."""
    conversations = Watched(MemoryStore(), batcher, lambda owner: owner.encode())
    begun = conversations.begun = []
    serving = asyncio.create_task(ResponsesSocket(socket, "ana", conversations, Models(batcher)).serve())
    await until(lambda: len(begun) == runs)
    await socket.broken.wait()
    await until(lambda: socket.takes < 0)
    socket.told.set()
    await serving
    for run in begun:
        await run.done()
    await conversations.close()
    return begun


@pytest.mark.parametrize("store", [True, False])
async def test_only_what_is_stored_goes_on(batcher: Batcher, store: bool) -> None:
    (run,) = await served(batcher, Gone({**CREATE, "store": store}), 1)
    assert run.response.reason == ("max_output_tokens" if store else "cancelled")


async def test_each_lane_gives_up_what_is_not_stored(batcher: Batcher) -> None:
    lanes = ({**CREATE, "store": False, "stream_id": f"lane{number}"} for number in range(3))
    runs = await served(batcher, Gone(*lanes, takes=6), 3)
    assert [run.response.reason for run in runs] == ["cancelled"] * 3


async def test_a_cancel_that_is_read_late_counts(batcher: Batcher) -> None:
    (run,) = await served(batcher, Gone(CREATE, late=({"type": "response.cancel"},)), 1)
    assert run.response.reason == "cancelled"


async def test_a_frame_that_cannot_be_answered_any_more_is_no_fault(batcher: Batcher, caplog: pytest.LogCaptureFixture) -> None:
    await served(batcher, Gone(CREATE, late=({"type": "nonsense"},)), 1)
    assert not caplog.records
