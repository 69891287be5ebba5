"""What is told of a replay: waiting, gaps, work done and repeated, and how evenly owners were served.

Owns the counting, in memory that grows with turns and not with tokens. Decides nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.core import Chunk, Sequence, StepPlan
from engine.scheduler import Scheduler

WINDOW = 1024  # steps in which owners' shares are compared
LOOKS = 16  # times in a window that it is looked at who waits
FINE = 100  # how many gaps are told apart in a millisecond


@dataclass(slots=True, eq=False)
class Request:
    """A turn that has not ended."""

    asked: float  # seconds
    turn: int
    last: float = 0.0  # when its last token came, in seconds
    reached: int = 0  # positions that were run, as far as `Tally.step` looks at them


@dataclass(slots=True)
class Mark:
    """What there was up to a time."""

    seconds: float = 0.0
    tokens: int = 0  # of replies
    busy: float = 0.0  # milliseconds of all steps
    occupied: float = 0.0  # each step's milliseconds times the sequences that ran


class Tally:
    def __init__(self, batch: int) -> None:
        self.batch = batch  # sequences that may run at once
        self.first_turns: list[float] = []  # seconds to the first token
        self.later_turns: list[float] = []
        self.background: list[float] = []  # the same of turns that nobody waits for, first or later
        self.owners: dict[bytes, list[float]] = defaultdict(list)  # the same of turns that somebody waits for
        self.gaps: Counter[int] = Counter()  # between two tokens of a reply: FINE to a millisecond
        self.fairness: list[float] = []  # Jain's index of each window in which several owners waited all the time
        self.replied = self.prompts = self.cached = 0  # tokens
        self.steps = self.rows = self.again = 0  # rows run, and those of them at positions that had been run before
        self.turns = self.preemptions = self.crowded_out = self.most_preempted = 0
        self.loads = self.saves = self.refused = self.given_up = 0
        self.now = Mark()
        self.wall = 0.0  # seconds that it took
        self._marks = [Mark()]  # of now and then
        self._requests: dict[int, Request] = {}  # by sequence
        self._run: Counter[bytes] = Counter()  # tokens in this window, by owner
        self._waiting: set[bytes] | None = None  # owners who have waited at each look of this window

    @property
    def waits(self) -> list[float]:
        return self.first_turns + self.later_turns

    @property
    def rate(self) -> float:
        """Tokens of replies per second, warm."""
        begin, end = self._warm()
        return (end.tokens - begin.tokens) / max(end.seconds - begin.seconds, 1e-9)

    @property
    def occupancy(self) -> float:
        """Share of the batch that is taken, over the time of all steps, warm."""
        begin, end = self._warm()
        return (end.occupied - begin.occupied) / max((end.busy - begin.busy) * self.batch, 1e-9)

    def asked(self, sequence: Sequence, turn: int, when: float) -> None:
        self._requests[sequence.id] = Request(when, turn)

    def step(self, seconds: float, milliseconds: float, plan: StepPlan, scheduler: Scheduler) -> None:
        """One that took so many milliseconds and is over now, in seconds."""
        run, rows, tokens = self._run, 0, 0
        for chunk in plan.chunks:
            count = len(chunk.tokens)
            run[chunk.sequence.salt] += count
            rows += count
            tokens += chunk.samples
            if count > 1 or chunk.sequence.preemptions:
                self._look(chunk, count)
        self.steps += 1
        self.rows += rows
        now = self.now
        now.seconds = seconds
        now.tokens += tokens
        now.busy += milliseconds
        now.occupied += milliseconds * len(scheduler.running)
        if self.steps % (WINDOW // LOOKS) == 0:
            self._marks.append(replace(now))
            waiting = {sequence.salt for sequence in scheduler.waiting}
            self._waiting = waiting if self._waiting is None else self._waiting & waiting
        if self.steps % WINDOW == 0:
            self._close_window()

    def token(self, sequence: Sequence, now: float) -> None:
        request = self._requests[sequence.id]
        if request.last:
            self.gaps[round((now - request.last) * 1e3 * FINE)] += 1
        else:
            self._first_token(sequence, request, now)
        request.last = now

    def ended(self, sequence: Sequence) -> None:
        del self._requests[sequence.id]
        self.turns += 1
        self.replied += len(sequence.output)
        self.prompts += len(sequence.prompt)
        self.cached += sequence.cached
        self.preemptions += sequence.preemptions
        self.crowded_out += sequence.crowded_out
        self.most_preempted = max(self.most_preempted, sequence.preemptions)

    def _first_token(self, sequence: Sequence, request: Request, now: float) -> None:
        waited = now - request.asked
        if sequence.priority:
            self.background.append(waited)
            return
        (self.later_turns if request.turn else self.first_turns).append(waited)
        self.owners[sequence.salt].append(waited)

    def _look(self, chunk: Chunk, count: int) -> None:
        sequence, request = chunk.sequence, self._requests[chunk.sequence.id]
        if sequence.output:
            request.reached = max(request.reached, sequence.length - 1)  # all but the last one were run
        self.again += min(max(0, request.reached - chunk.start), count)
        request.reached = max(request.reached, chunk.start + count)

    def _close_window(self) -> None:
        if self._waiting and len(self._waiting) > 1:
            self.fairness.append(jain(self._run[owner] for owner in self._waiting))
        self._run.clear()
        self._waiting = None

    def _warm(self) -> tuple[Mark, Mark]:
        """The middle four fifths of all tokens: before them caches are empty, after them few are left who ask."""
        marks, tokens = [*self._marks, self.now], self.now.tokens
        begin, end = (next(mark for mark in marks if mark.tokens >= share * tokens) for share in (0.1, 0.9))
        return (begin, end) if end.tokens > begin.tokens else (marks[0], self.now)


def jain(shares: Iterable[float]) -> float:
    """1 if all shares are equal, 1 / n if one of n has everything (Jain, Chiu, Hawe, 1984)."""
    given = list(shares)
    squares = sum(share * share for share in given)
    return sum(given) ** 2 / (len(given) * squares) if squares else 1.0


def percentile(values: Iterable[float], rank: float) -> float:
    """The least of the values that `rank` percent of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, int(-(-len(ordered) * rank // 100)) - 1)] if ordered else 0.0


def percentile_of(counted: Counter[int], rank: float) -> int:
    """The same of values that are counted."""
    left = -(-counted.total() * rank // 100)
    for value in sorted(counted):
        left -= counted[value]
        if left <= 0:
            return value
    return 0
