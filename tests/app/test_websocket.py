"""A WebSocket below ASGI: clients that do not read. On a real uvicorn, with each of its loops."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from websockets.sync.client import connect

from app import websocket
from app.cli import listen
from app.websocket import WebSocketProtocol

PING_SECONDS = 0.2
OPENING = (
    "GET /{path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==\r\n\r\n"
)


class Talker:
    """An app that talks without a pause to whoever comes to `/talk`, and repeats what anybody else says."""

    def __init__(self, loop: Literal["asyncio", "uvloop"]) -> None:
        self.told, self.stopped = threading.Event(), threading.Event()  # of its client's end: its reader, its talker
        listeners = listen("127.0.0.1", 0)
        self.port: int = listeners[0].getsockname()[1]
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            loop=loop,
            ws=WebSocketProtocol,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=PING_SECONDS,
            log_config=None,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=(listeners,))
        self._thread.start()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        if scope["path"] == "/talk":
            await asyncio.gather(self._talk(send), self._listen(receive))
            return
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})

    async def _talk(self, send: Send) -> None:
        with pytest.raises((OSError, RuntimeError)):
            while True:
                await send({"type": "websocket.send", "text": "x" * 65536})
        self.stopped.set()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass
        self.told.set()

    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(params=["asyncio", "uvloop"])
def talker(request: pytest.FixtureRequest) -> Iterator[Talker]:
    running = Talker(request.param)
    yield running
    running.close()


def test_a_client_that_never_reads_is_given_up(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pings wait behind what it does not read; closing would wait for that for ever, and so would the app."""
    monkeypatch.setattr(websocket, "LINGER_SECONDS", 0.1)
    with socket.socket() as mute, connect(f"ws://127.0.0.1:{talker.port}/echo") as other:
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mute.connect(("127.0.0.1", talker.port))
        mute.sendall(OPENING.format(path="talk").encode())
        assert talker.told.wait(20)
        assert talker.stopped.wait(20)
        _until_only_one_is_left(talker)
        other.send("still here?")
        assert other.recv(20) == "still here?", "nobody else notices"


def _until_only_one_is_left(talker: Talker) -> None:
    left = threading.Event()
    for _ in range(200):
        if talker.connections() == 1:
            return
        left.wait(0.05)
    raise AssertionError(f"{talker.connections()} connections are left")
