"""A Llama in a GGUF file: its config, tokens and tensors, under Hugging Face's names and in its order of rows.

`gguf_header` has checked the file's own claims before anything here trusts an offset. Dequantising is the `gguf` library's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, TokenType, dequantize, quant_shape_to_byte_shape
from gguf.constants import GGMLQuantizationType

from engine.core import ModelConfig, ModelError, RopeScaling
from engine.weights import blocks
from engine.weights import config as hf_config
from engine.weights.formats import KINDS
from engine.weights.gguf_header import TensorInfo, read_header
from engine.weights.tokens import TokenFacts, checked_id, end_ids

Array = np.ndarray[Any, np.dtype[Any]]
_Kind = TypeVar("_Kind", int, float, str, list[str])

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS, _ROPE_SHORT, _ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
# Floats that are kept as they are, and safetensors' name of each.
_FLOATS = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
# Pre-tokenizer kinds of byte-pair vocabularies for which llama.cpp begins prompts with BOS when the file does not say.
_BPE_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")


class GGUFModel:
    """An opened GGUF. `config` and `tokens` are read and checked at once, tensors one at a time.

    `quantised` names the matrices that are kept as the file's own blocks, and their kind ("Q4_0", "Q4_1", "Q8_0"); `requantise` those
    in another kind of block, which are kept as float32.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError: the file is no GGUF, its header lies, or the model is not a Llama this package can run."""
        self.path = path
        header = read_header(path)
        self._metadata = header.metadata
        self._infos = header.tensors
        self._data: Array = np.memmap(path, mode="r")
        self._check_kind()
        self.config = self._read_config()
        self._names = {self._hf_name(name): info for name, info in self._infos.items() if not _is_rope(name)}
        hf_config.check_tensors(hf_config.tensor_shapes(self.config), {name: info.shape for name, info in self._names.items()}, path)
        matrices = {name: info.kind for name, info in self._names.items() if len(info.shape) == 2}
        self.quantised = {name: kind.name for name, kind in matrices.items() if kind.name in KINDS}
        self.requantise = [name for name, kind in matrices.items() if kind.name not in KINDS and kind not in _FLOATS]
        self.tokens = self._read_tokens()

    def reader(self) -> GGUFReader:
        """The library's own view of the file, for its tokenizer metadata."""
        try:
            return GGUFReader(self.path)
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise ModelError(f"{self.path}: the gguf library cannot read it: {error}") from error

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's Hugging Face name and shape."""
        return {name: info.shape for name, info in self._names.items()}

    def kept(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """safetensors' dtype and shape of what `kept_tensor` gives for every name."""
        made: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, info in self._names.items():
            if name in self.quantised:
                made[name] = "U8", (info.shape[0], info.size // info.shape[0])
            else:
                made[name] = _FLOATS.get(info.kind, "F32"), info.shape
        return made

    def kept_tensor(self, name: str) -> Array:
        """The tensor of a Hugging Face name as a checkpoint keeps it, its rows in Hugging Face's order.

        uint8 [rows, bytes per row] of a quantised matrix, F16 and BF16 as their own bits (uint8 too), everything else float32.

        Raises:
            ModelError: it holds values that are not finite, or is of a kind that cannot be dequantised.
        """
        info = self._names[name]
        if name in self.quantised:
            rows = self._raw(info).reshape(info.shape[0], -1)
            groups = blocks.split(info.kind.name, rows)
            self._check_finite(info, groups.scales, *(() if groups.minima is None else (groups.minima,)))
        elif info.kind in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
            self._dequantised(info)
            rows = self._raw(info).reshape(info.shape[0], -1)
        else:
            return self.tensor(name)
        return self._unpermuted(name, rows)

    def tensor(self, name: str) -> Array:
        """The tensor of a Hugging Face name, dequantised: float32, the rows of queries and keys in Hugging Face's order."""
        return self._unpermuted(name, self._dequantised(self._names[name]))

    def _unpermuted(self, name: str, rows: Array) -> Array:
        heads = self.config.heads if ".q_proj." in name else self.config.kv_heads if ".k_proj." in name else 0
        return _unpermuted(rows, heads) if heads else rows

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Each tensor as `tensor` gives it, one in memory at a time."""
        for name in self._names:
            yield name, self.tensor(name)

    def _dequantised(self, info: TensorInfo) -> Array:
        raw = self._raw(info).reshape(quant_shape_to_byte_shape(info.shape, info.kind))
        try:
            with np.errstate(all="ignore"):  # damaged scales overflow; the values are checked below
                values = dequantize(raw, info.kind).reshape(info.shape)
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {info.name}: {info.kind.name} weights cannot be dequantised") from None
        self._check_finite(info, values)
        return values

    def _raw(self, info: TensorInfo) -> Array:
        return self._data[info.offset : info.offset + info.size]

    def _check_finite(self, info: TensorInfo, *numbers: Array) -> None:
        if not all(np.isfinite(each).all() for each in numbers):
            raise ModelError(f"{self.path}: tensor {info.name}: holds values that are not finite: damaged")

    def _check_kind(self) -> None:
        architecture = self._text("general.architecture")
        if architecture != "llama":
            raise ModelError(
                f"{self.path}: only the Llama architecture is supported: general.architecture 'llama' expected, got {architecture!r}"
            )
        if self._metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"{self.path}: split.count: one whole file expected, got a part of {self._metadata['split.count']}; merge them first"
            )
        if self._metadata.get("llama.expert_count", 0) != 0:
            raise ModelError(
                f"{self.path}: llama.expert_count: mixtures of experts are not supported, got {self._metadata['llama.expert_count']}"
            )

    def _read_config(self) -> ModelConfig:
        tensors = self._infos
        if (embedding := tensors.get("token_embd.weight")) is None or len(embedding.shape) != 2:
            raise ModelError(f"{self.path}: tensor token_embd.weight: expected one of two dimensions")
        heads = self._integer("llama.attention.head_count")
        hidden_size = self._integer("llama.embedding_length")
        head_dim = self._integer("llama.attention.key_length", hidden_size // max(1, heads))
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if (size := self._integer(key, head_dim)) != head_dim:
                raise ModelError(f"{self.path}: {key}: expected the head size, {head_dim}, got {size}")
        context_length = self._integer("llama.context_length")
        vocab_size = self._integer("llama.vocab_size", embedding.shape[0])
        tokens = self._texts("tokenizer.ggml.tokens")
        if not vocab_size == embedding.shape[0] == len(tokens):
            raise ModelError(
                f"{self.path}: vocabulary: expected one size, got llama.vocab_size {vocab_size}, "
                f"{len(tokens)} tokenizer.ggml.tokens and {embedding.shape[0]} rows of token_embd.weight"
            )
        return hf_config.checked(
            ModelConfig(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=self._integer("llama.feed_forward_length"),
                layers=self._integer("llama.block_count"),
                heads=heads,
                kv_heads=self._integer("llama.attention.head_count_kv", heads),
                head_dim=head_dim,
                context_length=context_length,
                rms_eps=self._number("llama.attention.layer_norm_rms_epsilon"),
                rope_theta=self._number("llama.rope.freq_base", 10000.0),
                rope_scaling=self._read_rope(context_length, head_dim),
                tied_head="output.weight" not in tensors,
                attention_bias="blk.0.attn_q.bias" in tensors,
                mlp_bias="blk.0.ffn_gate.bias" in tensors,
            ),
            self.path,
        )

    def _read_rope(self, context_length: int, head_dim: int) -> RopeScaling:
        """GGUF's scaling in Hugging Face's terms.

        `rope_freqs.weight` (Llama 3.1 and later) divides each frequency by a factor of its own at every length: that is a longrope
        whose short and long factors are the same and whose attention factor is 1. yarn's `attn_factor` multiplies what Hugging Face
        derives from `factor`.
        """
        prefix = "llama.rope.scaling"
        kind = self._text(f"{prefix}.type", "none")
        factor = self._number(f"{prefix}.factor", self._number("llama.rope.scale_linear", 1.0))
        if kind == "none" and "llama.rope.scale_linear" in self._metadata:
            kind = "linear"
        original = self._integer(f"{prefix}.original_context_length", context_length)
        attention = self._number(f"{prefix}.attn_factor", self._number(f"{prefix}.yarn_attn_factor", 1.0))
        if not (math.isfinite(factor) and factor >= 0):
            raise ModelError(f"{self.path}: {prefix}.factor: expected a finite number above 0, got {factor}")
        factor = factor or 1.0  # llama.cpp reads 0 as "not scaled"
        if _ROPE_FREQS in self._infos:
            if kind not in ("none", "linear"):
                raise ModelError(f"{self.path}: {_ROPE_FREQS}: frequency factors beside {prefix}.type {kind!r} are not supported")
            scale = factor if kind == "linear" else 1.0
            factors = tuple(scale * each for each in self._factors(_ROPE_FREQS, head_dim))
            return RopeScaling("longrope", original_context=context_length, attention_factor=1.0, short_factor=factors, long_factor=factors)
        if kind == "none":
            return RopeScaling()
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "longrope":
            short, long = self._factors(_ROPE_SHORT, head_dim), self._factors(_ROPE_LONG, head_dim)
            return RopeScaling(kind, factor, original, attention_factor=attention, short_factor=short, long_factor=long)
        if kind == "yarn":
            for key, neutral in ((f"{prefix}.yarn_log_multiplier", 0.0), (f"{prefix}.yarn_ext_factor", 1.0)):
                if (number := self._number(key, neutral)) != neutral:
                    raise ModelError(f"{self.path}: {key}: only {neutral} is supported, got {number}")
            derived = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            return RopeScaling(
                kind,
                factor,
                original,
                beta_fast=self._number(f"{prefix}.yarn_beta_fast", 32.0),
                beta_slow=self._number(f"{prefix}.yarn_beta_slow", 1.0),
                attention_factor=None if attention == 1.0 else attention * derived,
            )
        raise ModelError(f"{self.path}: {prefix}.type: expected none, linear, yarn or longrope, got {kind!r}")

    def _factors(self, name: str, head_dim: int) -> tuple[float, ...]:
        info = self._infos.get(name)
        if info is None or info.shape != (head_dim // 2,) or info.kind != GGMLQuantizationType.F32:
            found = "nothing" if info is None else f"{info.kind.name} of shape {list(info.shape)}"
            raise ModelError(f"{self.path}: tensor {name}: expected F32 of shape [{head_dim // 2}], got {found}")
        return tuple(float(factor) for factor in self._dequantised(info))

    def _read_tokens(self) -> TokenFacts:
        texts, kinds = self._texts("tokenizer.ggml.tokens"), self._metadata.get("tokenizer.ggml.token_type")
        if kinds is not None and (not isinstance(kinds, list) or len(kinds) != len(texts)):
            raise ModelError(f"{self.path}: tokenizer.ggml.token_type: expected one of each of the {len(texts)} tokens")
        control = {text: index for index, (text, kind) in enumerate(zip(texts, kinds or (), strict=False)) if kind == TokenType.CONTROL}
        named = (self._token_id(kind) for kind in ("eos", "eot", "eom"))
        bos_id, eos_id = self._token_id("bos"), self._token_id("eos")
        special = {"bos_token": bos_id, "eos_token": eos_id, "unk_token": self._token_id("unknown"), "pad_token": self._token_id("padding")}
        is_bpe = self._text("tokenizer.ggml.model") == "gpt2"
        usual = not is_bpe or self._text("tokenizer.ggml.pre", "default") in _BPE_WITH_BOS
        add_bos = self._metadata.get("tokenizer.ggml.add_bos_token", usual)
        if not isinstance(add_bos, bool):
            raise ModelError(f"{self.path}: tokenizer.ggml.add_bos_token: expected a bool, got {add_bos!r}")
        return TokenFacts(
            eos_ids=end_ids((index for index in named if index is not None), control),
            bos_id=bos_id,
            add_bos=add_bos and bos_id is not None,
            template=self._text("tokenizer.chat_template", "") or None,
            special_tokens={name: texts[index] for name, index in special.items() if index is not None},
        )

    def _token_id(self, kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        value = self._metadata.get(key)
        return None if value is None else checked_id(value, self.config.vocab_size, key, self.path)

    @staticmethod
    def _hf_name(name: str) -> str:
        """Hugging Face's name of a tensor; one that no Llama has if there is none."""
        stem, _, kind = name.rpartition(".")
        if stem in _TENSORS and kind == "weight":
            return f"{_TENSORS[stem]}.weight"
        block, _, rest = stem.removeprefix("blk.").partition(".")
        if stem.startswith("blk.") and block.isdecimal() and rest in _LAYER_TENSORS and kind in ("weight", "bias"):
            return f"model.layers.{block}.{_LAYER_TENSORS[rest]}.{kind}"
        return f"gguf:{name}"

    def _integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, int, "an integer", default)

    def _number(self, key: str, default: float | None = None) -> float:
        return self._typed(key, float, "a float", default)

    def _text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a string", default)

    def _texts(self, key: str) -> list[str]:
        values = self._typed(key, list, "an array of strings", None)
        if not all(isinstance(value, str) for value in values):
            raise ModelError(f"{self.path}: {key}: expected an array of strings")
        return values

    def _typed(self, key: str, kind: type[_Kind], expected: str, default: _Kind | None) -> _Kind:
        value = self._metadata.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            found = "nothing" if value is None else f"{type(value).__name__} {str(value)[:80]}"
            raise ModelError(f"{self.path}: {key}: expected {expected}, got {found}")
        return value


def _is_rope(name: str) -> bool:
    """A tensor of rotary frequencies: part of the config here, or (`attn_rot_embd`, old files) derived from theta."""
    return name in (_ROPE_FREQS, _ROPE_SHORT, _ROPE_LONG) or name.endswith(".attn_rot_embd.weight")


def _unpermuted(values: Array, heads: int) -> Array:
    """Rows of a query or key projection in Hugging Face's order.

    A GGUF has the two values that one frequency rotates side by side; Hugging Face has the first ones of all pairs, then the second ones.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
