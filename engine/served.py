"""What is served, once it is loaded, and what can be asked of it.

Owns: how far loading is, and the bounds of a request that follow from the model. Knows no threads and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core import MOST_TOP_LOGPROBS, RequestError, SamplingParams

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Loading:
    stage: str
    fraction: float | None  # done, 0 to 1, if known


@dataclass(slots=True, frozen=True)
class Ready:
    """What is served."""

    model: str
    context_length: int  # tokens of prompt and reply together, as far as the KV pool allows
    vocab_size: int
    fingerprint: str  # of tokenizer and template: token ids kept under another one mean nothing
    bound: str = "the context"  # what sets context_length

    def check(self, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raises: RequestError for what can never run"""
        if not ids:
            raise RequestError("expected a prompt of at least one token, got an empty one", "input")
        if len(ids) >= self.context_length:
            raise self.too_long(str(len(ids)))
        if not 1 <= sampling.max_tokens <= self.context_length:
            message = f"expected 1 to {self.context_length} tokens to generate ({self.bound}), got {sampling.max_tokens}"
            raise RequestError(message, "max_output_tokens")
        if not all(sampling.stop):
            raise RequestError("expected stop strings of at least one character, got an empty one", "stop")
        if not -1 <= sampling.logprobs <= MOST_TOP_LOGPROBS:
            raise RequestError(f"expected 0 to {MOST_TOP_LOGPROBS} of the likeliest tokens, got {sampling.logprobs}", "top_logprobs")
        for param, named in (("input", ids), ("stop_token_ids", sampling.stop_ids), ("logit_bias", sampling.logit_bias)):
            self.check_ids(named, param)

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Raises: RequestError"""
        wrong = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"expected token ids of 0 to {self.vocab_size - 1} in {param}, got {wrong}", param)

    def too_long(self, tokens: str) -> RequestError:
        message = f"expected a prompt of fewer than {self.context_length} tokens ({self.bound}), got {tokens}"
        return RequestError(message, "input", "context_length_exceeded")


@dataclass(slots=True, frozen=True)
class Failed:
    error: str


def log_change(before: Loading | Ready | Failed, after: Loading | Ready | Failed) -> None:
    """A line for each stage of loading and each quarter of it."""
    match after:
        case Loading(stage, fraction):
            if not isinstance(before, Loading) or (before.stage, _quarters(before.fraction)) != (stage, _quarters(fraction)):
                log.info("%s%s", stage, "" if fraction is None else f" {fraction:.0%}")
        case Ready(model):
            log.info("%s is loaded", model)
        case Failed(error):
            log.error("%s", error)


def _quarters(fraction: float | None) -> int | None:
    return None if fraction is None else int(4 * fraction)
