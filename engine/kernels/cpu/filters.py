"""Which tokens of a row pass top_k, top_p and min_p, without sorting the vocabulary.

Owns: the order of tokens, as an int64 that sorts as (logit, then the lower id first), so that no two tokens are equal; and the filters,
each applied to what the one before left. They gather the few tokens that can pass (`_least`), then find the cut by bisection (`_cut`).
Knows no noise and no penalties, and takes a row without a NaN whose largest logit is finite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from engine.kernels.cpu.vector import op

BLOCK = 128  # tokens whose largest logit is kept, a power of two: most blocks hold nothing that matters

POSITIVE_INFINITY = 0x7F800000  # keys of the infinities; a NaN's is beyond one of them
NEGATIVE_INFINITY = -0x7F800001
NO_KEY = -0x80000000  # below any
_ID_BITS = 0xFFFFFFFF
_ONE = np.uint64(1)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # ln 2 in two parts: few bits, and the rest
_MAGIC = 6755399441055744.0  # 1.5 * 2^52: added and taken away, it rounds to an integer
_TAYLOR = tuple(1 / math.factorial(power) for power in range(12))
_NO_MASS = -45.0  # tokens this far (in nats) below the likeliest have less than 1e-14 of its mass, however many


@op(types.float64, types.float64, types.float64, types.float64)
def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return b.fma(x, y, z)


# Orders


@njit(nogil=True, error_model="numpy")
def key_of(logit: Any) -> Any:
    """An int32 that sorts as the logit does: both zeros are 0, and a NaN is beyond the infinities."""
    bits = np.float32(logit + np.float32(0)).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, error_model="numpy")
def logit_of(key: Any) -> Any:
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(nogil=True, error_model="numpy")
def order_of(logit: Any, token: int) -> Any:
    """An int64 that sorts as the logit does, and for the same logit as the lower token first."""
    return np.int64(key_of(logit)) << 32 | (_ID_BITS - token)


@njit(nogil=True, error_model="numpy")
def id_of(order: int) -> int:
    return _ID_BITS - (order & _ID_BITS)


# The filters


@njit(nogil=True, error_model="numpy")
def keep(logits: Any, maxima: Any, top: int, temperature: float, top_k: int, top_p: float, min_p: float, orders: Any, weights: Any) -> int:
    """Puts the orders of the tokens that pass first in `orders`, in no order, and says how many they are."""
    high = logits[top]
    mass = _mass(logits, maxima, high, temperature, weights) if top_k <= 0 and top_p < 1 else 0.0
    count = _gather(logits, maxima, _least(maxima, high, temperature, top_k, top_p, min_p, mass, orders, weights), orders)
    if top_k > 0:
        for i in range(count):
            weights[i] = 1.0
        count = _cut(orders, weights, count, np.float64(top_k))
    if top_p < 1:
        highest = np.float64(high) / temperature
        for i in range(count):
            weights[i] = _exp(np.float64(logits[id_of(orders[i])]) / temperature - highest)
        if top_k > 0:
            mass = 0.0
            for i in range(count):
                mass += weights[i]
        count = _cut(orders, weights, count, top_p * mass)
    if min_p > 0:
        floor = np.float64(high) / temperature + math.log(min_p)
        passing = 0
        for i in range(count):
            if np.float64(logits[id_of(orders[i])]) / temperature >= floor:
                orders[passing] = orders[i]
                passing += 1
        count = passing
    return count


@njit(nogil=True, error_model="numpy")
def _least(
    maxima: Any, high: float, temperature: float, top_k: int, top_p: float, min_p: float, mass: float, orders: Any, weights: Any
) -> Any:
    """A key that every token that can pass reaches. Uses `orders` and `weights` to work in."""
    least: Any = np.int32(NEGATIVE_INFINITY)
    if 0 < top_k <= len(maxima):
        # That many blocks have a token at least as likely as the least of that many maxima, so that many tokens are.
        for block in range(len(maxima)):
            orders[block] = np.int64(maxima[block]) << 32 | block
            weights[block] = 1.0
        kept = _cut(orders, weights, len(maxima), np.float64(top_k))
        least = np.int32(POSITIVE_INFINITY)
        for i in range(kept):
            least = min(least, np.int32(orders[i] >> 32))
    nats = -np.inf
    if top_k <= 0 and top_p < 1:
        # Tokens below an equal share of what top_p leaves out have less than that together: the cut is above them all.
        nats = math.log((1 - top_p) * mass / (len(maxima) * BLOCK))
    if min_p > 0 and not (top_k > 0 and top_p < 1):  # those two together need the mass of all that top_k keeps
        nats = max(nats, math.log(min_p))
    # Lower by far more than float32 rounds.
    limit = np.float32(np.float64(high) + (min(nats, 0.0) * (1 + 1e-5) - 1e-5) * temperature - abs(np.float64(high)) * 1e-6)
    return max(least, key_of(limit))


@njit(nogil=True, error_model="numpy")
def _gather(logits: Any, maxima: Any, least: int, orders: Any) -> int:
    """Puts the orders of the tokens whose key is at least `least` in `orders`, and says how many they are."""
    count = 0
    for block in range(len(maxima)):
        if maxima[block] >= least:
            first = block * BLOCK
            part = logits[first : first + BLOCK]
            for i in range(len(part)):
                if key_of(part[i]) >= least:  # seldom: a branch is quicker than a store
                    orders[count] = order_of(part[i], first + i)
                    count += 1
    return count


@njit(nogil=True, error_model="numpy")
def _mass(logits: Any, maxima: Any, high: float, temperature: float, weights: Any) -> float:
    """The sum of exp(logit / temperature) over all tokens, that of the likeliest being 1. Uses `weights` to work in."""
    highest, mass = np.float64(high) / temperature, 0.0
    parts = weights[:BLOCK]
    for block in range(len(maxima)):
        if np.float64(logit_of(maxima[block])) / temperature - highest < _NO_MASS:
            continue
        part = logits[block * BLOCK : (block + 1) * BLOCK]
        for i in range(len(part)):
            parts[i] = _exp(np.float64(part[i]) / temperature - highest)
        parts[len(part) :] = 0.0
        half = BLOCK // 2
        while half:  # in pairs: vectors add as they are, and errors stay small
            for i in range(half):
                parts[i] += parts[half + i]
            half //= 2
        mass += parts[0]
    return mass


@njit(nogil=True, error_model="numpy")
def _cut(orders: Any, weights: Any, count: int, target: float) -> int:
    """How many of the first `count` tokens pass, those that do moved to the front: the ones whose likelier ones weigh less than `target`.

    The likeliest always passes. Bisects on the value of `orders`, halving the range each time: at most 64 passes over what is left of it.
    """
    first, last, before = 0, count, 0.0  # the cut is within [first, last); `before`: the weight of all to its left
    low = high = orders[0]
    for i in range(count):
        low = min(low, orders[i])
        high = max(high, orders[i])
    while last - first > 1:
        middle = low + np.int64((np.uint64(high) - np.uint64(low) + _ONE) >> _ONE)
        split, weight, next_low, next_high = first, 0.0, high, low
        for i in range(first, last):
            order, own = orders[i], weights[i]
            orders[i], weights[i] = orders[split], weights[split]
            orders[split], weights[split] = order, own
            likely = order >= middle
            split += likely
            weight += own if likely else 0.0
            next_low = min(next_low, order if likely else high)
            next_high = max(next_high, low if likely else order)
        if before + weight >= target:
            last, low = split, next_low
        else:
            first, high, before = split, next_high, before + weight
    return last


@njit(nogil=True, error_model="numpy")
def _exp(x: float) -> Any:
    """exp for x <= 0, relative error below 1e-14, in operations that vectorise; no less than exp(-700)."""
    x = max(x, -700.0)
    rounded = x * _LOG2_E + _MAGIC
    whole = rounded - _MAGIC
    rest = _fma(whole, -_LN2_LOW, _fma(whole, -_LN2_HIGH, x))
    power = _fma(_TAYLOR[11], rest, _TAYLOR[10])
    power = _fma(power, rest, _TAYLOR[9])
    power = _fma(power, rest, _TAYLOR[8])
    power = _fma(power, rest, _TAYLOR[7])
    power = _fma(power, rest, _TAYLOR[6])
    power = _fma(power, rest, _TAYLOR[5])
    power = _fma(power, rest, _TAYLOR[4])
    power = _fma(power, rest, _TAYLOR[3])
    power = _fma(power, rest, _TAYLOR[2])
    power = _fma(power, rest, _TAYLOR[1])
    power = _fma(power, rest, _TAYLOR[0])
    return power * np.int64((np.float64(rounded).view(np.int64) + 1023) << 52).view(np.float64)
