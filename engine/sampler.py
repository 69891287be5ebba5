"""Choosing the next token from logits.

Owns the order of the steps: penalties, bias, temperature, then the filters (top_k, top_p, min_p), then the draw. The draw is the
Gumbel-max trick with noise that is a pure function of (seed, position, token), so a reply is the same whatever shares
its batch and whenever it is resumed. Knows no model and no scheduler beyond a sequence's tokens and `SamplingParams`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from engine.core import SamplingParams, Sequence

GREEDY_BELOW = 1e-4  # a temperature this low leaves the likeliest token, and would overflow the others

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def sample(logits: torch.Tensor, sequences: Iterable[Sequence]) -> list[int]:
    """One token for each row of logits [rows, vocab] float32 and the sequence it belongs to; -1 for a row that holds a NaN."""
    return [_choose(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]


def noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, for token ids `tokens` int64 at `position`: counter-based, no state.

    SplitMix64 (Steele et al., 2014) over the token's index in a stream keyed by seed and position; the top 52 bits make the uniform.
    """
    key = torch.tensor([_signed(seed), _signed(position)], dtype=torch.int64)
    stream = _mix(_mix(key[0] + _GOLDEN) + key[1] * _GOLDEN)
    bits = _mix(stream + (tokens + 1) * _GOLDEN)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _choose(logits: torch.Tensor, sequence: Sequence) -> int:
    params = sequence.sampling
    logits = _biased(_penalised(logits, sequence), params)
    if logits.isnan().any():
        return -1
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    logits = logits.double() / params.temperature
    tokens = _kept(logits, params)
    return int(tokens[(logits[tokens] + noise(params.seed, sequence.length, tokens)).argmax()])


def _biased(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if not params.logit_bias:
        return logits
    tokens = torch.tensor(list(params.logit_bias), dtype=torch.int64)
    bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    return logits.index_add(0, tokens, bias)


def _penalised(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Repetition penalty over prompt and reply (CTRL: Keskar et al., 2019), the other two over the reply (OpenAI's API)."""
    params = sequence.sampling
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*sequence.prompt, *sequence.output}), dtype=torch.int64)
        before = logits[seen]
        after = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
        logits = logits.index_copy(0, seen, after)
    if (params.presence_penalty or params.frequency_penalty) and sequence.output:
        counts = Counter(sequence.output)
        seen = torch.tensor(list(counts), dtype=torch.int64)
        times = torch.tensor(list(counts.values()), dtype=torch.int64)
        logits = logits.index_add(0, seen, -(params.presence_penalty + params.frequency_penalty * times.to(logits.dtype)))
    return logits


def _kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Ids of the tokens that pass the filters, each applied to what the one before left; the likeliest always passes."""
    if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
        return torch.arange(len(logits))
    ordered, tokens = logits.sort(descending=True, stable=True)
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    if params.top_p < 1:
        probabilities = ordered.softmax(0)
        before = probabilities.cumsum(0) - probabilities  # mass of the likelier ones
        ordered = ordered[: max(1, int((before < params.top_p).sum()))]
    if params.min_p > 0:
        floor = ordered[0] + torch.log(torch.tensor(params.min_p, dtype=ordered.dtype))
        ordered = ordered[: max(1, int((ordered >= floor).sum()))]
    return tokens[: len(ordered)]


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and(2 ** (64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
