"""The cache folder: where it is, locks between processes, atomic publishing of folders, digests of files.

Knows nothing of models. Everything in the cache can be made again, so whatever is not whole is thrown away.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# Called with a stage ("fetching the model", say) and how much of it is done (0 to 1; None: unknown), always from the thread that
# called the function it was given to.
Progress = Callable[[str, float | None], None]

_CHUNK = 1 << 22  # bytes read at once
_SETTLED_NS = 2_000_000_000  # a file changed less than this ago may change again within its clock's tick


def quiet(stage: str, fraction: float | None) -> None:
    """The Progress that shows nothing."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/hocket`, or `~/.cache/hocket` (a relative XDG_CACHE_HOME is ignored, as the XDG specification asks)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "hocket"


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path` against other processes and threads; the system lets it go when the holder dies.

    The file stays: removing it would let two holders lock two different files of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staging(parent: Path, key: str) -> Iterator[Path]:
    """An empty folder beside the final ones, removed at the end. Hold `key`'s lock: what a killed holder left is removed too."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f".partial-{key}-"
    for stale in parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Make `staged` (a file or a folder of files) appear as `final`, whole or not at all, a crash of the machine included."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if staged.is_dir():
        for file in staged.iterdir():
            _sync(file)
        if final.exists():  # a folder cannot be renamed over one that has files
            final.rename(Path(tempfile.mkdtemp(prefix=".replaced-", dir=staged)) / "old")
    _sync(staged)
    staged.rename(final)
    _sync(final.parent)
    for replaced in final.glob(".replaced-*") if final.is_dir() else ():
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path, progress: Progress = quiet) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size or 1
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("checking the model", min(1.0, done / total))
    return digest.hexdigest()


def content_digest(files: Iterable[Path], cache_dir: Path, progress: Progress = quiet) -> str:
    """One SHA-256 that names the content of `files` (their names and bytes), and not where they lie.

    A single file's is that of its bytes. Reading gigabytes at every start would be slow, so a file's digest is remembered
    with its device, inode, size, mtime and ctime: no ordinary program writes, replaces or back-dates a file without a new ctime.
    """
    named = sorted((path.name, _remembered_sha256(path, cache_dir, progress)) for path in files)
    if len(named) == 1:
        return named[0][1]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _remembered_sha256(path: Path, cache_dir: Path, progress: Progress) -> str:
    path = path.resolve()
    status = path.stat()
    identity = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    memo = cache_dir / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memo.read_bytes())
        if known["identity"] == identity:
            return str(known["sha256"])
    sha256 = file_sha256(path, progress)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        with contextlib.suppress(OSError):  # a cache that cannot be written to costs time, nothing else
            memo.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as file:
                json.dump({"identity": identity, "sha256": sha256}, file)
            Path(file.name).replace(memo)
    return sha256
