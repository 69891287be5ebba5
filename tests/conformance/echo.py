"""`hocket serve` with an app that sends back every message, in place of Hocket's own: WebSockets exactly as Hocket sets them up."""

from __future__ import annotations

import sys
import types

from starlette.types import ASGIApp, Receive, Scope, Send

from app.cli import main
from app.settings import Settings


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({**message, "type": "websocket.send"})


def create_app(_: Settings) -> ASGIApp:
    return echo


if __name__ == "__main__":
    server = types.ModuleType("app.server")
    server.create_app = create_app  # type: ignore[attr-defined]
    sys.modules["app.server"] = server
    sys.exit(main(["serve", *sys.argv[1:]]))
