"""The Llama-architecture decoder in plain torch: the oracle that the other decoders are tested against.

Owns the order of a forward pass and where its weights are. Knows no scheduler and no file format.
(Llama: Touvron et al., 2023)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine import memory, sampler
from engine.core import ModelConfig, Sequence
from engine.kernels import reference as kernels
from engine.kernels.batch import Batch
from engine.models import rope
from engine.weights.checkpoint import Checkpoint


@dataclass(slots=True, frozen=True)
class Projection:
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)


@dataclass(slots=True, frozen=True)
class Layer:
    input_norm: torch.Tensor  # [hidden]
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    mlp_norm: torch.Tensor  # [hidden]
    gate: Projection
    up: Projection
    down: Projection


class Llama:
    """`weights` have Hugging Face names and layout (`model.layers.0.self_attn.q_proj.weight`, ...)."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self._weights = weights
        self.dtype = dtype
        self.embedding = self._tensor("model.embed_tokens.weight")  # [vocab, hidden]
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(config.layers)]
        self.norm = self._tensor("model.norm.weight")
        self.head = self.embedding if config.tied_head else self._tensor("lm_head.weight")
        self.cos, self.sin = (torch.from_numpy(table).to(dtype) for table in rope.tables(config, config.context_length))

    def new_cache(self, blocks: int, block_size: int) -> torch.Tensor:
        """[layers, 2 (keys, values), blocks, block_size, kv_heads, head_dim]; memory is taken as blocks are first written.

        Raises: EngineError when there is not as much
        """
        config = self.config
        token_bytes = config.layers * 2 * config.kv_heads * config.head_dim * self.dtype.itemsize
        memory.check_pool(blocks * block_size, blocks * block_size * token_bytes)
        return torch.zeros(config.layers, 2, blocks, block_size, config.kv_heads, config.head_dim, dtype=self.dtype)

    def forward(self, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Run a step's rows, writing their K and V into `cache`; logits [len(batch.sample_rows), vocab]."""
        config = self.config
        positions, slots = torch.from_numpy(batch.positions), torch.from_numpy(batch.slots)
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embedding[torch.from_numpy(batch.tokens)]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = kernels.rms_norm(x, layer.input_norm, config.rms_eps)
            q = kernels.rope(layer.q(h).view(-1, config.heads, config.head_dim), cos, sin)
            k = kernels.rope(layer.k(h).view(-1, config.kv_heads, config.head_dim), cos, sin)
            v = layer.v(h).view(-1, config.kv_heads, config.head_dim)
            kernels.write_kv(layer_cache, k, v, slots)
            x = x + layer.out(kernels.paged_attention(q, layer_cache, batch.spans).flatten(1))
            h = kernels.rms_norm(x, layer.mlp_norm, config.rms_eps)
            x = x + layer.down(kernels.silu_mul(layer.gate(h), layer.up(h)))
        return kernels.linear(kernels.rms_norm(x[torch.from_numpy(batch.sample_rows)], self.norm, config.rms_eps), self.head)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._weights[name].to(self.dtype)

    def _layer(self, prefix: str) -> Layer:
        def projection(name: str, biased: bool) -> Projection:
            return Projection(self._tensor(f"{prefix}{name}.weight"), self._tensor(f"{prefix}{name}.bias") if biased else None)

        attention, mlp = self.config.attention_bias, self.config.mlp_bias
        return Layer(
            input_norm=self._tensor(f"{prefix}input_layernorm.weight"),
            q=projection("self_attn.q_proj", attention),
            k=projection("self_attn.k_proj", attention),
            v=projection("self_attn.v_proj", attention),
            out=projection("self_attn.o_proj", attention),
            mlp_norm=self._tensor(f"{prefix}post_attention_layernorm.weight"),
            gate=projection("mlp.gate_proj", mlp),
            up=projection("mlp.up_proj", mlp),
            down=projection("mlp.down_proj", mlp),
        )


class ReferenceDecoder:
    """The same with its KV cache, as the engine drives it."""

    def __init__(self, checkpoint: Checkpoint, blocks: int, block_size: int, threads: int = 0) -> None:
        """`threads`: 0 for one per core. Raises: ModelError"""
        torch.set_num_threads(threads or torch.get_num_threads())
        self.model = Llama(checkpoint.config, checkpoint.tensors())
        self.cache = self.model.new_cache(blocks, block_size)
        self.identity = f"reference torch {torch.__version__}"
        self.block_bytes = self.cache[:, :, 0].nbytes
        self._logits = torch.empty(0, checkpoint.config.vocab_size)  # of the last step

    def copy_block(self, source: int, target: int) -> None:
        self.cache[:, :, target] = self.cache[:, :, source]

    def touch_block(self, block: int) -> None:
        self.cache[:, :, block] = self.cache[:, :, block].clone()

    def save_block(self, block: int, into: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        into[:] = self.cache[:, :, block].contiguous().view(-1).numpy().view(np.uint8)

    def load_block(self, block: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.cache[:, :, block] = torch.from_numpy(data.copy()).view(self.cache.dtype).view_as(self.cache[:, :, block])

    def choose(self, batch: Batch, sequences: list[Sequence]) -> list[int]:
        """Run a step's rows and choose a token for each sampled one; -1 where the logits hold a NaN."""
        self.forward(batch)
        return self.pick(sequences)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Run a step's rows; the logits of the sampled ones, which may be changed."""
        self._logits = self.model.forward(batch, self.cache)
        return self._logits.numpy()

    @torch.inference_mode()
    def pick(self, sequences: list[Sequence]) -> list[int]:
        """Choose from the first rows of these logits."""
        return sampler.sample(self._logits[: len(sequences)], sequences)
