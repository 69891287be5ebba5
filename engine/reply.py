"""One reply in the making: its text, its grammar, and what is told of its log probabilities.

Owns what lasts from one of its steps to the next. Knows no scheduler and no model.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core import Score, Sequence, TokenLogprob
from engine.detokenizer import TextStream
from engine.grammar_guides import Guide
from engine.logprobs import spelled
from engine.tokenizer import Tokenizer


class Reply:
    __slots__ = ("_prompt", "_sequence", "_tokenizer", "guide", "text")

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, guide: Guide | None = None) -> None:
        self.text = TextStream(tokenizer, sequence.sampling.stop)
        self.guide = guide
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._prompt: list[TokenLogprob | None] = [None] if sequence.sampling.prompt_logprobs else []  # until it is told

    @property
    def stopped(self) -> bool:
        """Nothing can follow what there is: a stop string came, or the grammar is at its end."""
        return self.text.stopped or (self.guide is not None and self.guide.done)

    def know(self, start: int, scores: Iterable[Score]) -> None:
        """Of the prompt's tokens from position `start` on, some of which may be known: after a preemption rows are run again."""
        if known := [spelled(score, self._tokenizer) for score in scores]:
            self._prompt[start:] = known

    def known_prompt(self) -> tuple[TokenLogprob | None, ...]:
        """The prompt's log probabilities, once all are known, to be told once."""
        if len(self._prompt) < len(self._sequence.prompt):
            return ()
        known, self._prompt = tuple(self._prompt), []
        return known

    def spelled(self, score: Score | None) -> tuple[TokenLogprob, ...]:
        return (spelled(score, self._tokenizer),) if score else ()
