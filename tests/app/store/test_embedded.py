"""The bundled server through crashes: its own, its owner's, and a second owner's attempt."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.store import StoreError
from app.store.embedded import SOCKET_PATH_LIMIT, DataFolderInUseError, EmbeddedServer, _try_lock
from app.store.valkey import ValkeyStore, connect
from tests.app.store.test_contract import conversation

OWNER = """
import asyncio, sys
from pathlib import Path
from app.store.embedded import EmbeddedServer
from app.store.valkey import ValkeyStore, connect
from app.store.records import Conversation

async def main():
    async with EmbeddedServer(Path(sys.argv[1])) as server:
        store = ValkeyStore(connect(server.url))
        await store.create_conversation(Conversation(id="c1", owner="ana", created_at=1.0, updated_at=1.0, listed=True))
        print(server.pid, flush=True)
        sys.stdin.read()
        await store.close()

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A data folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="hkt-", dir="/tmp") as name:
        yield Path(name)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[EmbeddedServer, ValkeyStore]]:
    async with EmbeddedServer(folder) as server:
        store = ValkeyStore(connect(server.url))
        try:
            yield server, store
        finally:
            await store.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed owner's server is nobody's child here and may stay a zombie where no init reaps it.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return sys.platform != "linux"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  what another process does, and when, no event tells
            await asyncio.sleep(0.005)


async def restarted(server: EmbeddedServer, pid: int) -> None:
    await until(lambda: server.pid not in (0, pid))


@asynccontextmanager
async def owner_process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Another Hocket's store: yields its process and its server's pid; it has written conversation c1."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_keeps_data_over_a_clean_restart(folder: Path) -> None:
    thread = conversation()
    async with opened(folder) as (server, store):
        await store.create_conversation(thread)
        pid = server.pid
        assert alive(pid)
        config = await store._client.config_get("*")
        assert config["appendonly"] == "yes" and config["appendfsync"] == "always"
        assert config["port"] == "0" and config["maxmemory-policy"] == "noeviction" and config["save"] == ""
    assert not alive(pid), "a clean shutdown stops the server"
    async with opened(folder) as (server, store):
        assert server.pid != pid
        assert await store.conversation(thread.id) == thread


async def test_only_this_user_reaches_it(folder: Path) -> None:
    (folder / "valkey").mkdir(mode=0o755)
    async with opened(folder) as (server, _):
        assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o700


async def test_a_killed_server_is_started_again_with_its_data(folder: Path) -> None:
    thread = conversation()
    async with opened(folder) as (server, store):
        for _ in range(2):
            await store.create_conversation(thread)
            pid = server.pid
            os.kill(pid, signal.SIGKILL)
            await restarted(server, pid)
            assert await store.conversation(thread.id) == thread, "the same client reconnects"
            await store.delete_conversation(thread)
        pid = server.pid
    assert not alive(pid)


async def test_a_dropped_connection_is_not_a_dead_server(folder: Path) -> None:
    async with opened(folder) as (server, store):
        pid, line = server.pid, server._line
        await store._client.client_kill_filter(_type="normal", skipme=True)
        await until(lambda: server._line not in (None, line))
        assert server.pid == pid and alive(pid)


async def test_the_next_hocket_attaches_to_a_killed_ones_server(folder: Path) -> None:
    async with owner_process(folder) as (process, orphan):
        process.kill()
        await process.wait()
        assert alive(orphan)
        async with opened(folder) as (server, store):
            assert server.pid == orphan
            assert await store.conversation("c1") is not None
    assert not alive(orphan), "who attached owns it, and stops it"


async def test_an_attached_server_is_supervised_too(folder: Path) -> None:
    async with owner_process(folder) as (process, orphan):
        process.kill()
        await process.wait()
        async with opened(folder) as (server, store):
            os.kill(orphan, signal.SIGKILL)
            await restarted(server, orphan)
            assert await store.conversation("c1") is not None


async def test_both_killed_at_once(folder: Path) -> None:
    async with owner_process(folder) as (process, orphan):
        process.kill()
        os.kill(orphan, signal.SIGKILL)
        await process.wait()
        async with opened(folder) as (server, store):
            assert server.pid != orphan
            assert await store.conversation("c1") is not None


async def test_a_second_hocket_is_refused_by_name_of_the_folder(folder: Path) -> None:
    async with opened(folder) as (server, store):
        with pytest.raises(DataFolderInUseError, match=str(folder)):
            async with EmbeddedServer(folder):
                pass
        assert alive(server.pid), "the refused one does not stop the first one's server"
        await store.ping()
    async with owner_process(folder):
        with pytest.raises(DataFolderInUseError, match=str(folder)):
            async with EmbeddedServer(folder):
                pass
    async with opened(folder):
        pass


async def test_a_torn_tail_loads_less_one_entry(folder: Path) -> None:
    kept, torn = conversation(), conversation()
    async with opened(folder) as (server, store):
        await store.create_conversation(kept)
        await store.create_conversation(torn)
        os.kill(server.pid, signal.SIGSTOP)  # no restart between the kill and the cut
        (log,) = (folder / "valkey" / "appendonlydir").glob("*.incr.aof")
        os.truncate(log, log.stat().st_size - 7)
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        await restarted(server, pid)
        assert await store.conversation(kept.id) == kept
        assert await store.conversation(torn.id) is None
        await store.create_conversation(torn)
        assert await store.conversation(torn.id) == torn


async def test_a_stale_socket_is_no_obstacle(folder: Path) -> None:
    (folder / "valkey").mkdir()
    stale = await asyncio.start_unix_server(lambda reader, writer: None, folder / "valkey" / "socket")
    stale.close()
    await stale.wait_closed()
    (folder / "valkey" / "socket").touch()
    async with opened(folder) as (_, store):
        await store.ping()


async def test_a_damaged_log_is_a_clear_error(folder: Path) -> None:
    async with opened(folder) as (_, store):
        await store.create_conversation(conversation())
    (log,) = (folder / "valkey" / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"damaged\r\n" + log.read_bytes())
    with pytest.raises(StoreError, match=r"ended at its start(?s:.*)Bad file format"):
        async with EmbeddedServer(folder):
            pass
    lock = _try_lock(folder / "hocket.lock")
    assert lock is not None, "a failed start lets go of the folder"
    os.close(lock)


async def test_a_server_that_cannot_start_again_is_tried_until_it_can(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    thread = conversation()
    async with opened(folder) as (server, store):
        await store.create_conversation(thread)
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        (log,) = (folder / "valkey" / "appendonlydir").glob("*.incr.aof")
        whole = log.read_bytes()
        log.write_bytes(b"damaged\r\n" + whole)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: caplog.text.count("could not be started again") >= 2)
        with pytest.raises(StoreError):
            await store.ping()
        log.write_bytes(whole)
        await restarted(server, pid)
        assert await store.conversation(thread.id) == thread


@pytest.mark.parametrize("name", ["da ta 'é\" #", "x" * 150], ids=["odd", "long"])
async def test_any_path_will_do(folder: Path, name: str) -> None:
    deep = folder / name
    thread = conversation()
    async with opened(deep) as (server, store):
        assert len(os.fsencode(server.socket_path)) <= SOCKET_PATH_LIMIT
        assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        await store.create_conversation(thread)
        socket, pid = server.socket_path, server.pid
        os.kill(pid, signal.SIGKILL)
        await restarted(server, pid)
        assert server.socket_path == socket
        assert await store.conversation(thread.id) == thread
    assert not socket.exists()
    assert socket.parent == deep / "valkey" or not socket.parent.exists()
    async with opened(deep) as (_, store):
        assert await store.conversation(thread.id) == thread


async def test_an_orphan_under_a_long_path_is_found(folder: Path) -> None:
    deep = folder / ("x" * 150)
    async with owner_process(deep) as (process, orphan):
        process.kill()
        await process.wait()
        async with opened(deep) as (server, store):
            assert server.pid == orphan
            assert await store.conversation("c1") is not None


@pytest.mark.parametrize("trap", ["gone", "link", "open", "file"])
async def test_a_remembered_socket_folder_is_not_trusted(folder: Path, trap: str) -> None:
    """Someone else may have put something where the short folder was."""
    deep = folder / ("x" * 150)
    (deep / "valkey").mkdir(parents=True)
    planted = folder / "p"
    if trap == "link":
        (folder / "q").mkdir(mode=0o700)
        planted.symlink_to(folder / "q")
    elif trap == "open":
        planted.mkdir()
        planted.chmod(0o777)
    elif trap == "file":
        planted.touch(mode=0o600)
    (deep / "valkey" / "socket.path").write_text(str(planted / "socket"))
    async with opened(deep) as (server, store):
        await store.ping()
        assert server.socket_path.parent != planted


async def test_a_folder_that_cannot_be_made_is_a_clear_error(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(StoreError, match=r"cannot keep data in .*file/x"):
        async with EmbeddedServer(folder / "file" / "x"):
            pass
