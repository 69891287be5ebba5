"""Log probabilities: how likely the model found a token.

Owns: what the numbers mean. They are the log-softmax, in float64, of the model's float32 logits as they come out of it: before a grammar's
mask, penalties, biases, temperature and filters. Each row is worked out by itself, by the same operations in the same order, so they
are the same bits whatever shares the step. Knows no models and no requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core import Score, TokenLogprob
from engine.tokenizer import Tokenizer


class Distribution:
    """One row of logits, float32 [vocab]; it is copied."""

    __slots__ = ("_logprobs",)

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        wide: npt.NDArray[Any] = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):  # what is no number stays none, and whoever reads it sees it
            wide -= wide.max()
            wide -= np.log(np.exp(wide).sum())
        self._logprobs = wide

    def score(self, token: int, top: int) -> Score:
        """Of `token`, with the `top` likeliest beside it; of equals, the lower ids."""
        return Score(token, float(self._logprobs[token]), self._likeliest(top) if top > 0 else ())

    def _likeliest(self, count: int) -> tuple[tuple[int, float], ...]:
        logprobs = self._logprobs
        count = min(count, len(logprobs))
        least = np.partition(logprobs, -count)[-count]
        found = np.flatnonzero(logprobs >= least)
        order = np.argsort(-logprobs[found], kind="stable")[:count]
        return tuple((int(id), float(logprobs[id])) for id in found[order])


def spelled(score: Score, tokenizer: Tokenizer) -> TokenLogprob:
    """A score with what its tokens add to the text."""
    top = tuple(TokenLogprob(id, tokenizer.visible_bytes(id), logprob) for id, logprob in score.top)
    return TokenLogprob(score.id, tokenizer.visible_bytes(score.id), score.logprob, top)
