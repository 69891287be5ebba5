"""The processes that compile and follow grammars, as the server sees them: started, asked with patience, ended when they answer no more.

Owns how long is waited, how much memory they may have, and starting them again. Knows neither replies nor what a grammar is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

import engine
from engine import memory
from engine.core import EngineError
from engine.grammar_wire import Answer, Compile, Done, Fork, Frames, Kill, Rows, Source, Try, framed
from engine.tokenizer import Tokenizer

M = TypeVar("M")

SLICE = 0.05  # seconds
START_SECONDS = 60.0  # for the keeper to load the vocabulary, which takes it less than one
KILL_SECONDS = 1.0
CLOSE_SECONDS = 2.0
TRIAL_SECONDS = 5  # of computing for a grammar to be compiled and tried out; mostly it takes a fraction of one
TRIAL_WAIT_SECONDS = 30.0  # in which it is to get these
TRIAL_BYTES = 512 * 1024 * 1024
MASKS_BYTES = 4 * 1024 * 1024 * 1024  # for the replies of all; or a quarter of what there is
MIB = 1024 * 1024

# What forks has no other threads; and what ran out of memory ends at once, without looking for the names of where it was.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
NOT_STARTED = "the processes that compile and follow grammars cannot be started"
TOO_MUCH = f"it takes more than {TRIAL_BYTES // MIB} MiB of memory or {TRIAL_SECONDS} seconds to be compiled and tried out"


class Ended(Exception):
    """The process at the other end is gone."""


class Late(Exception):
    """It did not answer in time."""


class Patience:
    """Seconds to wait, in slices, each of which counts once it was waited through: where the whole machine stands still, nobody is late."""

    def __init__(self, seconds: float, whole: Patience | None = None) -> None:
        """whole: what this is a part of."""
        self._slices = math.ceil(seconds / SLICE)
        self._whole = whole

    @property
    def over(self) -> bool:
        return self._slices <= 0 or (self._whole is not None and self._whole.over)

    def spend(self) -> None:
        self._slices -= 1
        if self._whole:
            self._whole.spend()

    def wait(self, end: socket.socket, events: int) -> int:
        """Which of `events` came. Raises: Late"""
        poll = select.poll()
        poll.register(end, events)
        while not self.over:
            if found := poll.poll(1000 * SLICE):
                return found[0][1]
            self.spend()
        raise Late


class Channel:
    """Messages to and from another process."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self._frames = Frames()
        weakref.finalize(self, end.close)

    def send(self, message: msgspec.Struct, patience: Patience) -> None:
        """What comes meanwhile is taken in, so that the other end can go on. Raises: Ended, Late"""
        data = memoryview(framed(message))
        while data:
            try:
                data = data[self.end.send(data) :]
            except BlockingIOError:
                if patience.wait(self.end, select.POLLIN | select.POLLOUT) & select.POLLIN:
                    self._read()
            except OSError as fault:
                raise Ended from fault

    def send_with(self, message: msgspec.Struct, descriptors: Iterable[int]) -> None:
        """A short message, to who is waiting for it. Raises: Ended"""
        try:
            socket.send_fds(self.end, [framed(message)], [*descriptors])
        except OSError as fault:
            raise Ended from fault

    def receive(self, kind: type[M], patience: Patience) -> M:
        """Raises: Ended, also when what comes is no such message; Late"""
        try:
            while (message := self._frames.next(kind)) is None:
                if not self._read():
                    patience.wait(self.end, select.POLLIN)
        except msgspec.MsgspecError as fault:
            raise Ended from fault
        return message

    def _read(self) -> bool:
        """Take in what there is; whether there was anything."""
        try:
            data = self.end.recv(64 * 1024)
        except BlockingIOError:
            return False
        except OSError as fault:
            raise Ended from fault
        if not data:
            raise Ended
        self._frames.feed(data)
        return True


class Lock:
    """A lock that is waited for with patience."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, patience: Patience) -> Iterator[None]:
        """Raises: Late"""
        while not self._lock.acquire(timeout=SLICE):
            patience.spend()
            if patience.over:
                raise Late
        try:
            yield
        finally:
            self._lock.release()


@dataclass(slots=True, frozen=True)
class Forked:
    pid: int
    control: Channel  # of the keeper that forked it


class Keeper:
    """The process that others are forked from (`grammar_process.py`): begun when it is needed, and again when it is gone."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._arguments = [str(tokenizer.path), str(vocab_size), *map(str, eos_ids)]
        self._lock = Lock()
        self._control: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._left: weakref.finalize[..., Keeper] | None = None  # what ends the process if nobody else does
        self._ready = False  # it has loaded what there is to load
        self._closed = False

    def fork(self, asked: Fork, descriptors: Iterable[int], patience: Patience) -> Forked:
        """A new process, which has `descriptors`. Raises: Ended, Late"""
        given = [*descriptors]
        with self._lock.held(patience):
            try:
                return Forked(self._ask(asked, given, patience).pid, self._begin())
            except Ended:  # it was killed meanwhile, or before
                return Forked(self._ask(asked, given, patience).pid, self._begin())

    def kill(self, forked: Forked, patience: Patience) -> bool:
        """See to it that a process is no more. Returns whether it alone is: with a keeper, all that it forked has ended."""
        try:
            with self._lock.held(patience):
                if self._control is not forked.control:
                    return False
                self._ask(Kill(forked.pid), [], patience)
        except (Ended, Late):
            return False
        return True

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(Late), self._lock.held(Patience(CLOSE_SECONDS)):
            self._drop(CLOSE_SECONDS if self._ready else 0)

    def _ask(self, asked: Fork | Kill, descriptors: list[int], patience: Patience) -> Done:
        control = self._begin()
        try:
            if not self._ready:
                control.receive(Done, patience)
                self._ready = True
            control.send_with(asked, descriptors)
            return control.receive(Done, patience)
        except (Ended, Late):
            self._drop(0)
            raise

    def _begin(self) -> Channel:
        if self._closed:
            raise Ended
        if not self._control:
            ours, theirs = socket.socketpair()
            control = Channel(ours)
            with theirs:
                try:
                    self._process = self._start(theirs.fileno())
                except OSError as fault:
                    raise Ended from fault
            self._control, self._ready = control, False
            self._left = weakref.finalize(self, _end, self._process, ours, CLOSE_SECONDS)
        return self._control

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        # The child must find this very package, and (-P) no module that happens to lie in the working directory.
        package = str(Path(engine.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.grammar_process", str(descriptor), *self._arguments],
            env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,  # the terminal's Ctrl-C is for the server, which ends it last
        )

    def _drop(self, seconds: float) -> None:
        if self._process and self._control and self._left:
            self._left.detach()
            _end(self._process, self._control.end, seconds)
        self._process = self._control = self._left = None


def _end(process: subprocess.Popen[bytes], control: socket.socket, seconds: float) -> None:
    """A keeper whose control is closed ends what it forked, and then itself: given time to, it leaves nothing behind."""
    control.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tried(keeper: Keeper, source: Source) -> str:
    """What is wrong with a grammar, found out in a process of its own; nothing if all is well. Raises: EngineError"""
    for _ in range(3):
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        with theirs:
            try:
                forked = keeper.fork(Fork("trial", TRIAL_BYTES, TRIAL_SECONDS), [theirs.fileno()], Patience(START_SECONDS))
            except (Ended, Late) as fault:
                raise EngineError(NOT_STARTED) from fault
        try:
            patience = Patience(TRIAL_WAIT_SECONDS)
            channel.send(Try(source), patience)
            return channel.receive(Answer, patience).fault
        except (Ended, Late):
            if keeper.kill(forked, Patience(KILL_SECONDS)):
                return TOO_MUCH
    raise EngineError("the processes that compile grammars are ended again and again")


class MaskProcess:
    """One that works out masks, until it ends."""

    def __init__(self, forked: Forked, steps: Channel, compiling: Channel) -> None:
        self.forked = forked
        self.steps = steps
        self.compiling = compiling  # guarded by `lock`
        self.lock = Lock()
        self.known: set[int] = set()  # keys of the grammars that are compiled there


class MaskProcesses:
    """The one that there is, and others after it. Any thread may call it."""

    def __init__(self, keeper: Keeper, rows: Rows) -> None:
        self._keeper = keeper
        self._rows = rows
        self._lock = Lock()
        self._keys = itertools.count()
        self.existing: MaskProcess | None = None

    def current(self, patience: Patience) -> MaskProcess:
        """Raises: Ended, Late"""
        with self._lock.held(patience):
            if not self.existing:
                ends = [socket.socketpair() for _ in range(2)]
                channels = [Channel(ours) for ours, _ in ends]
                most = min(MASKS_BYTES, memory.total() // 4)
                try:
                    descriptors = [*(theirs.fileno() for _, theirs in ends), self._rows.descriptor]
                    forked = self._keeper.fork(Fork("masks", most, 0), descriptors, patience)
                finally:
                    for _, theirs in ends:
                        theirs.close()
                self.existing = MaskProcess(forked, *channels)
            return self.existing

    def end(self, process: MaskProcess, patience: Patience) -> None:
        """It is of no use any more."""
        if self.existing is process:
            self.existing = None  # before anybody waits: whoever comes meanwhile is given another
        self._keeper.kill(process.forked, patience)

    def compile(self, source: Source, forgotten: Callable[[MaskProcess], list[int]]) -> tuple[int, str]:
        """Have a grammar that was tried out ready for replies: its key, and what is wrong with it. Raises: EngineError

        forgotten: the keys of those that nobody asks for any more.
        """
        key = next(self._keys)
        for _ in range(3):  # what ends the process may have been something else
            try:
                process = self.current(Patience(START_SECONDS))
            except (Ended, Late) as fault:
                raise EngineError(NOT_STARTED) from fault
            patience = Patience(TRIAL_WAIT_SECONDS)
            try:
                with process.lock.held(patience):
                    process.compiling.send(Compile(key, source, forgotten(process)), patience)
                    answer = process.compiling.receive(Answer, patience)
            except (Ended, Late):
                self.end(process, Patience(KILL_SECONDS))
                continue
            if not answer.fault:
                process.known.add(key)
            return key, answer.fault
        return key, TOO_MUCH
