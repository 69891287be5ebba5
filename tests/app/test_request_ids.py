"""Each reply has a name, and the lines that were logged for it have the same."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from app.conversations.journal import Journal
from app.request_ids import NamesRequests, RequestIds, request_id_of
from engine.core import Delta
from tests.serving import Server

ROOT = Path(__file__).parent.parent.parent
NAME = re.compile("req_[0-9a-f]{32}")

log = logging.getLogger("tests.request_ids")


class Lines(logging.Handler):
    """What is logged, as the server's log has it."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(NamesRequests())
        self.setFormatter(logging.Formatter("%(name)s%(request)s: %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    log.addHandler(handler)
    yield handler.lines
    log.removeHandler(handler)


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Logs, from a task of its own too, and begins an answer in every way there is."""

    async def later() -> None:
        log.warning("later")

    assert request_id_of(scope)
    log.warning("now")
    await asyncio.create_task(later())
    for kind in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
        await send({"type": kind, "headers": [(b"X-Request-Id", b"theirs"), (b"a", b"b")]})
    await send({"type": "websocket.accept"})
    await send({"type": "http.response.body", "body": b""})


async def ask(kind: str = "http", *headers: tuple[bytes, bytes]) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def one() -> None:
        await RequestIds(answering)({"type": kind, "headers": headers}, None, send)  # type: ignore[arg-type]

    await asyncio.create_task(one())  # as a server does for each request
    return sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_every_reply_and_every_line_has_the_requests_name(kind: str, lines: list[str]) -> None:
    log.warning("before")
    sent = await ask(kind, (b"x-request-id", b"chosen-by-the-client"))
    names = {value.decode() for message in sent[:4] for name, value in message["headers"] if name.lower() == b"x-request-id"}
    assert len(names) == 1, "ours, once, and no other"
    name = names.pop()
    assert NAME.fullmatch(name)
    assert [len(message["headers"]) for message in sent[:4]] == [2, 2, 2, 1] and "headers" not in sent[4]
    again = await ask(kind)
    assert again[0]["headers"] != sent[0]["headers"]
    log.warning("after")
    assert lines[:3] == ["tests.request_ids: before", f"tests.request_ids [{name}]: now", f"tests.request_ids [{name}]: later"]
    assert name not in lines[3] and NAME.search(lines[3]) and lines[5] == "tests.request_ids: after"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"abc-1_2.3", "abc-1_2.3"),
        (b"a\x1b[31mb\nERROR forged: ]", "a__31mb_ERROR_forged:__"),
        ("é".encode(), "__"),
        (b"x" * 5000, "x" * 128),
    ],
)
async def test_a_clients_own_name_is_logged_and_cannot_forge_a_line(given: bytes, shown: str, lines: list[str]) -> None:
    sent = await ask("http", (b"X-Client-Request-Id", given))
    assert given not in dict(sent[0]["headers"]).values()
    assert re.fullmatch(rf"tests\.request_ids \[req_\w{{32}} client={re.escape(shown)}\]: now", lines[0])


async def test_other_scopes_pass() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, send))

    await RequestIds(app)({"type": "lifespan"}, None, len)  # type: ignore[arg-type]
    assert seen == [({"type": "lifespan"}, len)]


async def test_what_serves_everyone_has_nobodys_name(lines: list[str]) -> None:
    """The log's writer starts within some request, and then writes for all."""
    written = asyncio.Event()

    class Store:
        async def append(self, batch: Any) -> None:
            log.warning("written")
            written.set()

    journal = Journal(Store())  # type: ignore[arg-type]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        log.warning("asked")
        run: Any = SimpleNamespace(id="resp_x", publish=lambda entry: None)
        journal.add(run, Delta((1,), "x"))
        await written.wait()

    await RequestIds(app)({"type": "http", "headers": ()}, None, None)  # type: ignore[arg-type]
    assert NAME.search(lines[0]) and lines[1] == "tests.request_ids: written"


# `hocket serve`, with an app that only fails and logs.
SERVE = """
import logging, sys, types
from app.request_ids import RequestIds

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive(); await send({"type": "lifespan.startup.complete"})
        await receive(); await send({"type": "lifespan.shutdown.complete"})
    elif scope["path"] == "/broken":
        raise ZeroDivisionError
    elif scope["type"] == "http":
        logging.getLogger("app.there").info("seen")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            logging.getLogger("app.there").info("frame")
            await send({"type": "websocket.send", "text": "seen"})

module = types.ModuleType("app.server")
module.create_app = lambda settings: RequestIds(app)
sys.modules["app.server"] = module
from app.cli import main
sys.exit(main(["serve", "--port", "0", "--log-level", "debug"]))
"""


def test_the_servers_log_has_them() -> None:
    """The app's lines, uvicorn's own of what the app raised, and its access lines."""
    process = subprocess.Popen((sys.executable, "-c", SERVE), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().split()[-1]
        name = httpx.get(url, headers={"X-Client-Request-Id": "mine"}).headers["x-request-id"]
        assert httpx.get(f"{url}/broken").status_code == 500
        with connect(url.replace("http", "ws")) as socket:
            assert socket.response
            of_socket = socket.response.headers["x-request-id"]
            for _ in range(2):
                socket.send("?")
                socket.recv()
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    lines = errors.splitlines()
    assert len([line for line in lines if line.endswith(f"INFO app.there [{name} client=mine]: seen")]) == 1
    assert any(f"INFO uvicorn.access [{name} client=mine]: " in line and line.endswith('"GET / HTTP/1.1" 200') for line in lines)
    assert any(re.search(r"ERROR uvicorn\.error \[req_\w{32}\]: Exception in ASGI application", line) for line in lines)
    assert len([line for line in lines if line.endswith(f"INFO app.there [{of_socket}]: frame")]) == 2
    assert any(re.search(r"INFO uvicorn\.error: Started server process", line) for line in lines), "outside any request, without a name"


@pytest.mark.slow
def test_the_official_sdk_finds_the_name(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    answers = [
        client.models.list()._request_id,
        client.responses.create(model=server.model, input="Hi", max_output_tokens=1)._request_id,
        client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1)._request_id,
    ]
    with pytest.raises(APIStatusError) as refused:
        client.responses.retrieve("resp_x")
    answers.append(refused.value.request_id)
    with client.chat.completions.with_streaming_response.create(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1, stream=True
    ) as streamed:
        answers.append(streamed.request_id)
    with client.responses.connect() as connection:
        answers.append(connection._connection.response.headers["x-request-id"])  # type: ignore[union-attr]
    assert all(name and NAME.fullmatch(name) for name in answers) and len(set(answers)) == len(answers)


@pytest.mark.slow
def test_a_refused_upgrade_has_it_in_its_body_too(server: Server) -> None:
    for path, headers, status in (("/v1/nowhere", {}, 404), ("/v1/responses", {"Origin": "null"}, 403)):
        with pytest.raises(InvalidStatus) as refused:
            connect(f"{server.url.replace('http', 'ws')}{path}", additional_headers=headers)
        response = refused.value.response
        assert response.status_code == status and response.body
        assert NAME.search(response.body.decode()) and response.headers["x-request-id"] in response.body.decode()
    assert httpx.get(f"{server.url}/v1/nowhere").json().keys() == {"error"}, "who can read headers needs no more"
