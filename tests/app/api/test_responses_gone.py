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
from app.conversations.service import Conversations
from app.store.memory import MemoryStore
from engine.batcher import Batcher
from tests.engine.batching import options

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batcher(tiny_folder: Path) -> AsyncIterator[Batcher]:
    made = Batcher(options(tiny_folder))
    made.start()
    await made.settled()
    yield made
    await made.close()


class Gone(WebSocket):
    """Takes two events and then nothing; its reader is told of the end when `told` is set."""

    def __init__(self, frame: dict[str, Any]) -> None:
        self.frames = [json.dumps(frame)]
        self.told = asyncio.Event()
        self.broken = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:  # type: ignore[override]
        if self.frames:
            return {"type": "websocket.receive", "text": self.frames.pop()}
        await self.told.wait()
        return {"type": "websocket.disconnect", "code": 1006}

    async def send_text(self, data: str) -> None:
        if len(self.sent) == 2:
            self.broken.set()
            raise WebSocketDisconnect(1006)
        self.sent.append(json.loads(data))


@pytest.mark.parametrize("store", [True, False])
async def test_only_what_is_stored_goes_on(batcher: Batcher, store: bool) -> None:
    conversations = Conversations(MemoryStore(), batcher, lambda owner: owner.encode())
    sampling = {"ignore_eos": True, "max_output_tokens": 100, "logit_bias": {"0": -100, "1": -100, "2": -100}}
    socket = Gone({"type": "response.create", "input": "hello you", "store": store, **sampling})
    serving = asyncio.create_task(ResponsesSocket(socket, "ana", conversations, Models(batcher)).serve())
    await socket.broken.wait()
    (run,) = conversations._runs.values()
    response = await run.done()
    assert response.reason == ("max_output_tokens" if store else "cancelled")
    socket.told.set()
    await serving
    await conversations.close()
