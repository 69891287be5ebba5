"""What a step takes, predicted.

Owns: the model of a step's time, by which prefills beside decodes are bounded (`--max-step-ms`), the tier is judged and the simulator's
clock runs. Pure; `calibrate.py` measures its numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core import Chunk, Load, Move, Save


@dataclass(slots=True, frozen=True)
class StepCost:
    """Milliseconds: so much for a number of rows, whatever they attend to, and so much for each position that a row attends to."""

    rows: tuple[tuple[int, float], ...]  # (rows of a step, its milliseconds), by rows; between two it is a straight line, as after the last
    pair: float  # for a row of a prompt and a position it sees
    read: float  # for a decode and a position it sees
    load: float = 0.0  # for a block that comes back from the tier
    save: float = 0.0  # for a block that goes there

    def of_rows(self, rows: int) -> float:
        if rows <= 0:
            return 0.0
        if len(self.rows) == 1:
            return self.rows[0][1]
        at = min(max(1, bisect_right(self.rows, (rows, float("inf")))), len(self.rows) - 1)
        (low, less), (high, more) = self.rows[at - 1], self.rows[at]
        return max(0.0, less + (more - less) * (rows - low) / (high - low))

    def of_chunk(self, start: int, count: int) -> float:
        """What a prompt's rows at positions [start, start + count) add to the step by attending. All they see is read once at least."""
        return max(self.pair * count * (start + (count + 1) / 2), self.of_decode(start + count)) if count else 0.0

    def of_decode(self, context: int) -> float:
        return self.read * context

    def of_step(self, chunks: Iterable[Chunk]) -> float:
        rows, attending = 0, 0.0
        for chunk in chunks:
            count = len(chunk.tokens)
            rows += count
            attending += self.of_decode(chunk.start + 1) if count == 1 else self.of_chunk(chunk.start, count)
        return self.of_rows(rows) + attending

    def of_moves(self, moves: Iterable[Move]) -> float:
        """What moves before a step add to it. Copies within the pool take nothing beside."""
        took = 0.0
        for move in moves:
            if isinstance(move, Load):
                took += self.load
            elif isinstance(move, Save):
                took += self.save
        return took

    def rows_within(self, milliseconds: float, start: int, before: int, most: int) -> int:
        """How many of `most` rows at `start` a step that has `before` rows can take in, at so many more milliseconds."""
        base = self.of_rows(before)
        low, high = 0, most
        while low < high:
            count = (low + high + 1) // 2
            if self.of_rows(before + count) - base + self.of_chunk(start, count) <= milliseconds:
                low = count
            else:
                high = count - 1
        return low

    def load_rows(self) -> int:
        """A block's coming back, in rows of a prompt that take as long."""
        return max(1, math.ceil(self.load / self.of_row())) if self.load else 1

    def of_row(self) -> float:
        """A prompt's row, in a step that has as many as were measured."""
        rows, milliseconds = self.rows[-1]
        return max(1e-6, milliseconds / rows)


class Drift:
    """How far steps are off their prediction lately: a machine is not always as quick as when it was measured.

    Follows the median of the ratios, by a fixed small step up or down: one slow step among many says nothing.
    """

    STEP = 1.02
    MOST = 16.0

    def __init__(self) -> None:
        self.ratio = 1.0  # of what steps take to what was predicted

    def observe(self, predicted: float, took: float) -> None:
        """A step's milliseconds."""
        change = self.STEP if took > predicted * self.ratio else 1 / self.STEP
        self.ratio = min(self.MOST, max(1 / self.MOST, self.ratio * change))
