"""Behind Debian's nginx, as it comes and as docs/deploy.md says: events pass as they are sent, and WebSockets open. (slow)

Nothing is measured: one request occupies the server, so that no other can get further than its first events, and these are there to be
read, or are not.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.certificates import make_certificate
from tests.serving import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Count."}]

PLAIN = """
server {
    listen 127.0.0.1:PORT;
    location / {
        proxy_pass http://127.0.0.1:BEHIND;
    }
    location /deaf/ {
        proxy_ignore_headers X-Accel-Buffering;  # as if Hocket did not send it
        proxy_pass http://127.0.0.1:BEHIND/;
    }
}
"""


def debians_own(folder: Path, site: Path) -> str:
    """/etc/nginx/nginx.conf with `site` for its sites, and everything it writes in `folder`."""
    text = Path("/etc/nginx/nginx.conf").read_text()
    written = [f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    for old, new in (
        (r"^user .*;", "user root;" if os.geteuid() == 0 else ""),
        (r"^pid .*;", f"pid {folder}/pid;"),
        (r"error_log .*;", f"error_log {folder}/error.log;"),
        (r"access_log .*;", f"access_log {folder}/access.log; {' '.join(written)}"),
        (r"include /etc/nginx/conf\.d/\*\.conf;", ""),
        (r"include /etc/nginx/sites-enabled/\*;", f"include {site};"),
    ):
        text, count = re.subn(old, new, text, flags=re.MULTILINE)
        assert count <= 1
    assert str(site) in text
    return text


@contextmanager
def nginx(folder: Path, site: str) -> Iterator[int]:
    """Its port, which stands for PORT in `site`."""
    assert NGINX, "expected Debian's nginx: `make system` installs it for the tests"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir()
    (folder / "site").write_text(site.replace("PORT", str(port)))
    (folder / "nginx.conf").write_text(debians_own(folder, folder / "site"))
    command = (NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf"), "-g", "daemon off;")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and process.stderr, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def lone(new_server: Callable[..., Server]) -> Server:
    """A server that runs one request at a time."""
    flags = ("--store", "memory", "--max-batch-size", "1", "--allowed-hosts", "chat.example.org")
    return new_server(*flags, "--allowed-origins", "https://chat.example.org").start()


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """A reply is being written, directly, and is far from its end; then it is cancelled."""
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 8000, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=60) as response:
        events = events_of(response)
        while not delta_of(next(events)):
            pass
        yield
        assert delta_of(next(events)), "it still runs"


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    assert response.status_code == 200
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def delta_of(event: dict[str, Any]) -> str:
    if "choices" in event:
        return str(event["choices"][0]["delta"].get("content") or "")
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def live(server: Server) -> int:
    count: int = httpx.get(f"{server.url}/readyz").json()["live"]
    return count


def test_events_pass_one_by_one_with_nginxs_own_settings(lone: Server, tmp_path: Path) -> None:
    chat = {"messages": MESSAGES, "stream": True, "max_tokens": 2000, "ignore_eos": True}
    asked = {"input": "Count.", "stream": True, "max_output_tokens": 2000, "ignore_eos": True}
    with nginx(tmp_path / "nginx", PLAIN.replace("BEHIND", str(lone.port))) as port, ExitStack() as open_streams:
        proxied = open_streams.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
        with occupied(lone):
            chats = events_of(open_streams.enter_context(proxied.stream("POST", CHAT, json=chat)))
            assert next(chats)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            responses = events_of(open_streams.enter_context(proxied.stream("POST", "/v1/responses", json=asked)))
            assert next(responses)["type"] == "response.created"
            assert live(lone) == 3, "one runs, two wait, and what they have to say so far is here"
        for _ in range(3):
            assert delta_of(next(chats))
            assert live(lone) == 2, "its end is far off, and the other waits for it"
        assert next(responses)["type"] == "response.in_progress"


def test_without_the_header_nginx_holds_them_back(lone: Server, tmp_path: Path) -> None:
    body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 4, "ignore_eos": True})
    with nginx(tmp_path / "nginx", PLAIN.replace("BEHIND", str(lone.port))) as port, ExitStack() as open_streams:
        held = open_streams.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        with occupied(lone):
            head = (f"POST /deaf{CHAT} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "Connection: close")
            held.sendall("\r\n".join((*head, "", body)).encode())
            while live(lone) < 2:
                time.sleep(0.01)
            request = httpx.stream("POST", f"http://127.0.0.1:{port}{CHAT}", content=body, timeout=60)
            assert next(events_of(open_streams.enter_context(request))), "this one came later, and its first event is here"
            assert select.select([held], [], [], 0)[0] == []
        whole = b""
        while data := held.recv(1 << 16):
            whole += data
        assert whole.startswith(b"HTTP/1.1 200") and b"[DONE]" in whole


def test_the_documented_configuration(lone: Server, tmp_path: Path) -> None:
    """TLS at the proxy: WebSockets of a page, long bodies, server-sent events."""
    cert, key = make_certificate(tmp_path)
    documented = re.search(r"```nginx\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    assert documented
    site = documented[1]
    for old, new in (
        ("listen 443 ssl;", "listen 127.0.0.1:PORT ssl;"),
        ("/etc/ssl/chat.example.org.crt", str(cert)),
        ("/etc/ssl/private/chat.example.org.key", str(key)),
        ("http://127.0.0.1:8000", lone.url),
    ):
        assert site.count(old) == 1
        site = site.replace(old, new)
    trusting = ssl.create_default_context(cafile=cert)
    with nginx(tmp_path / "nginx", site) as port:
        with connect(
            "wss://chat.example.org/v1/responses",
            sock=socket.create_connection(("127.0.0.1", port)),
            ssl=trusting,
            server_hostname="localhost",
            origin=Origin("https://chat.example.org"),
        ) as wire:
            with occupied(lone):
                wire.send(json.dumps({"type": "response.create", "input": "Count.", "max_output_tokens": 3}))
                assert json.loads(wire.recv(60))["type"] == "response.created"
            while json.loads(wire.recv(60))["type"] not in ("response.completed", "response.incomplete"):
                pass
        named = {"Host": "chat.example.org"}
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, headers=named, timeout=60) as client:
            for origin, status in (("https://chat.example.org", 200), ("https://evil.example.org", 403)):
                assert client.get("/v1/models", headers={"Origin": origin}).status_code == status
            long = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 3_000_000}]})
            assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded", "Hocket's answer, not nginx's 413"
            chat = {"messages": MESSAGES, "stream": True, "max_tokens": 4}
            with occupied(lone), client.stream("POST", CHAT, json=chat) as response:
                assert next(events_of(response)) and live(lone) == 2
