"""A Hugging Face `config.json` to a checked ModelConfig and back, and the tensors a ModelConfig implies.

The one place that knows Hugging Face's field names for Llama, of transformers 5 (`rope_parameters`) and of older releases
(`rope_theta` beside `rope_scaling`). Knows nothing of tensor files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core import ModelConfig, ModelError, RopeScaling

Json = dict[str, Any]

_JSON_LIMIT = 1 << 27  # bytes; the largest tokenizer.json are some 30 MB
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# What no Llama exceeds by far: a size beyond it is a lie, and would cost memory or time before anything else fails.
_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "layers": 1 << 10,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "context_length": 1 << 27,
}


def read_json(path: Path) -> Json:
    """The JSON object in `path`; ModelError if there is none."""
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise ModelError(f"{path}: expected at most {_JSON_LIMIT} bytes of JSON, got {path.stat().st_size}")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def from_json(raw: Json, where: object) -> ModelConfig:
    """A LlamaForCausalLM's config.json as a ModelConfig; `where` names the file in errors.

    Fields that are absent have the values of transformers' LlamaConfig, except the sizes, which must be there.
    """
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if raw.get("model_type") != "llama" or architectures != ["LlamaForCausalLM"]:
        raise ModelError(
            f"{where}: only the Llama architecture is supported (model_type 'llama', architectures ['LlamaForCausalLM']), "
            f"got {raw.get('model_type')!r} and {architectures!r}"
        )
    if raw.get("quantization_config") is not None:
        kind = raw["quantization_config"]
        kind = kind.get("quant_method", kind) if isinstance(kind, dict) else kind
        raise ModelError(f"{where}: quantization_config: expected plain float weights, got {kind!r}; a GGUF may be quantised")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{where}: hidden_act: expected 'silu', got {raw['hidden_act']!r}")
    heads = _integer(raw, "num_attention_heads", where)
    hidden_size = _integer(raw, "hidden_size", where)
    context_length = _integer(raw, "max_position_embeddings", where, default=2048)
    head_dim = _integer(raw, "head_dim", where, default=hidden_size // max(1, heads))
    theta, scaling = _rope(raw, context_length, head_dim, where)
    return checked(
        ModelConfig(
            vocab_size=_integer(raw, "vocab_size", where),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size", where),
            layers=_integer(raw, "num_hidden_layers", where),
            heads=heads,
            kv_heads=_integer(raw, "num_key_value_heads", where, default=heads),
            head_dim=head_dim,
            context_length=context_length,
            rms_eps=_number(raw, "rms_norm_eps", where, default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_head=_flag(raw, "tie_word_embeddings", where),
            attention_bias=_flag(raw, "attention_bias", where),
            mlp_bias=_flag(raw, "mlp_bias", where),
        ),
        where,
    )


def to_json(config: ModelConfig) -> Json:
    """`config` as a config.json that `from_json` and transformers' LlamaConfig both read as the same model."""
    scaling = config.rope_scaling
    rope: Json = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    if scaling.kind != "default":
        rope["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = scaling.original_context or config.context_length
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.kind == "longrope":
        rope |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    if scaling.attention_factor is not None:
        rope["attention_factor"] = scaling.attention_factor
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def checked(config: ModelConfig, where: object) -> ModelConfig:
    """`config` itself if its numbers can be a model's; ModelError naming `where` and the field otherwise."""
    for field, limit in _LIMITS.items():
        if not 1 <= (value := getattr(config, field)) <= limit:
            raise ModelError(f"{where}: {field}: expected 1 to {limit}, got {value}")
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: expected heads to be a multiple of kv_heads, got {config.heads} and {config.kv_heads}")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim: rotary embedding needs an even number, got {config.head_dim}")
    scaling = config.rope_scaling
    positive = {
        "rms_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope factor": scaling.factor,
        "rope low_freq_factor": scaling.low_freq_factor,
        "rope high_freq_factor": scaling.high_freq_factor,
        "rope beta_fast": scaling.beta_fast,
        "rope beta_slow": scaling.beta_slow,
        "rope attention_factor": 1.0 if scaling.attention_factor is None else scaling.attention_factor,
    }
    for name, number in positive.items():
        if not (math.isfinite(number) and number > 0):
            raise ModelError(f"{where}: {name}: expected a finite number above 0, got {number}")
    if not 0 <= scaling.original_context <= _LIMITS["context_length"]:
        raise ModelError(f"{where}: rope original context: expected tokens, got {scaling.original_context}")
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ModelError(
            f"{where}: rope: expected low_freq_factor below high_freq_factor, got {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        )
    if scaling.kind == "longrope":
        for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != config.head_dim // 2 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
                raise ModelError(
                    f"{where}: rope {name}: expected {config.head_dim // 2} finite numbers above 0 (head_dim / 2), got {len(factors)}"
                )
    return config


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model: its name and shape as Hugging Face has them, linear weights as (outputs, inputs)."""
    hidden, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}
    inner = config.intermediate_size
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for part, linears, biased in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
            for name, shape in linears.items():
                shapes[f"{prefix}.{part}.{name}.weight"] = shape
                if biased:
                    shapes[f"{prefix}.{part}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: object) -> None:
    """ModelError unless `found` holds the tensors `expected`, in their shapes, and no other."""
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name} is missing ({len(expected)} expected, {len(found)} found)")
        if tuple(found[name]) != shape:
            raise ModelError(f"{where}: tensor {name}: shape {list(shape)} expected, {list(found[name])} found")
    if unknown := sorted(found.keys() - expected.keys()):
        raise ModelError(f"{where}: not a plain Llama: it has {len(unknown)} unknown tensors, {unknown[0]} among them")


def _rope(raw: Json, context_length: int, head_dim: int, where: object) -> tuple[float, RopeScaling]:
    """Theta and scaling, defaults as transformers' `modeling_rope_utils` derives them."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{where}: rope_parameters: expected an object, got {type(rope).__name__}")
    theta = _number(rope, "rope_theta", where, default=_number(raw, "rope_theta", where, default=10000.0))
    if (rotated := _number(rope, "partial_rotary_factor", where, _number(raw, "partial_rotary_factor", where, 1.0))) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor: expected 1 (whole heads are rotated), got {rotated}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ModelError(f"{where}: rope_type: expected one of {', '.join(_ROPE_KINDS)}, got {kind!r}")
    if kind == "default":
        return theta, RopeScaling()
    if kind in ("linear", "dynamic"):
        return theta, RopeScaling(kind=kind, factor=_number(rope, "factor", where))
    # A field beside the others wins over the one among them, as in transformers.
    original = _integer(
        raw if "original_max_position_embeddings" in raw else rope, "original_max_position_embeddings", where, context_length
    )
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor", where), _number(rope, "high_freq_factor", where)
        factor = _number(rope, "factor", where)
        return theta, RopeScaling(kind=kind, factor=factor, original_context=original, low_freq_factor=low, high_freq_factor=high)
    factor = _number(rope, "factor", where, default=context_length / max(1, original))
    attention = None if rope.get("attention_factor") is None else _number(rope, "attention_factor", where)
    if kind == "longrope":
        short, long = _numbers(rope, "short_factor", where), _numbers(rope, "long_factor", where)
        return theta, RopeScaling(
            kind=kind, factor=factor, original_context=original, attention_factor=attention, short_factor=short, long_factor=long
        )
    if rope.get("truncate", True) is not True:
        raise ModelError(f"{where}: rope truncate: expected true, got {rope['truncate']!r}")
    mscale, mscale_all = _number(rope, "mscale", where, 0.0), _number(rope, "mscale_all_dim", where, 0.0)
    if attention is None and mscale and mscale_all and factor > 1:
        attention = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
    return theta, RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        attention_factor=attention,
        beta_fast=_number(rope, "beta_fast", where, 32.0),
        beta_slow=_number(rope, "beta_slow", where, 1.0),
    )


def _integer(raw: Json, key: str, where: object, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{where}: {key}: expected an integer, got {'nothing' if value is None else repr(value)}")
    return value


def _number(raw: Json, key: str, where: object, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{where}: {key}: expected a number, got {'nothing' if value is None else repr(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _numbers(raw: Json, key: str, where: object) -> tuple[float, ...]:
    values = raw.get(key)
    if not isinstance(values, list):
        raise ModelError(f"{where}: {key}: expected a list of numbers, got {'nothing' if values is None else repr(values)}")
    return tuple(_number({key: value}, key, where) for value in values)


def _flag(raw: Json, key: str, where: object) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{where}: {key}: expected true or false, got {value!r}")
    return bool(value)
