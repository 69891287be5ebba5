"""Where grammars are compiled and followed: processes that a grammar may end, since the server is another one.

Owns the *keeper*, a process that loads the library and the vocabulary once and from then on only forks; and what is forked from it, in
milliseconds: a *trial* for each grammar that comes, and one process that works out the masks of all replies. A keeper never looks at a
grammar, so nothing a client sends can end it. What it forked ends with it, and it ends with the server. Imports neither torch nor numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.grammar_library import Library, Replies
from engine.grammar_wire import NOBODY, Answer, Compile, Done, Fork, Go, Kill, Line, Rows, Step, Try, framed, grammar_of
from engine.tokenizer import Tokenizer

# The library recurses. Only what it uses of a stack is ever memory.
STACK_BYTES = 256 * 1024 * 1024
ARENA_BYTES = 128 * 1024 * 1024  # of addresses that the allocator sets apart for a thread
ENDS_PARENTLESS = 1  # PR_SET_PDEATHSIG


class Keeper:
    """Forks as it is told, and sees to those that end."""

    def __init__(self, control: socket.socket, library: Library, vocab_size: int) -> None:
        self._control = control
        self._library = library
        self._vocab_size = vocab_size
        self._forked: dict[int, int] = {}  # process ids by a pipe that is at its end when the process is

    def run(self) -> None:
        self._control.sendall(framed(Done()))
        try:
            while self._serve():
                pass
        finally:
            for pid in self._forked.values():
                os.kill(pid, signal.SIGKILL)  # it is there: nobody else waits for it
            for pid in self._forked.values():
                os.waitpid(pid, 0)

    def _serve(self) -> bool:
        poll = select.poll()
        for descriptor in (self._control.fileno(), *self._forked):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor == self._control.fileno() and not self._obey():
                return False
            if descriptor in self._forked:  # it may have been killed just now
                self._bury(descriptor)
        return True

    def _obey(self) -> bool:
        """One request: no other comes before it is answered. Returns whether there was any."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 4)
        if not data:
            return False
        match msgspec.msgpack.decode(data[4:], type=Fork | Kill):
            case Fork() as asked:
                pid = self._fork(asked, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                self._control.sendall(framed(Done(pid)))
            case Kill(pid):
                for descriptor in [pipe for pipe, forked in self._forked.items() if forked == pid]:
                    os.kill(pid, signal.SIGKILL)
                    self._bury(descriptor)
                self._control.sendall(framed(Done()))
        return True

    def _fork(self, asked: Fork, descriptors: list[int]) -> int:
        ends, held = os.pipe()
        keeper = os.getpid()
        if pid := os.fork():
            os.close(held)
            self._forked[ends] = pid
            return pid
        try:
            self._control.close()
            _confine(asked, keeper)
            if asked.role == "trial":
                _deep(lambda: _try(self._library, *descriptors))
            else:
                rows = Rows(self._vocab_size, descriptors[2])
                _follow(self._library, rows, *map(_line, descriptors[:2]))
        except BaseException:  # of no use to anyone: whoever waits for the process sees that it has ended
            os._exit(1)
        os._exit(0)

    def _bury(self, descriptor: int) -> None:
        os.close(descriptor)
        os.waitpid(self._forked.pop(descriptor), 0)


def _try(library: Library, descriptor: int) -> None:
    line = _line(descriptor)
    if asked := line.receive(Try):
        line.send(library.tried(grammar_of(asked.source)))


def _follow(library: Library, rows: Rows, steps: Line, compiling: Line) -> None:
    """Masks on one thread; grammars that are to be ready are compiled on another, so that no mask waits for them."""
    replies = Replies(library, rows.row)
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=lambda: _ends(lambda: _compile(replies, compiling)), daemon=True).start()
    _deep(lambda: _mask(replies, steps, rows))


def _compile(replies: Replies, line: Line) -> None:
    while asked := line.receive(Compile):
        for key in asked.forgotten:
            replies.forget(key)
        line.send(replies.compile(asked.key, grammar_of(asked.source)))


def _mask(replies: Replies, line: Line, rows: Rows) -> None:
    def answer(goes: list[Go], call: Callable[[Go], Answer]) -> list[Answer]:
        answers = []
        for go in goes:
            rows.begin(go.id)
            answers.append(call(go))
        rows.begin(NOBODY)
        if answers:
            line.send(answers)
        return answers

    while step := line.receive(Step):
        for id in step.ended:
            replies.end(id)
        taken = answer(step.goes, replies.take)
        answer([go for go, answered in zip(step.goes, taken, strict=True) if answered.goes_on], replies.mask)


def _line(descriptor: int) -> Line:
    return Line(socket.socket(fileno=descriptor))


def _deep(work: Callable[[], None]) -> None:
    """`work` on a deep stack: in a thread of its own, since the size of a stack is settled when a thread begins."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: _ends(work))
    thread.start()
    thread.join()


def _ends(work: Callable[[], None]) -> None:
    """`work`, which ends the process if it fails."""
    try:
        work()
    except BaseException:
        os._exit(1)


def _confine(asked: Fork, keeper: int) -> None:
    """No more memory and time than is given, no core, and no life without the keeper."""
    with contextlib.suppress(OSError, AttributeError):  # where the system has no such thing, the keeper's end is that of its sockets
        ctypes.CDLL(None).prctl(ENDS_PARENTLESS, signal.SIGKILL, 0, 0, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")  # if the machine runs out of memory, this is to go, and not the server
    if os.getppid() != keeper:
        raise ProcessLookupError("the keeper has ended")
    _limit(resource.RLIMIT_AS, _addresses() + asked.memory + 2 * (STACK_BYTES + ARENA_BYTES))
    _limit(resource.RLIMIT_CORE, 0)
    if asked.seconds:
        _limit(resource.RLIMIT_CPU, asked.seconds)


def _limit(what: int, most: int) -> None:
    allowed = resource.getrlimit(what)[1]
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(what, (most, most))


def _addresses() -> int:
    """Bytes of addresses that this process has."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30


def main(descriptor: str, tokenizer_path: str, vocab_size: str, *eos_ids: str) -> None:
    control = socket.socket(fileno=int(descriptor))
    ends = [int(id) for id in eos_ids]
    library = Library(Tokenizer(tokenizer_path, ends), int(vocab_size), ends)
    gc.collect()
    gc.freeze()  # memory that nobody writes to stays in common
    with contextlib.suppress(ConnectionError):  # the server has ended
        Keeper(control, library, int(vocab_size)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
