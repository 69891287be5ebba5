"""One reply's way through its grammar, a token at a time, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.grammar import Compiled
from engine.grammar_guides import Guides
from engine.grammar_wire import Mask


class Walk:
    def __init__(self, guides: Guides, compiled: Compiled) -> None:
        self.guides = guides
        self.guide = guides.begin(compiled)

    @property
    def done(self) -> bool:
        return self.guide.done

    @property
    def fault(self) -> str:
        return self.guide.fault

    def mask(self) -> Mask | None:
        mask = self.guides.asked([self.guide])()[0]
        return None if mask is None else mask.copy()

    def allowed(self) -> list[int]:
        mask = self.mask()
        assert mask is not None, self.fault
        return [int(token) for token in np.flatnonzero(~mask)]

    def take(self, *tokens: int) -> None:
        self.guides.take([(self.guide, tokens)])

    def whole(self, tokens: Sequence[int], ends: int) -> bool:
        """The reply may be these tokens. (Where a grammar leaves no choice a mask allows one spelling; others are taken, too.)"""
        self.take(*tokens)
        return not self.fault and (self.done or ends in self.allowed())
