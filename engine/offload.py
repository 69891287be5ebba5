"""Where the bytes of blocks outside the pool are: in host memory, or in a file that outlives the process.

Owns: slots of equal size, each with a record of what it holds, and the checksums by which a damaged slot is a miss. Knows blocks as bytes
only; `tier.py` says what is in which slot.

The file is read and written by position, not mapped: where a disk is full or a file was cut short, a mapping ends the process, a call
returns an error. Its name has a digest of all that decides what the bytes mean (model, kernels, KV type, block size), so that bits made by
other arithmetic are never taken for these. It holds what people said, so only its owner may read it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from engine import memory
from engine.core import CacheNode, EngineError, EngineOptions
from engine.tier import Record

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sIIQQ16sI")  # magic, checksum of what follows it, checksum of the block, id, parent, root, tokens
_MAGIC = b"hkv1"
_ALIGNED = 4096  # bytes: slots begin where pages do
_MEASURED = 16  # blocks
_QUIET = 3600.0  # seconds between two warnings of the same kind: what befalls one block soon befalls another
_NOBODY = CacheNode(None, ())


class Store(Protocol):
    slots: int
    where: str  # for people

    def write(self, slot: int, node: CacheNode, block: memoryview) -> bool:
        """Keep a block; False if it could not be kept: the slot holds nothing then."""
        ...

    def read(self, slot: int, node: CacheNode, block: memoryview) -> bool:
        """Fill `block`; False, and whatever in it, if what the slot holds is not whole, or not the node's."""
        ...

    def records(self) -> Iterator[Record]:
        """What an earlier process left."""
        ...

    def measure(self) -> tuple[float, float]:
        """Milliseconds that a block takes to come back, and to go there."""
        ...

    def close(self) -> None: ...


def open_store(options: EngineOptions, identity: str, block_bytes: int) -> Store | None:
    """What the options ask for; None for nothing. Raises: EngineError"""
    slots = int(options.swap_space * 2**30) // block_bytes
    if not options.swap_space:
        return None
    if not slots:
        raise EngineError(f"expected a swap_space of at least a block, {block_bytes / 2**30:.6f} GiB, got {options.swap_space}")
    if options.offload_dir is None:
        return MemoryStore(slots, block_bytes)
    return FileStore(options.offload_dir, identity, slots, block_bytes, options.block_size)


class MemoryStore:
    """In host memory, taken as slots are first written."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        """Raises: EngineError when there is not as much."""
        self.slots = slots
        self.where = "host memory"
        if slots * block_bytes > (most := memory.total()):
            got = f"{slots * block_bytes / 2**30:g} GiB of {most / 2**30:.1f} GiB"
            raise EngineError(f"expected swap space that memory can hold, got {got}; with offload_dir it is on a disk")
        self._blocks = np.zeros((slots, block_bytes), np.uint8)

    def write(self, slot: int, node: CacheNode, block: memoryview) -> bool:
        self._blocks[slot] = np.frombuffer(block, np.uint8)
        return True

    def read(self, slot: int, node: CacheNode, block: memoryview) -> bool:
        block[:] = self._blocks[slot].data
        return True

    def records(self) -> Iterator[Record]:
        yield from ()

    def measure(self) -> tuple[float, float]:
        block = memoryview(bytearray(self._blocks.shape[1]))
        fresh = MemoryStore(min(self.slots, _MEASURED), len(block))  # memory is yet to be taken, as it will be
        save = _milliseconds(lambda slot: fresh.write(slot, _NOBODY, block), fresh.slots)
        return _milliseconds(lambda slot: fresh.read(slot, _NOBODY, block), fresh.slots), save

    def close(self) -> None:
        pass


class FileStore:
    """In a file of `folder`: all records, then all blocks. Takes disk space as slots are first written."""

    def __init__(self, folder: Path, identity: str, slots: int, block_bytes: int, block_size: int) -> None:
        """Raises: EngineError when the file cannot be used, or another process uses it."""
        self.slots = slots
        self.where = str(folder)
        self._block_bytes = block_bytes
        self._stride = -(-block_bytes // _ALIGNED) * _ALIGNED
        self._record_bytes = -(-(_HEAD.size + 4 * block_size) // 64) * 64
        self._blocks_at = -(-slots * self._record_bytes // _ALIGNED) * _ALIGNED
        name = hashlib.sha256(f"{identity} {block_size} {block_bytes} {slots}".encode()).hexdigest()[:16]
        path = folder / f"kv-{name}.cache"
        self._warned: dict[str, float] = {}  # when, by message
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = _open(path, self._blocks_at + slots * self._stride)
        except BlockingIOError as fault:
            raise EngineError(f"expected an offload folder that no other server uses, got {folder}") from fault
        except OSError as fault:
            raise EngineError(f"expected an offload folder that can be written, got {folder}: {fault.strerror}") from fault
        _remove_others(folder, path)

    def write(self, slot: int, node: CacheNode, block: memoryview) -> bool:
        if node.parent is None:  # forgotten since this was planned: it could not be found again
            return False
        tokens = array("I", node.tokens).tobytes()
        rest = struct.pack("<IQQ16sI", zlib.crc32(block), node.id, node.parent.id, node.root.salt, len(node.tokens)) + tokens
        record = _MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest
        try:
            # The record last: until it is there, the one before it finds a block that is not its own.
            _write_all(self._file, block, self._blocks_at + slot * self._stride)
            _write_all(self._file, memoryview(record), slot * self._record_bytes)
        except OSError as fault:
            self._warn("blocks cannot be kept in %s: %s", fault.strerror)
            with contextlib.suppress(OSError):  # the slot holds nothing now: so that the next process does not look for it
                _write_all(self._file, memoryview(bytes(len(_MAGIC))), slot * self._record_bytes)
            return False
        return True

    def _warn(self, message: str, *facts: object) -> None:
        if time.monotonic() >= self._warned.get(message, -_QUIET) + _QUIET:
            self._warned[message] = time.monotonic()
            log.warning(message, self.where, *facts)

    def read(self, slot: int, node: CacheNode, block: memoryview) -> bool:
        try:
            found = self._record(slot, os.pread(self._file, self._record_bytes, slot * self._record_bytes))
            os.preadv(self._file, [block], self._blocks_at + slot * self._stride)
        except OSError as fault:
            self._warn("a block could not be read from %s: %s", fault.strerror)
            return False
        if found is None or (found[0].id, found[0].tokens) != (node.id, node.tokens) or zlib.crc32(block) != found[1]:
            self._warn("damaged blocks in %s are computed anew")
            return False
        return True

    def records(self) -> Iterator[Record]:
        """Raises: EngineError when they can neither be read nor removed"""
        size = self._record_bytes
        try:
            written = _read_all(self._file, self.slots * size)
        except OSError as fault:
            self._empty(fault)
            return
        for slot in range(self.slots):
            if found := self._record(slot, written[slot * size : (slot + 1) * size]):
                yield found[0]

    def _empty(self, fault: OSError) -> None:
        """What cannot be read now may be readable at the next start, and would then be taken for what follows blocks that are written from
        now on, under the same names."""
        log.warning("what was kept in %s cannot be read, and is removed: %s", self.where, fault.strerror)
        try:
            os.truncate(self._file, 0)
            os.truncate(self._file, self._blocks_at + self.slots * self._stride)
        except OSError as again:
            message = f"expected an offload folder whose file can be read or emptied, got {self.where}: {again.strerror}"
            raise EngineError(message) from fault

    def measure(self) -> tuple[float, float]:
        """From the disk, not from what the system has of it in memory; there, as far as a save waits for it."""
        block = memoryview(bytearray(self._block_bytes))
        try:
            with tempfile.TemporaryFile(dir=self.where) as file:
                number = file.fileno()

                def write(at: int) -> None:
                    zlib.crc32(block)
                    _write_all(number, block, at * self._stride)

                save = _milliseconds(write, _MEASURED)
                os.fsync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)

                def read(at: int) -> None:
                    os.preadv(number, [block], at * self._stride)
                    zlib.crc32(block)

                return _milliseconds(read, _MEASURED), save
        except OSError as fault:
            self._warn("blocks cannot be kept in %s: %s", fault.strerror)
            # What is there already may still be worth reading; and once there is room, a save takes its checksum at least.
            return 0.0, _milliseconds(lambda at: zlib.crc32(block), _MEASURED)

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def _record(slot: int, data: bytes) -> tuple[Record, int] | None:
        """A slot's record and its block's checksum; None for one that is not whole."""
        if len(data) < _HEAD.size or data[:4] != _MAGIC:
            return None
        _, checksum, of_block, id, parent, root, count = _HEAD.unpack_from(data)
        rest = data[8 : _HEAD.size + 4 * count]
        if zlib.crc32(rest) != checksum:
            return None
        return Record(slot, id, parent, root, tuple(array("I", data[_HEAD.size : _HEAD.size + 4 * count]))), of_block


def _milliseconds(read: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    for at in range(count):
        read(at)
    return 1e3 * (time.perf_counter() - start) / count


def _open(path: Path, size: int) -> int:
    """A file of our own that nobody else has open or may read. Raises: OSError; BlockingIOError if another process has it"""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(file, 0o600)  # another user's file is refused
        os.truncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _read_all(file: int, size: int) -> bytes:
    """The first bytes of a file. Raises: OSError, also when it has fewer"""
    data = bytearray()
    while len(data) < size:
        part = os.pread(file, size - len(data), len(data))
        if not part:
            raise OSError(errno.EIO, f"expected {size} bytes, got {len(data)}")
        data += part
    return bytes(data)


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def _remove_others(folder: Path, kept: Path) -> None:
    """Files of other models or versions, unless a server uses them: the folder is to hold one cache, not one of each."""
    for path in folder.glob("kv-*.cache"):
        if path == kept:
            continue
        try:
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:  # in use, or not ours to remove
            continue
        log.info("removed %s, which another model or version has left", path)
