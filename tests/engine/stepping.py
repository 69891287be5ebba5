"""Steps for a decoder, made by hand: which tokens of which sequences run, in which blocks; and the reference to hold their logits against.

Knows no scheduler: the tests that use this say what a step is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch

from engine.core import ModelConfig
from engine.kernels import reference
from engine.kernels.batch import Batch, Span
from engine.models.llama import Llama
from engine.weights.packed import PackedModel

Array = np.ndarray[Any, np.dtype[Any]]

SIZE = 16  # tokens of a block


class Forward(Protocol):
    def forward(self, batch: Batch) -> Array: ...


@dataclass(slots=True)
class Run:
    """One sequence's share of a step: tokens at positions from `start` on, their KV in the blocks of `table`."""

    tokens: list[int]
    start: int
    table: Array


def batch(runs: Iterable[Run], every: bool = True) -> Batch:
    """One step. every: the logits of every row are wanted, else of each sequence's last."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    slots: list[int] = []
    samples: list[int] = []
    for run in runs:
        first, stop = len(tokens), run.start + len(run.tokens)
        tokens += run.tokens
        positions += range(run.start, stop)
        slots += [int(run.table[at // SIZE]) * SIZE + at % SIZE for at in range(run.start, stop)]
        spans.append(Span(first, len(run.tokens), stop, np.array(run.table[: -(-stop // SIZE)], np.int64)))
        samples += range(first if every else len(tokens) - 1, len(tokens))
    numbers = (np.array(each, np.int64) for each in (tokens, positions, slots))
    return Batch(*numbers, spans, np.array(samples, np.int64))


def logits(decoder: Forward, ids: list[int], table: Array, cuts: Iterable[int] = ()) -> Array:
    """float32 [len(ids), vocab] of one sequence alone, run in steps that end at `cuts`."""
    edges = [0, *sorted(cuts), len(ids)]
    return np.concatenate(
        [decoder.forward(batch([Run(ids[start:stop], start, table)])).copy() for start, stop in pairwise(edges) if start < stop]
    )


class Reference:
    """Plain torch in float32, on the numbers that packed weights mean, with keys and values rounded as a KV type has them."""

    def __init__(self, packed: PackedModel, blocks: int, kv_dtype: str = "float32") -> None:
        self._model = Llama(packed.config, weights(packed))
        self._cache = self._model.new_cache(blocks, SIZE)
        self._rounded = _ROUNDED[kv_dtype]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Array:
        plain = reference.write_kv

        def write(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
            plain(cache, self._rounded(keys), self._rounded(values), slots)

        with mock.patch.object(reference, "write_kv", write):
            return self._model.forward(batch, self._cache).numpy()


def weights(packed: PackedModel) -> Mapping[str, torch.Tensor]:
    """Every tensor by its Hugging Face name, float32: products taken apart again."""
    config = packed.config
    found: dict[str, Array] = {"model.norm.weight": packed.norm, "model.embed_tokens.weight": packed.embedding.dequantised()}
    if not config.tied_head:
        found["lm_head.weight"] = packed.head.dequantised()
    for index, layer in enumerate(packed.layers):
        prefix = f"model.layers.{index}."
        found[f"{prefix}input_layernorm.weight"], found[f"{prefix}post_attention_layernorm.weight"] = layer.input_norm, layer.mlp_norm
        for kind, qkv, out, gate_up, down in (
            ("weight", layer.qkv.dequantised(), layer.out.dequantised(), layer.gate_up.dequantised(), layer.down.dequantised()),
            ("bias", layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias),
        ):
            if qkv is not None and out is not None:
                for name, part in zip("qkv", _split(qkv, config), strict=True):
                    found[f"{prefix}self_attn.{name}_proj.{kind}"] = part
                found[f"{prefix}self_attn.o_proj.{kind}"] = _cut(out, config.hidden_size, config.heads * config.head_dim)
            if gate_up is not None and down is not None:
                pairs = gate_up.reshape(-1, 2, 32, *gate_up.shape[1:])
                for at, name in enumerate(("gate", "up")):
                    rows = pairs[:, at].reshape(-1, *gate_up.shape[1:])
                    found[f"{prefix}mlp.{name}_proj.{kind}"] = _cut(rows, config.intermediate_size, config.hidden_size)
                found[f"{prefix}mlp.down_proj.{kind}"] = _cut(down, config.hidden_size, config.intermediate_size)
    return {name: torch.from_numpy(np.array(values)) for name, values in found.items()}


def _split(rows: Array, config: ModelConfig) -> list[Array]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return np.split(rows[: queries + 2 * keys], [queries, queries + keys])


def _cut(values: Array, rows: int, columns: int) -> Array:
    """Without padding."""
    return values[:rows, :columns] if values.ndim == 2 else values[:rows]


def _to_int8(x: torch.Tensor) -> torch.Tensor:
    """One scale for each position and head."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round(), 0.0) * scale


_ROUNDED = {"float32": lambda x: x, "bfloat16": lambda x: x.bfloat16().float(), "int8": _to_int8}
