"""Rotary frequencies and their scaling kinds.

Owns the formulas. float32 in the order of operations of the published checkpoints' own code, since angles at far
positions are sensitive to it; powers, cosines and sines are rounded to it from float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.core import ModelConfig, ModelError, RopeScaling

Array = np.ndarray[Any, np.dtype[np.float32]]


def tables(config: ModelConfig, positions: int) -> tuple[Array, Array]:
    """cos and sin, each [positions, head_dim / 2] float32."""
    frequencies, attention = scaled_frequencies(config)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    factor = np.float32(attention)
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor


def scaled_frequencies(config: ModelConfig) -> tuple[Array, float]:
    """Radians per position, [head_dim / 2] float32, and the factor on cos and sin.

    Raises: ModelError for an unknown scaling kind.
    """
    scaling, dim = config.rope_scaling, config.head_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = np.float32(1) / np.power(np.float64(config.rope_theta), exponents.astype(np.float64)).astype(np.float32)
    match scaling.kind:
        # "dynamic" changes frequencies only past the trained context, where Hocket ends a sequence.
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / np.float32(scaling.factor), 1.0
        case "llama3":
            return _llama3(plain, scaling, scaling.original_context or config.context_length), 1.0
        case "yarn":
            return _yarn(plain, scaling, config)
        case "longrope":
            return _longrope(plain, scaling, config)
    raise ModelError(f"expected a RoPE scaling of default, linear, dynamic, llama3, yarn or longrope, got {scaling.kind!r}")


def _llama3(plain: Array, scaling: RopeScaling, original: int) -> Array:
    """Long wavelengths are divided by the factor, short ones kept, those between blended. (Llama 3.1)"""
    turns = original * plain / (2 * math.pi)
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clip(0, 1)
    return blend * plain + (1 - blend) * plain / scaling.factor


def _yarn(plain: Array, scaling: RopeScaling, config: ModelConfig) -> tuple[Array, float]:
    """Interpolate the dimensions that turn rarely, keep those that turn often. (Peng et al., 2023)"""
    original = scaling.original_context or config.context_length

    def dimension(turns: float) -> float:
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    ramp = ((np.arange(len(plain), dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))).clip(0, 1)
    attention = scaling.attention_factor
    if attention is None:
        attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return plain * (1 - ramp) + plain / scaling.factor * ramp, attention


def _longrope(plain: Array, scaling: RopeScaling, config: ModelConfig) -> tuple[Array, float]:
    """One factor per dimension. (Ding et al., 2024)

    The long factors serve the whole context when it is longer than the original one: cached keys must not change with a sequence's length.
    """
    original = scaling.original_context or config.context_length
    longer = config.context_length > original
    factors = np.array(scaling.long_factor if longer else scaling.short_factor, np.float32)
    attention = scaling.attention_factor
    if attention is None:
        factor = config.context_length / original if longer else scaling.factor
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / factors, attention
