"""Who holds back while another reads a prompt that begins alike, so that what they have in common is computed once.

Owns: which of the waiting requests hold back, behind whom, until when. One does while a running request of the same owner, that has no
smaller right to its turns, reads what both prompts begin with, at least a block more of it than the cache has. It goes on when that is
computed, when the other one ends or is preempted, or when that one has not come any further for PATIENCE steps; others may start in its
place. One that was preempted holds back for nobody: somebody may be reading it. Pure.

(Nobody holds back without end: whoever starts meanwhile and begins alike too would hold back behind the same prompt, and comes later.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core import Sequence

PATIENCE = 8  # steps


@dataclass(slots=True)
class _Hold:
    behind: Sequence
    until: int  # tokens of it are computed
    computed: int  # of them when it last came further
    since: int  # the step in which it did
    over: bool = False  # it took too long


class Alike:
    def __init__(self, block_size: int, known: Callable[[Sequence], int], most: Callable[[Sequence], int]) -> None:
        """`known`: how many of a waiting sequence's tokens the cache has; `most`: how many may be found there at all."""
        self._size = block_size
        self._known = known
        self._most = most
        self._reading: dict[bytes, list[Sequence]] = {}  # by salt: running, and their prompts are not yet computed
        self._holds: dict[Sequence, _Hold] = {}
        self._step = 0

    def begin(self, running: Iterable[Sequence], step: int) -> None:
        """A step is planned: see who needs to hold back no longer."""
        self._step = step
        self._reading.clear()
        for sequence in running:
            self.start(sequence)
        for sequence, hold in list(self._holds.items()):
            computed = hold.behind.computed
            if computed >= hold.until:
                del self._holds[sequence]
            elif computed != hold.computed:
                hold.computed, hold.since = computed, step
            elif step - hold.since >= PATIENCE:
                hold.over = True

    def start(self, sequence: Sequence) -> None:
        """It runs."""
        self._holds.pop(sequence, None)
        if sequence.length - sequence.computed > 1:
            self._reading.setdefault(sequence.salt, []).append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """It runs, or waits, no longer."""
        self._holds.pop(sequence, None)
        readers = self._reading.get(sequence.salt, [])
        if sequence in readers:
            readers.remove(sequence)
        for waiting, hold in list(self._holds.items()):
            if hold.behind is sequence:
                del self._holds[waiting]

    def held(self, sequence: Sequence, priority: Callable[[Sequence], int]) -> bool:
        """Whether a waiting sequence holds back."""
        if hold := self._holds.get(sequence):
            return not hold.over
        readers = self._reading.get(sequence.salt)
        if not readers or sequence.preemptions:
            return False
        # The cache has what it had when this was last looked for: whoever goes another way from there on has nothing to wait for.
        at = len(sequence.found) * self._size
        rank, following = priority(sequence), sequence.prompt[at : at + self._size]
        alike = [reader for reader in readers if reader.prompt[at : at + self._size] == following and priority(reader) <= rank]
        if not alike:
            return False
        behind = max(alike, key=lambda reader: self._common(reader, sequence))
        until = self._common(behind, sequence)
        if until <= behind.computed or until - self._known(sequence) < self._size:
            return False
        self._holds[sequence] = _Hold(behind, until, behind.computed, self._step)
        return True

    def _common(self, reader: Sequence, sequence: Sequence) -> int:
        """Tokens that both prompts begin with and that can be found in the cache, in whole blocks."""
        size, one, other = self._size, reader.prompt, sequence.prompt
        low, high = 0, min(len(one), len(other), self._most(sequence)) // size
        while low < high:
            middle = (low + high + 1) // 2
            if one[low * size : middle * size] == other[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low * size
