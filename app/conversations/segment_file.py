"""The file in which what replies were run as outlives the process, kill -9 included.

Owns `segments` in a folder, and a lock on that folder: of two servers, the second has no file. Knows no chats and not what is worth
keeping: `Segments` says what to append and when to write anew. A record is its length, its checksum and a `Segment` under its key; the
first that is not whole ends the file, whatever follows. The system is asked to write, not to have written: a crash of the machine may take
the end, or what a rewrite has just written. A fault here is never a fault of a reply: it costs the memory of some after a restart, and is
logged once.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from app.conversations.segments import Segment

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")  # bytes that follow, and their CRC-32


class _Record(msgspec.Struct, array_like=True):
    key: bytes
    lead_ids: bytes  # four bytes each, as an array has them
    lead_digest: bytes
    ids: bytes
    after: int


class SegmentFile:
    def __init__(self, folder: Path) -> None:
        """Raises nothing: without a file it can have for itself, it reads and writes none."""
        self.tokens = 0  # that its records take up, as `Segment.tokens` counts them: at least a quarter of their bytes
        self._path = folder / "segments"
        self._folder = self._file = -1
        self._warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = _opened(self._path)
        except OSError as fault:
            self._warn(fault)

    def read(self) -> Iterator[tuple[bytes, Segment]]:
        """The whole records, oldest first. At its end, what follows them is cut off, so that what is appended can be read."""
        if self._file < 0:
            return
        try:
            data = self._path.read_bytes()
        except OSError as fault:
            self._give_up(fault)
            return
        at = 0
        while found := _record(data, at):
            key, segment, at = found
            self.tokens += segment.tokens
            yield key, segment
        try:
            os.ftruncate(self._file, at)
        except OSError as fault:
            self._give_up(fault)

    def append(self, key: bytes, segment: Segment) -> None:
        if self._file < 0:
            return
        size = os.fstat(self._file).st_size
        try:
            _write(self._file, _encoded(key, segment))
            self.tokens += segment.tokens
        except OSError as fault:
            self._warn(fault)
            try:
                os.ftruncate(self._file, size)  # a part of a record would hide all that come after
            except OSError as worse:
                self._give_up(worse)

    def rewrite(self, kept: Iterable[tuple[bytes, Segment]]) -> None:
        """Hold these and no others, oldest first; if that fails, all that it held."""
        if self._file < 0:
            return
        self.tokens = 0  # also if it fails: the next attempt is due when as much has been added
        draft, file = self._path.with_suffix(".new"), -1
        try:
            draft.unlink(missing_ok=True)
            file, tokens, records = _opened(draft), 0, bytearray()
            for key, segment in kept:
                records += _encoded(key, segment)
                tokens += segment.tokens
            _write(file, bytes(records))
            draft.replace(self._path)
        except OSError as fault:
            self._warn(fault)
            if file >= 0:
                os.close(file)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            return
        os.close(self._file)
        self._file, self.tokens = file, tokens

    def close(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._folder = -1

    def _give_up(self, fault: OSError) -> None:
        self._warn(fault)
        self.close()

    def _warn(self, fault: OSError) -> None:
        if not self._warned:
            log.warning("what replies were run as may be forgotten at a restart: %s cannot be used: %s", self._path, fault)
        self._warned = True


def _opened(path: Path) -> int:
    """A file of our own that nobody else may read, to be appended to. Raises: OSError"""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(file, 0o600)  # another user's file is refused
    except BaseException:
        os.close(file)
        raise
    return file


def _encoded(key: bytes, segment: Segment) -> bytes:
    record = _Record(key, segment.lead_ids.tobytes(), segment.lead_digest, segment.ids.tobytes(), segment.after)
    data = msgspec.msgpack.encode(record)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def _record(data: bytes, at: int) -> tuple[bytes, Segment, int] | None:
    """The key and the segment at a place, and the place after them; None if they are not whole."""
    if len(data) < at + _HEAD.size:
        return None
    length, checksum = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    body = data[at : at + length]
    if len(body) < length or zlib.crc32(body) != checksum:
        return None
    try:
        found = msgspec.msgpack.decode(body, type=_Record)
        segment = Segment(array("I", found.lead_ids), found.lead_digest, array("I", found.ids), found.after)
    except ValueError:  # whole, but not ours; a file of zeros is one
        return None
    return found.key, segment, at + length


def _write(file: int, data: bytes) -> None:
    """In one call. Raises: OSError"""
    if (count := os.write(file, data)) < len(data):
        raise OSError(f"expected to write {len(data)} bytes, got {count} written")
