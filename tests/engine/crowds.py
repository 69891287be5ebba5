"""A scheduler under load, for tests of who is served when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.core import Chunk, Phase, Sequence
from tests.engine.fakes import FakeRunner, sequence
from tests.engine.test_scheduler import BLOCK, check, make

REPLY = 10  # tokens, unless it is said


class Server:
    """A scheduler under load. Counts the tokens that were run, by owner and by sequence."""

    def __init__(self, **options: Any) -> None:
        self.scheduler = make(**options)
        self.runner = FakeRunner(BLOCK)
        self.asked: list[Sequence] = []
        self.chunks: list[Chunk] = []  # of the last step
        self.served: Counter[bytes] = Counter()
        self.rows: Counter[int] = Counter()

    def ask(self, prompt: int = 4, reply: int = REPLY, owner: bytes = b"a", priority: int = 0, head: list[int] | None = None) -> Sequence:
        """A request whose prompt is like no other's after `head`."""
        id = len(self.asked)
        asked = sequence(id, [*(head or []), 1000 + id, *range(10, 9 + prompt)], reply, owner, ignore_eos=True)
        asked.priority = priority
        self.asked.append(asked)
        return asked

    def step(self, *arrivals: Sequence) -> None:
        plan = self.scheduler.plan(arrivals)
        self.chunks = plan.chunks
        for chunk in plan.chunks:
            self.served[chunk.sequence.salt] += len(chunk.tokens)
            self.rows[chunk.sequence.id] += len(chunk.tokens)
        assert not self.runner.move(plan.moves)
        self.scheduler.advance(plan, self.runner.run(plan))
        check(self.scheduler)
        places = [(self.scheduler.waiting.priority(asked), asked.id) for asked in self.scheduler.running]
        assert places == sorted(places), "those who give way last come first"

    def until(self, done: Callable[[], object], *crowds: Crowd, within: int = 2000) -> int:
        """Step until something is so; returns how many steps that took."""
        for steps in range(within + 1):
            if done():
                return steps
            self.step(*(asked for crowd in crowds for asked in crowd.more()))
        raise AssertionError(f"it is not so within {within} steps")

    def steps(self, count: int, *crowds: Crowd) -> None:
        for _ in range(count):
            self.step(*(asked for crowd in crowds for asked in crowd.more()))

    @property
    def preemptions(self) -> int:
        return sum(asked.preemptions for asked in self.asked)


class Crowd:
    """Endless requests of a kind, so many of them waiting in each step. Newcomers: each of an owner of its own."""

    def __init__(self, server: Server, waiting: int = 4, newcomers: bool = False, **kind: Any) -> None:
        self.server, self.waiting, self.newcomers, self.kind = server, waiting, newcomers, kind
        self.live: list[Sequence] = []

    def more(self) -> list[Sequence]:
        self.live = [asked for asked in self.live if asked.phase is not Phase.FINISHED]
        missing = self.waiting - sum(asked.phase is Phase.WAITING for asked in self.live)
        new = [self._one() for _ in range(missing)]
        self.live += new
        return new

    def _one(self) -> Sequence:
        owner = {"owner": b"%d" % len(self.server.asked)} if self.newcomers else {}
        return self.server.ask(**self.kind, **owner)


def ended(*asked: Sequence) -> Callable[[], bool]:
    return lambda: all(one.phase is Phase.FINISHED for one in asked)
