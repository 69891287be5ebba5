"""The stateless protocols behind a real uvicorn in the test's own process, so that a test can look at the engine, and hold its steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.chat_completions import ChatCompletions
from app.api.completions import Completions
from app.api.errors import ApiError, refusal
from app.api.generate import Generate
from app.api.models import Models
from app.conversations.errors import ConversationError
from app.conversations.service import Conversations
from app.store.memory import MemoryStore
from engine.batcher import Batcher
from engine.core import EngineError
from engine.engine import Engine
from tests.engine.batching import until


class QuietServer(uvicorn.Server):
    """It leaves the signals to the tests' own process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class InProcess:
    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.conversations = Conversations(MemoryStore(), batcher, lambda owner: owner.encode())
        self.port = 0
        self._asked: list[asyncio.StreamWriter] = []

    @property
    def engine(self) -> Engine:
        assert self.batcher._engine
        return self.batcher._engine

    def app(self) -> ASGIApp:
        models = Models(self.batcher)
        adapters = (
            ChatCompletions(self.conversations, models),
            Completions(self.conversations, models, self.batcher),
            Generate(self.conversations, models),
        )

        async def answer(_: Any, fault: Exception) -> Any:
            return refusal(fault).response()

        routes = [route for adapter in adapters for route in adapter.routes]
        inner = Starlette(routes=routes, exception_handlers=dict.fromkeys((ApiError, ConversationError, EngineError), answer))
        inner.state.max_body_bytes = 1 << 20

        async def owned(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("state", {})["owner"] = "ana"
            await inner(scope, receive, send)

        return owned

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = QuietServer(uvicorn.Config(self.app(), port=0, lifespan="off", ws="none", log_level="critical"))
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield
        finally:
            for writer in self._asked:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            await self.conversations.close()
            server.should_exit = True
            await task

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request, and leave its answer to whoever wants it. The connection is closed at the end of serving."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._asked.append(writer)
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer


class Gate:
    """Lets the engine take so many steps, and no more until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._steps = threading.Semaphore(0)
        self._opened = threading.Event()
        self._engine = engine
        self._step = engine.step

    def allow(self, steps: int) -> None:
        self._steps.release(steps)

    def open(self) -> None:
        self._opened.set()
        self._steps.release()

    def step(self, arrivals: Any = (), aborts: Any = ()) -> Any:
        if not self._opened.is_set() and (arrivals or not self._engine.idle):
            self._steps.acquire()
        return self._step(arrivals, aborts)


@contextmanager
def gated(engine: Engine) -> Iterator[Gate]:
    gate = Gate(engine)
    with contextlib.ExitStack() as stack:
        engine.step = gate.step  # type: ignore[method-assign]
        stack.callback(lambda: delattr(engine, "step"))
        stack.callback(gate.open)
        yield gate
