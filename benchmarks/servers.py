"""The servers under load: Hocket, peers that run already, and peers that are started by a command.

Owns their lives and their turns: one is asked at a time, and whoever burns processor time while idle is stopped (SIGSTOP) until its turn.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks import processes
from benchmarks.clients import CLIENTS
from benchmarks.load import Client, LoadError
from tests.serving import Server

START_SECONDS = 900.0  # some compile first
STOP_SECONDS = 30.0
IDLE_SHARE = 0.02  # of one core: more than this is too much for who waits
LOG_TAIL = 2000  # characters


class Contender:
    """A running server.

    pid: the root of its process tree; None: it is not on this machine, or not ours to see.
    works: the names of those it takes part in; none: all of them.

    Raises: LoadError if nobody answers at `url`
    """

    def __init__(self, name: str, url: str, pid: int | None, protocol: str = "chat", works: Collection[str] = ()) -> None:
        self.name = name
        self.works = works
        self.url = url
        self.pid = pid
        self.model = self._model()
        self._protocol = protocol
        self._spins = False

    def client(self) -> Client:
        return CLIENTS[self._protocol](self.url, self.model)

    def memory(self) -> int | None:
        """Resident bytes of its processes."""
        return None if self.pid is None else processes.memory(self.pid)

    def watch_idle(self) -> float | None:
        """The share of a core it takes with nothing to do. From here on it is stopped out of its turn if that is too much."""
        if self.pid is None:
            return None
        share = processes.idle_share(self.pid)
        self._spins = share > IDLE_SHARE
        self._signal(signal.SIGSTOP)
        return share

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """So that it can end."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._spins and self.pid is not None:
            for pid in processes.tree(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _model(self) -> str:
        try:
            answer = httpx.get(f"{_root(self.url)}/v1/models", timeout=60)
            answer.raise_for_status()
            models: list[dict[str, Any]] = answer.json()["data"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as fault:
            raise LoadError(f"{self.name}: expected a list of models at {_root(self.url)}/v1/models: {fault}") from fault
        return str(models[0]["id"])


@contextlib.contextmanager
def hocket(url: str | None, flags: list[str], protocol: str) -> Iterator[Contender]:
    """Hocket at `url`, or one of its own with these flags of `hocket serve`."""
    if url:
        yield Contender("Hocket", url, _pid(url), protocol)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "data", *flags).start()
        try:
            assert server.process
            contender = Contender("Hocket", server.url, server.process.pid, protocol)
            yield contender
            contender.wake()
        finally:
            server.stop()


@contextlib.contextmanager
def running(name: str, url: str, works: Collection[str] = ()) -> Iterator[Contender]:
    """A peer that somebody else has started."""
    contender = Contender(name, url, _pid(url), works=works)
    yield contender
    contender.wake()


@contextlib.contextmanager
def started(name: str, command: str, works: Collection[str] = ()) -> Iterator[Contender]:
    """A peer started by `command`, in which {port} is the port it is to listen on. Raises: LoadError if it ends, or never answers"""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(name, url, process, log)
            yield Contender(name, url, process.pid, works=works)
        finally:
            _end(process)


def _wait(name: str, url: str, process: subprocess.Popen[bytes], log: Any) -> None:
    """Until it lists its models and answers a chat."""
    deadline = time.monotonic() + START_SECONDS
    said = "nothing"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LoadError(f"{name}: expected a server, it ended with exit code {process.returncode}: {_tail(log)}")
        try:
            models = httpx.get(f"{url}/v1/models", timeout=5)
            if models.status_code == 200:
                body = {"model": models.json()["data"][0]["id"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
                chat = {**body, "temperature": 0, "ignore_eos": True, "stream": True}
                answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=START_SECONDS)
                if answer.status_code == 200:
                    return
                said = f"{answer.status_code} {answer.text[:200]}"
        except httpx.TransportError as fault:
            said = str(fault)
        time.sleep(0.2)
    raise LoadError(f"{name}: expected an answer within {START_SECONDS:.0f} s, got {said}: {_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session: servers leave workers behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Any) -> str:
    log.seek(0)
    text: str = log.read().decode(errors="replace")
    return text.strip()[-LOG_TAIL:]


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _pid(url: str) -> int | None:
    parts = urlsplit(url)
    return processes.listener(parts.port or 80) if parts.hostname in ("127.0.0.1", "localhost", "::1") else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
