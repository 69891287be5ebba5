"""A real server in a process of its own, for tests that need one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

START_SECONDS = 120.0


class StartFailed(Exception):
    """The server ended instead of listening; its log is the message."""


class Server:
    """`hocket serve` on a free port of loopback, with a data folder that outlives restarts."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.data_dir = data_dir
        self.flags = flags
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        """The name of the one that is served."""
        return str(httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    @property
    def log(self) -> str:
        return (self.data_dir / "server.log").read_text()

    def start(self, wait: bool = True) -> Server:
        """Returns when the model is loaded, or with wait=False as soon as the server listens."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(self.port), "--data-dir", str(self.data_dir), *self.flags]
        with (self.data_dir / "server.log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line.startswith("Hocket is ready: "):
            self.process.wait(60)
            self._forget()
            raise StartFailed(f"{line}{self.log}")
        self.port = int(line.rsplit(":", 1)[1])
        if wait:
            self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (answer := httpx.get(f"{self.url}/readyz")).status_code != 200:
            assert answer.json()["status"] == "loading", answer.text
            assert time.monotonic() < deadline, f"still loading: {answer.text}"
            time.sleep(0.1)

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """No request runs or waits any more. What a client that went away asked for would run for minutes."""
        deadline = time.monotonic() + seconds
        while live := httpx.get(f"{self.url}/readyz").json()["live"]:
            assert time.monotonic() < deadline, f"{live} requests still run"
            time.sleep(0.05)

    def stop(self, kill: bool = False) -> None:
        """With kill, as kill -9 does: nothing of the process gets to clean up."""
        if self.process is None:
            return
        os.kill(self.process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        self.process.wait(60)
        self._forget()

    def restart(self, kill: bool = False, wait: bool = True) -> None:
        self.stop(kill)
        self.start(wait)

    def _forget(self) -> None:
        assert self.process and self.process.stdout
        self.process.stdout.close()
        self.process = None
