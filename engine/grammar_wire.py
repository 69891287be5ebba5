"""What the server and the processes that follow grammars say to each other, and the memory in which masks lie.

Owns the messages, how they are framed on a socket, and the rows of masks. Knows neither grammars nor processes.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import weakref
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from engine.core import EngineError, Grammar

M = TypeVar("M")
Mask = npt.NDArray[np.bool_]  # [vocab]: tokens that are not allowed
Source = tuple[Literal["json_schema", "regex", "lark"], str]  # a grammar's kind, and its source

NOBODY = -1

_LENGTH = struct.Struct("<I")
_READ = 64 * 1024
_WORK_BYTES = 64


class Fork(msgspec.Struct, frozen=True, tag=True):
    """To the keeper, with the sockets (and the rows) that are the new process's."""

    role: Literal["trial", "masks"]
    memory: int  # bytes it may have beyond what all begin with
    seconds: int  # of computing, after which it ends; 0: any


class Kill(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Done(msgspec.Struct, frozen=True):
    """From the keeper: it is ready, or what was asked is done."""

    pid: int = 0  # of the new process


class Try(msgspec.Struct, frozen=True):
    """To a trial: compile a grammar and begin some replies with it."""

    source: Source


class Compile(msgspec.Struct, frozen=True):
    """To the masks' process, on a line of its own: have a grammar ready for replies."""

    key: int
    source: Source
    forgotten: list[int]  # keys of others


class Go(msgspec.Struct, frozen=True, array_like=True):
    """How one reply goes on: by `tokens`, and if something can follow them, the mask of what may is written to `row`."""

    id: int
    row: int
    tokens: list[int]
    key: int = -1  # of its grammar, where the reply begins
    source: Source | None = None  # of that, unless it was compiled before


class Step(msgspec.Struct, frozen=True):
    """To the masks' process. Two lists of answers come back: one for each reply's tokens, one for the masks of those that go on."""

    goes: list[Go]
    ended: list[int]  # replies


class Answer(msgspec.Struct, frozen=True, array_like=True):
    fault: str = ""  # what the library said; nothing: all is well
    done: bool = False  # nothing can follow

    @property
    def goes_on(self) -> bool:
        return not (self.fault or self.done)


def grammar_of(source: Source) -> Grammar:
    return Grammar(*source)


def framed(message: msgspec.Struct | list[Answer]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes as they come, and the messages in them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self, kind: type[M]) -> M | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        stop = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < stop:
            return None
        body = bytes(self._bytes[_LENGTH.size : stop])
        del self._bytes[:stop]
        return msgspec.msgpack.decode(body, type=kind)


class Line:
    """One end of a socket, for who has nothing else to do than to wait for the other end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._frames = Frames()

    def send(self, message: msgspec.Struct | list[Answer]) -> None:
        self._end.sendall(framed(message))

    def receive(self, kind: type[M]) -> M | None:
        """None: the other end is closed."""
        while (message := self._frames.next(kind)) is None:
            if not (data := self._end.recv(_READ)):
                return None
            self._frames.feed(data)
        return message


class Rows:
    """Masks in memory that processes share, and what is being worked for. The server makes rows, the others find them there."""

    def __init__(self, vocab_size: int, descriptor: int) -> None:
        self.descriptor = descriptor
        self._vocab_size = vocab_size
        self._rows = np.empty((0, vocab_size), np.bool_)
        self._work = np.zeros(2, np.int64)
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def make(cls, vocab_size: int) -> Rows:
        if hasattr(os, "memfd_create"):
            return cls(vocab_size, os.memfd_create("masks"))
        with tempfile.TemporaryFile() as file:
            return cls(vocab_size, os.dup(file.fileno()))

    def __len__(self) -> int:
        return len(self._rows)

    def grow(self) -> None:
        """Twice as many rows, and a few at first. Masks that are there stay."""
        os.ftruncate(self.descriptor, _WORK_BYTES + max(16, 2 * len(self)) * self._vocab_size)
        self._look()

    def begin(self, id: int) -> None:
        """Say that work for a reply is begun, or for nobody."""
        if not len(self):
            self._look()
        self._work[:] = id, self._work[1] + 1

    def worked_for(self) -> tuple[int, int]:
        """The id of a reply, and how often work was begun."""
        id, count = self._work
        return int(id), int(count)

    def row(self, at: int) -> Mask:
        if at >= len(self):
            self._look()
        row: Mask = self._rows[at]
        return row

    def _look(self) -> None:
        size = os.fstat(self.descriptor).st_size
        if not size:
            raise EngineError("expected rows for masks, got none")
        shared = mmap.mmap(self.descriptor, size)
        self._work = np.frombuffer(shared, np.int64, 2)
        self._rows = np.frombuffer(shared, np.bool_, offset=_WORK_BYTES).reshape(-1, self._vocab_size)
