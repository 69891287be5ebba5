"""Choosing the next token from one row of logits, without sorting the vocabulary.

Owns: the same steps in the same order as `engine/sampler.py`, the readable form of this and its oracle: penalties, bias, temperature,
the filters (in `filters.py`), the Gumbel-max draw. Knows rows only by address and by the records of `choices.py`; rows are
independent of one another, and a choice depends on nothing but its row and its record.

What makes it quick: the draw weighs (two logarithms in float64) only tokens that can win, see `_may_win`; and `filters.py`.

Masses are sums in float64 whose order differs from the oracle's: top_p may keep one token more or less where the mass of the likelier
ones is within 1e-12 (relative) of it. Everything else is the oracle's choice exactly, but for the last bit of the C library's log.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.np.numpy_support import carray

from engine.kernels.cpu.choices import (
    REAL_FREQUENCY,
    REAL_MIN_P,
    REAL_PRESENCE,
    REAL_REPETITION,
    REAL_TEMPERATURE,
    REAL_TOP_P,
    RECORD_WORDS,
    WORD_BIAS_TOKENS,
    WORD_BIAS_VALUES,
    WORD_BIASES,
    WORD_POSITION,
    WORD_SEED,
    WORD_SEEN,
    WORD_SEEN_TIMES,
    WORD_SEEN_TOKENS,
    WORD_TOP_K,
)
from engine.kernels.cpu.filters import (
    BLOCK,
    NEGATIVE_INFINITY,
    NO_KEY,
    POSITIVE_INFINITY,
    id_of,
    keep,
    key_of,
    logit_of,
    order_of,
)
from engine.kernels.cpu.vector import I8, address, op

GREEDY_BELOW = 1e-4  # the oracle's: a temperature this low leaves the likeliest token
NOT_A_NUMBER = -1  # what is chosen from a row with a NaN

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ONE, _12, _27, _30, _31, _33 = (np.uint64(number) for number in (1, 12, 27, 30, 31, 33))

_LOG2_E = 1.4426950408889634

# See `_may_win`.
_MARGIN = 2.0**-10
_LEAST_LOG2, _MOST_LOG2 = np.float32(-126), np.float32(2)
_HOPELESS = np.float32(-54)
_EXPONENT_BIAS = np.float32(127 + 31)
_MANTISSA = np.float32(2.0**23)
_TOO_LARGE = 2.0**30


def scratch_bytes(vocab: int) -> int:
    """Bytes that `choose_row` needs to work in, for itself while it runs; 8-byte aligned."""
    return 16 * vocab + 8 * BLOCK + 4 * -(-vocab // BLOCK)


@op(types.voidptr, address)
def _pointer(b: Any, at: Any) -> Any:
    return b.inttoptr(at, I8.as_pointer())


@njit(nogil=True, error_model="numpy")
def choose_row(logits_address: int, vocab: int, record_address: int, scratch_address: int) -> int:
    """The token chosen from one row, or NOT_A_NUMBER if the row holds a NaN once penalties and biases are applied.

    logits_address: float32 [vocab], changed in place; record_address: one row of `Choices.prepare`; scratch_address:
    `scratch_bytes(vocab)` bytes. Greedy ties go to the lowest id.
    """
    logits = carray(_pointer(logits_address), vocab, np.float32)
    words = carray(_pointer(record_address), RECORD_WORDS, np.int64)
    reals = carray(_pointer(record_address), RECORD_WORDS, np.float64)
    orders = carray(_pointer(scratch_address), vocab, np.int64)
    weights = carray(_pointer(scratch_address + 8 * vocab), vocab + BLOCK, np.float64)
    maxima = carray(_pointer(scratch_address + 16 * vocab + 8 * BLOCK), (vocab + BLOCK - 1) // BLOCK, np.int32)
    _penalise(logits, words, reals)
    top = _survey(logits, maxima)
    temperature = reals[REAL_TEMPERATURE]
    # Nothing can be added to an infinity: whatever the filters and the noise, the first of the largest wins.
    if top < 0 or temperature < GREEDY_BELOW or not math.isfinite(logits[top]):
        return top
    stream = _stream(np.uint64(words[WORD_SEED]), np.uint64(words[WORD_POSITION]))
    top_k = words[WORD_TOP_K] if words[WORD_TOP_K] < vocab else 0
    top_p, min_p = reals[REAL_TOP_P], reals[REAL_MIN_P]
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return _draw(logits, maxima, top, temperature, stream)
    count = keep(logits, maxima, top, temperature, top_k, top_p, min_p, orders, weights)
    return _draw_kept(logits, orders[:count], top, temperature, stream)


# Before the choice


@njit(nogil=True, error_model="numpy")
def _penalise(logits: Any, words: Any, reals: Any) -> None:
    """Penalties and biases, in float32 as the oracle has them; tokens are distinct, so their order does not matter."""
    seen = words[WORD_SEEN]
    tokens = carray(_pointer(words[WORD_SEEN_TOKENS]), seen, np.int64)
    times = carray(_pointer(words[WORD_SEEN_TIMES]), seen, np.int64)
    presence, frequency = np.float32(reals[REAL_PRESENCE]), np.float32(reals[REAL_FREQUENCY])
    repetition = np.float32(reals[REAL_REPETITION])
    for i in range(seen):
        logit = logits[tokens[i]]
        if reals[REAL_REPETITION] != 1:
            logit = logit / repetition if logit > 0 else logit * repetition
        if times[i] > 0:
            logit -= presence + frequency * np.float32(times[i])
        logits[tokens[i]] = logit
    biases = words[WORD_BIASES]
    biased = carray(_pointer(words[WORD_BIAS_TOKENS]), biases, np.int64)
    values = carray(_pointer(words[WORD_BIAS_VALUES]), biases, np.float32)
    for i in range(biases):
        logits[biased[i]] += values[i]


@njit(nogil=True, error_model="numpy")
def _survey(logits: Any, maxima: Any) -> int:
    """The first token of the largest logit, or NOT_A_NUMBER; fills in each block's largest key."""
    most, least, best = np.int32(NO_KEY), np.int32(POSITIVE_INFINITY), 0
    for block in range(len(maxima)):
        part = logits[block * BLOCK : (block + 1) * BLOCK]
        high, low = np.int32(NO_KEY), np.int32(POSITIVE_INFINITY)
        for i in range(len(part)):
            key = key_of(part[i])
            high = max(high, key)
            low = min(low, key)
        maxima[block] = high
        least = min(least, low)
        if high > most:
            most, best = high, block
    if most > POSITIVE_INFINITY or least < NEGATIVE_INFINITY:
        return NOT_A_NUMBER
    token = best * BLOCK
    while key_of(logits[token]) != most:
        token += 1
    return token


# The draw


@njit(nogil=True, error_model="numpy")
def _draw(logits: Any, maxima: Any, top: int, temperature: float, stream: Any) -> int:
    """The token of the largest logit / temperature + noise. `top`: a likeliest token, finite."""
    winner, best, high = top, _total(logits[top], temperature, stream, top), logits[top]
    slope, base = _slope(temperature), _base(high, temperature, best)
    for block in range(len(maxima)):
        if (logit_of(maxima[block]) - high) * slope + base < _HOPELESS:
            continue
        first = block * BLOCK
        part = logits[first : first + BLOCK]
        hopeful = 0
        for i in range(len(part)):
            hopeful += _may_win(part[i], first + i, stream, high, slope, base)
        if hopeful:
            for token in range(first, first + len(part)):
                if _may_win(logits[token], token, stream, high, slope, base):
                    total = _total(logits[token], temperature, stream, token)
                    if total > best or (total == best and token < winner):
                        winner, best = token, total
                        base = _base(high, temperature, best)
    return winner


@njit(nogil=True, error_model="numpy")
def _draw_kept(logits: Any, orders: Any, top: int, temperature: float, stream: Any) -> int:
    """The same among the tokens of `orders`, `top` being one of them; a tie goes to the likelier."""
    winner, best, high = order_of(logits[top], top), _total(logits[top], temperature, stream, top), logits[top]
    slope, base = _slope(temperature), _base(high, temperature, best)
    for i in range(len(orders)):
        token = id_of(orders[i])
        if _may_win(logits[token], token, stream, high, slope, base):
            total = _total(logits[token], temperature, stream, token)
            if total > best or (total == best and orders[i] > winner):
                winner, best = orders[i], total
                base = _base(high, temperature, best)
    return id_of(winner)


@njit(nogil=True, error_model="numpy")
def _may_win(logit: Any, token: int, stream: Any, high: Any, slope: Any, base: Any) -> Any:
    """Whether a token's exact total can reach the best one so far. Says yes a little too often, and never no wrongly.

    A total x - log(-log u) reaches `best` only if -log u <= exp(x - best); since 1 - u <= -log u, only if 1 - u <= exp(x - best).

    - The left side is at least c * 2^-31, where c is the 31 highest bits of the hash's complement.
    - The right side is 2^y with y = (x - best) / ln 2 = (logit - high) * slope + base. Reading y * 2^23 as the bits of a float32
      gives 2^floor(y) * (1 + fraction(y)): the chord, which is never below the curve.
    - `base` is _MARGIN too high. For y >= -53 (below, no u there is can reach it) both terms are below 128 in size and each of
      the roundings is within 2^-24 of its term, so all of them, the exact total's own included, stay under a twentieth of that. Where
      logits or temperatures are so large that they might not, `base` is infinite and everything is weighed.
    - y is kept within bounds where the reading is defined. At the lower only c = 0 passes; a NaN (of two infinities) ends at the upper,
      where everything does.
    """
    y = (logit - high) * slope + base
    y = y if y < _MOST_LOG2 else _MOST_LOG2
    y = y if y > _LEAST_LOG2 else _LEAST_LOG2
    reach = np.int32((y + _EXPONENT_BIAS) * _MANTISSA).view(np.float32)
    return np.float32(np.int32(~_bits(stream, token) >> _33)) <= reach


@njit(nogil=True, error_model="numpy")
def _slope(temperature: float) -> Any:
    return np.float32(_LOG2_E / temperature)


@njit(nogil=True, error_model="numpy")
def _base(high: float, temperature: float, best: float) -> Any:
    top = np.float64(high) / temperature
    return np.float32((top - best) * _LOG2_E + _MARGIN) if max(abs(top), temperature) < _TOO_LARGE else np.float32(np.inf)


@njit(nogil=True, error_model="numpy")
def _total(logit: float, temperature: float, stream: Any, token: int) -> float:
    """Logit by temperature plus standard Gumbel noise, as the oracle computes it."""
    uniform = (np.float64(np.int64(_bits(stream, token) >> _12)) + 0.5) * 2.0**-52
    return np.float64(logit) / temperature - math.log(-math.log(uniform))


@njit(nogil=True, error_model="numpy")
def _stream(seed: Any, position: Any) -> Any:
    return _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)


@njit(nogil=True, error_model="numpy")
def _bits(stream: Any, token: int) -> Any:
    return _mix(stream + (np.uint64(token) + _ONE) * _GOLDEN)


@njit(nogil=True, error_model="numpy")
def _mix(x: Any) -> Any:
    """SplitMix64's finaliser (Steele et al., 2014), uint64."""
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)
