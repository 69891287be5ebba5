"""What a step has room for, in tokens and in predicted milliseconds.

Owns: the sums. `scheduler.py` says who takes of it, `cost.py` what things take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.core import PROMPT_ROWS
from engine.cost import StepCost

LEAST_ROWS = 4  # of a prompt in a step, whatever they take: it must come to an end
LEAST_SAVES = 1  # in a step that has any to make, for the same reason
LONGEST_MS = 1000.0  # predicted, of a step that delays no decode, or may take any time: a newcomer and a cancel wait for its end
LEAST_MS = 0.1  # that a step has left, whatever else it has to do
SAVED = 0.5  # of the time a step has left, at most, goes to saving blocks that are given up: they are not why it is made
BEHIND = 1 / 8  # of the time a step takes, at most, goes to saving some before that; as much as prompts need for theirs, roughly
BEHIND_MOST = 8  # blocks


@dataclass(slots=True)
class Room:
    """What a step has left for prefills, and for blocks that come from the tier and go there."""

    tokens: int
    milliseconds: float
    rows: int  # that it has already
    cost: StepCost | None
    least: int = LEAST_ROWS  # that fit, whatever they take
    scores: int = PROMPT_ROWS  # rows that can be run for their log probabilities

    @property
    def open(self) -> bool:
        return self.tokens > 0 and self.milliseconds > 0

    def fits(self, start: int, count: int) -> int:
        """How many of `count` rows at `start`."""
        count = min(count, self.tokens) if self.open else 0
        if self.cost is None or self.milliseconds == math.inf:
            return count
        return max(self.cost.rows_within(self.milliseconds, start, self.rows, count), min(count, self.least))

    def take(self, start: int, count: int) -> None:
        if self.cost and self.milliseconds != math.inf:
            more = self.cost.of_rows(self.rows + count) - self.cost.of_rows(self.rows) + self.cost.of_chunk(start, count)
            self.milliseconds -= more
        self.tokens -= count
        self.rows += count
        self.least = 0

    def take_load(self, rows: int) -> None:
        """For a block that comes back, at the price of so many rows."""
        self.tokens -= rows
        self.milliseconds -= self.cost.load if self.cost else 0.0

    def take_saves(self, count: int) -> None:
        """For blocks that go there. They close no room: a prompt has its few rows."""
        if count and self.cost:
            self.milliseconds = max(min(self.milliseconds, LEAST_MS), self.milliseconds - count * self.cost.save)

    def saves(self, made: int = 0) -> float:
        """How many more blocks that are given up may be saved; `made` are already."""
        if self.cost is None or not self.cost.save:
            return math.inf
        return max(0, LEAST_SAVES - made, int(SAVED * min(self.milliseconds, LONGEST_MS) / self.cost.save))

    def saves_behind(self, took: float, made: int) -> int:
        """The same of those that are not given up yet, in a step that takes so long."""
        assert self.cost
        if not self.cost.save:
            return BEHIND_MOST
        within = min(BEHIND * took, self.milliseconds) / self.cost.save
        return max(0, LEAST_SAVES - made, int(min(within, BEHIND_MOST)))
