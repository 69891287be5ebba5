"""Rotary frequencies and their scaling kinds.

Owns the formulas. float32 in the order of operations of the published checkpoints' own code, since angles at far
positions are sensitive to it.
"""

from __future__ import annotations

import math

import torch

from engine.core import ModelConfig, ModelError, RopeScaling


def tables(config: ModelConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [positions, head_dim / 2] float32."""
    frequencies, attention = scaled_frequencies(config)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * attention, angles.sin() * attention


def scaled_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Radians per position, [head_dim / 2] float32, and the factor on cos and sin.

    Raises: ModelError for an unknown scaling kind.
    """
    scaling, dim = config.rope_scaling, config.head_dim
    plain = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match scaling.kind:
        # "dynamic" changes frequencies only past the trained context, where Hocket ends a sequence.
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            return _llama3(plain, scaling, scaling.original_context or config.context_length), 1.0
        case "yarn":
            return _yarn(plain, scaling, config)
        case "longrope":
            return _longrope(plain, scaling, config)
    raise ModelError(f"expected a RoPE scaling of default, linear, dynamic, llama3, yarn or longrope, got {scaling.kind!r}")


def _llama3(plain: torch.Tensor, scaling: RopeScaling, original: int) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended. (Llama 3.1)"""
    turns = original * plain / (2 * math.pi)
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return blend * plain + (1 - blend) * plain / scaling.factor


def _yarn(plain: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Interpolate the dimensions that turn rarely, keep those that turn often. (Peng et al., 2023)"""
    original = scaling.original_context or config.context_length

    def dimension(turns: float) -> float:
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    attention = scaling.attention_factor
    if attention is None:
        attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return plain * (1 - ramp) + plain / scaling.factor * ramp, attention


def _longrope(plain: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """One factor per dimension. (Ding et al., 2024)

    The long factors serve the whole context when it is longer than the original one: cached keys must not change with a sequence's length.
    """
    original = scaling.original_context or config.context_length
    longer = config.context_length > original
    factors = torch.tensor(scaling.long_factor if longer else scaling.short_factor, dtype=torch.float32)
    attention = scaling.attention_factor
    if attention is None:
        factor = config.context_length / original if longer else scaling.factor
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / factors, attention
