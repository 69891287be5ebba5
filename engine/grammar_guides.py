"""How far replies are in their grammars, and which tokens each may go on with.

Owns the guides, and what is kept of each so that it goes on in another process when the one that follows it ends. The masks are worked
out there while the model runs (`grammar_process.py`). Knows nothing of models, logits and what a step is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine import core
from engine.grammar import Compiled, Grammars, said
from engine.grammar_client import KILL_SECONDS, Ended, Late, MaskProcess, Patience
from engine.grammar_wire import NOBODY, Answer, Go, Mask, Step

ANSWER_SECONDS = 3.0  # a mask takes milliseconds
STEP_SECONDS = 8.0  # for all masks of a step, whatever ends meanwhile


class Guide:
    """How far one reply is in its grammar."""

    __slots__ = ("asked", "compiled", "done", "dropped", "fault", "id", "known", "process", "row", "suspected", "taken", "taking")

    def __init__(self, id: int, compiled: Compiled, row: int) -> None:
        self.id = id
        self.compiled = compiled
        self.row = row  # where its mask is
        self.done = False  # nothing can follow
        self.fault = ""  # why the reply cannot go on
        self.taken: list[int] = []  # its tokens so far
        self.taking = False  # what the last of them did is awaited
        self.asked = False  # the mask after them is known or awaited
        self.known = False
        self.process: MaskProcess | None = None  # that follows it
        self.suspected = False  # a process ended while it worked for this
        self.dropped = False

    def ends(self, fault: str) -> None:
        self.fault = fault
        self.taking = self.known = False


class Guides:
    """The guides of all replies that have a grammar, by their sequences' ids. The engine thread alone calls it.

    A process that ends, or is late, is replaced. What it was working for when it ended is last to be tried again, and ends if it does the
    same a second time; all others go on where they were. No call takes longer than `STEP_SECONDS`, and one without guides nothing.
    """

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._processes = grammars.processes
        self._rows = grammars.rows
        self._free: list[int] = []  # rows
        self._guides: dict[int, Guide] = {}
        self._ids = itertools.count()
        self._ended: list[int] = []  # guides that the process is to forget
        self._awaited: deque[tuple[list[Guide], bool]] = deque()  # answers to come, in order: to tokens that were taken, or masks
        self._asked: MaskProcess | None = None  # where they come from
        self._patience = Patience(0)

    def __len__(self) -> int:
        return len(self._guides)

    def add(self, sequence: core.Sequence) -> Guide | None:
        """The guide of a new sequence, if it has a grammar. Raises: RequestError if that was not compiled before, and is not good"""
        if not (grammar := sequence.sampling.grammar):
            return None
        compiled = sequence.compiled or self.grammars.compiled(grammar)
        assert isinstance(compiled, Compiled)
        guide = self._guides[sequence.id] = self.begin(compiled)
        return guide

    def begin(self, compiled: Compiled) -> Guide:
        if not self._free:
            before = len(self._rows)
            self._rows.grow()
            self._free += reversed(range(before, len(self._rows)))
        return Guide(next(self._ids), compiled, self._free.pop())

    def drop(self, sequence: core.Sequence) -> None:
        if guide := self._guides.pop(sequence.id, None):
            self.end(guide)

    def end(self, guide: Guide) -> None:
        guide.dropped = True
        self._free.append(guide.row)
        if guide.process and guide.process is self._processes.existing:
            self._ended.append(guide.id)
            self._patience = Patience(STEP_SECONDS)
            self._send([])

    def of(self, sequence: core.Sequence) -> Guide | None:
        return self._guides.get(sequence.id)

    def masks(self, sequences: Iterable[core.Sequence]) -> Callable[[], list[Mask | None]]:
        """Asks, for each sequence, which tokens may not come next. What it returns waits for the masks, which are good until the next
        tokens are taken: None for any token, or where nothing can follow, or for who is at fault."""
        return self.asked([self.of(sequence) for sequence in sequences])

    def asked(self, guides: list[Guide | None]) -> Callable[[], list[Mask | None]]:
        if new := [(guide, ()) for guide in guides if guide and not (guide.asked or guide.fault)]:
            self._go(new)
        return lambda: self._masks(guides)

    def take(self, chosen: Iterable[tuple[Guide, Sequence[int]]]) -> None:
        """Go on with the tokens that were chosen; whether anything can follow is known then. The masks of what can are begun."""
        going = [(guide, tokens) for guide, tokens in chosen if not guide.fault]
        if going:
            self._go(going)
        for guide, _ in going:
            while guide.taking:
                self._answer()

    def close(self) -> None:
        self.grammars.close()

    def _masks(self, guides: list[Guide | None]) -> list[Mask | None]:
        self._patience = Patience(STEP_SECONDS)
        for guide in guides:
            while guide and not (guide.known or guide.done or guide.fault):
                self._answer()
        return [self._rows.row(guide.row) if guide and guide.known else None for guide in guides]

    def _go(self, going: Sequence[tuple[Guide, Sequence[int]]]) -> None:
        self._patience = Patience(STEP_SECONDS)
        for guide, tokens in going:
            guide.taken += tokens
        self._send(going)

    def _send(self, going: Sequence[tuple[Guide, Sequence[int]]]) -> None:
        while going or self._ended:
            for guide, _ in going:
                guide.asked = guide.taking = True
                guide.known = False
            before = self._asked if self._awaited else None
            if going:
                self._awaited.append(([guide for guide, _ in going], True))
            ended, self._ended = self._ended, []
            self._asked = None
            try:
                process = self._processes.current(self._patience)
                if before and before is not process:  # somebody else saw its end
                    raise Ended
                self._asked = process
                goes = [_go(guide, tokens, process) for guide, tokens in going]
                process.steps.send(Step(goes, ended), self._patience)
                return
            except (Ended, Late) as fault:
                going = self._again(fault)

    def _answer(self) -> None:
        """The next answers that come."""
        guides, taking = self._awaited[0]
        try:
            answers = self._receive(len(guides))
        except (Ended, Late) as fault:
            self._send(self._again(fault))
            return
        self._awaited.popleft()
        for guide, answer in zip(guides, answers, strict=True):
            guide.taking = False
            guide.done = answer.done
            guide.known = not (taking or answer.fault)
            guide.suspected &= taking
            if answer.fault:
                guide.ends(said(answer.fault))
        if taking and (going := [guide for guide, answer in zip(guides, answers, strict=True) if answer.goes_on]):
            self._awaited.appendleft((going, False))

    def _receive(self, count: int) -> list[Answer]:
        """Raises: Ended, Late if the process works for one reply, or for none, all the time"""
        assert self._asked
        while True:
            before = self._rows.worked_for()
            try:
                answers = self._asked.steps.receive(list[Answer], Patience(ANSWER_SECONDS, self._patience))
            except Late:
                if self._patience.over or self._rows.worked_for() == before:
                    raise
                continue
            if len(answers) != count:
                raise Ended
            return answers

    def _again(self, fault: Exception) -> list[tuple[Guide, Sequence[int]]]:
        """After a process's end: what is to be asked of another one, the guide that it was working for last."""
        if self._asked:
            self._processes.end(self._asked, Patience(KILL_SECONDS))
        waiting = list(dict.fromkeys(guide for guides, _ in self._awaited for guide in guides if not guide.dropped))
        self._awaited.clear()
        working, _ = self._rows.worked_for()
        self._rows.begin(NOBODY)
        if suspect := next((guide for guide in waiting if guide.id == working), None):
            waiting.remove(suspect)
            if suspect.suspected or isinstance(fault, Late):
                suspect.ends(LATE if isinstance(fault, Late) else ENDED)
            else:
                suspect.suspected = True
                waiting.append(suspect)
        self._patience.spend()  # or there would be no end to it
        if self._patience.over:
            for guide in waiting:
                guide.ends(LATE)
        return [(guide, ()) for guide in waiting if not guide.fault]


LATE = f"it took longer than {ANSWER_SECONDS:.0f} seconds"
ENDED = "what followed it ended"


def _go(guide: Guide, tokens: Sequence[int], process: MaskProcess) -> Go:
    """What a process is to know of a guide, in which it may be new: then all that it has taken."""
    if guide.process is process:
        return Go(guide.id, guide.row, [*tokens])
    guide.process = process
    compiled = guide.compiled
    source = None if compiled.key in process.known else compiled.source
    process.known.add(compiled.key)
    return Go(guide.id, guide.row, guide.taken, compiled.key, source)
