"""Who is next of those who wait.

Owns: the order of waiting sequences, and who counts as background. Pure and deterministic: time is counted in steps. Four rules, the
weightiest first:

1. Interactive requests go before background ones. So that none of these waits for ever, one at a time, and one in AGE steps, is promoted:
   it counts as interactive until it ends. It has had nothing for AGE steps, and its owner was served least. (If each that has waited for
   long were promoted, whoever is interactive would wait behind a crowd of them.)
2. An owner that has waited for AGE steps with nothing running is next; of several, the one that has waited longest.
3. Of several owners, the one that was served least is next: each token run counts, by priority (virtual token counter: Sheng et al.,
   "Fairness in Serving Large Language Models", OSDI 2024). An owner that had nothing waiting joins level with the least served of those
   who have, so nobody saves up turns.
4. Of an owner's requests: `fcfs`, in order of arrival; `lpm`, the one with the longest known prefix, but for two kinds that go before it,
   each in order of arrival: first those that were preempted, since somebody may be reading them, then those that have waited AGE steps.
   (None starves: while a preempted one waits, no other of its owner starts that could be preempted in its turn.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from engine.core import Phase, Sequence

AGE = 256  # steps
LOOKED_AT = 128  # of an owner's waiting requests, by `lpm`: with more, finding the longest prefix takes longer than it saves

_arrival = attrgetter("id")


@dataclass(slots=True)
class _Owner:
    """One with anything waiting or running. Interactive first, then background."""

    waiting: tuple[list[Sequence], list[Sequence]] = field(default_factory=lambda: ([], []))  # each in order of arrival
    served: list[int] = field(default_factory=lambda: [0, 0])  # tokens
    running: int = 0  # sequences


class Waiting:
    def __init__(
        self,
        policy: str = "fcfs",
        known: Callable[[Sequence], int] = lambda sequence: 0,
        age: int = AGE,
        held: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> None:
        """`known`: how many of a sequence's tokens the cache has; `held`: whether it holds back (`alike.py`), and is not next."""
        self.policy = policy
        self.age = age
        self._known = known
        self._held = held
        self._owners: dict[bytes, _Owner] = {}
        self._length = 0
        self._promoted: Sequence | None = None  # the last one
        self._beside = 0  # steps since then in which there were interactive ones, running or waiting

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for owner in self._owners.values() for group in owner.waiting for sequence in group)

    def __contains__(self, sequence: Sequence) -> bool:
        owner = self._owners.get(sequence.salt)
        return owner is not None and any(sequence in group for group in owner.waiting)

    @property
    def owners(self) -> int:
        """With anything waiting or running."""
        return len(self._owners)

    def running(self, sequence: Sequence) -> int:
        """How many of its owner's."""
        return self._owners[sequence.salt].running

    def served(self, sequence: Sequence) -> int:
        """How many tokens of its owner's, of its priority."""
        return self._owners[sequence.salt].served[self.priority(sequence)]

    def priority(self, sequence: Sequence) -> int:
        return 0 if sequence is self._promoted else sequence.priority

    def rank(self, sequence: Sequence, step: int) -> tuple[int, int, int, int]:
        """The smaller, the sooner."""
        owner, priority = self._owners[sequence.salt], self.priority(sequence)
        if not owner.running and step - sequence.since >= self.age:
            return priority, 0, sequence.since, sequence.id
        return priority, 1, owner.served[priority], sequence.id

    def arrive(self, sequence: Sequence, step: int) -> None:
        self._join(self._owners.setdefault(sequence.salt, _Owner()), self.priority(sequence))
        sequence.since = step
        self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """It waits, and it is not the first time."""
        insort(self._owners[sequence.salt].waiting[self.priority(sequence)], sequence, key=_arrival)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        self._owners[sequence.salt].waiting[self.priority(sequence)].remove(sequence)
        self._length -= 1
        self._leave(sequence)

    def start(self, sequence: Sequence) -> None:
        """It waits no longer: it runs."""
        self._owners[sequence.salt].running += 1
        self.remove(sequence)

    def stop(self, sequence: Sequence) -> None:
        """It runs no longer."""
        self._owners[sequence.salt].running -= 1
        self._leave(sequence)

    def serve(self, sequence: Sequence, tokens: int, step: int) -> None:
        served = self._owners[sequence.salt].served
        served[sequence.priority] += tokens
        if sequence is self._promoted:
            served[0] += tokens
        if not (sequence.priority and sequence.preemptions):  # what is taken away again may be nothing in the end
            sequence.since = step

    def next(self, step: int) -> Sequence | None:
        """Whose turn it is."""
        oldest = [free for owner in self._owners.values() if (free := next(self._free(*owner.waiting), None))]
        first = min(oldest, key=lambda sequence: self.rank(sequence, step), default=None)
        if first is None or self.policy == "fcfs":
            return first
        group = self._owners[first.salt].waiting[self.priority(first)]
        if begun := next(self._free([sequence for sequence in group if sequence.preemptions]), None):
            return begun
        if aged := next(self._free([sequence for sequence in group if step - sequence.since >= self.age]), None):
            return aged
        return max(islice(self._free(group), LOOKED_AT), key=self._known)

    def victim(self, sequence: Sequence, running: list[Sequence], places: int) -> Sequence | None:
        """Who of those who run, the newest last, gives way to a waiting sequence: the newest background one, if this one is not; or the
        newest of an owner that has more than its share of so many places, and was served more, if this one's owner has less."""
        newest, priority = running[-1], self.priority(sequence)
        if self.priority(newest) > priority:
            return newest
        share = max(1, places // self.owners)
        if self.running(sequence) >= share:
            return None
        served = self.served(sequence)
        return next(
            (
                other
                for other in reversed(running)
                if self.priority(other) == priority and self.running(other) > share and self.served(other) > served
            ),
            None,
        )

    def _free(self, *groups: list[Sequence]) -> Iterator[Sequence]:
        return (sequence for group in groups for sequence in group if not self._held(sequence))

    def due(self, busy: bool) -> bool:
        """Once a step: whether a background request may be promoted. busy: interactive ones are running."""
        self._beside += busy or any(owner.waiting[0] for owner in self._owners.values())
        return self._beside >= self.age and (self._promoted is None or self._promoted.phase is Phase.FINISHED)

    def promote(self, begun: list[Sequence], step: int) -> bool:
        """Promote a background request, one that waits or of those whose prompt is partly run, if one has had nothing for too long."""
        firsts = [owner.waiting[1][0] for owner in self._owners.values() if owner.waiting[1]]
        held_up = [sequence for sequence in begun + firsts if step - sequence.since >= self.age]
        if not held_up:
            return False
        promoted = min(held_up, key=lambda sequence: (self.served(sequence), sequence.id))
        owner = self._owners[promoted.salt]
        self._join(owner, 0)
        if promoted.phase is Phase.WAITING:
            owner.waiting[1].remove(promoted)
            insort(owner.waiting[0], promoted, key=_arrival)
        self._promoted, self._beside = promoted, 0
        return True

    def _join(self, owner: _Owner, priority: int) -> None:
        """An owner with nothing waiting has no claim on account of the time before; nobody has on account of a time when nothing waited."""
        waiting = [other.served[priority] for other in self._owners.values() if other.waiting[priority]]
        level = min(waiting) if waiting else max(other.served[priority] for other in self._owners.values())
        owner.served[priority] = max(owner.served[priority], level)

    def _leave(self, sequence: Sequence) -> None:
        owner = self._owners[sequence.salt]
        if not (owner.running or owner.waiting[0] or owner.waiting[1]):
            del self._owners[sequence.salt]
