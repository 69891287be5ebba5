"""The kernels in plain torch: the oracle that other kernel sets are tested against, and the engine's default until one is chosen.

Owns the arithmetic of a decoder layer's parts, in whatever float type its inputs have (float32 to serve, float64 to judge). Knows no
model, no scheduler and no weights' origin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.batch import Span


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, hidden] scaled to unit root mean square, times weight [hidden]. (Zhang and Sennrich, 2019)"""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs], weight [outputs, inputs] -> [rows, outputs]."""
    return F.linear(x, weight, bias)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [rows, heads, head_dim] by cos, sin [rows, head_dim / 2]; a pair is (i, i + head_dim / 2). (RoFormer, 2021)"""
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def write_kv(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys, values [rows, kv_heads, head_dim] into a layer's cache [2, blocks, block_size, kv_heads, head_dim] at slots [rows]."""
    flat = cache.flatten(1, 2)
    flat[0].index_copy_(0, slots, keys)
    flat[1].index_copy_(0, slots, values)


def paged_attention(q: torch.Tensor, cache: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Causal attention of q [rows, heads, head_dim] over a layer's paged cache -> [rows, heads, head_dim].

    Grouped queries: heads h * group .. (h + 1) * group - 1 read KV head h. Decode and prefill rows are treated alike.
    (PagedAttention: Kwon et al., 2023; grouped queries: Ainslie et al., 2023)
    """
    heads, head_dim = q.shape[1:]
    kv_heads = cache.shape[3]
    group = heads // kv_heads
    out = torch.empty_like(q)
    for span in spans:
        rows = slice(span.first, span.first + span.rows)
        keys, values = (
            part[torch.from_numpy(span.table)].flatten(0, 1)[: span.context].transpose(0, 1) for part in cache
        )  # [kv_heads, context, head_dim]
        queries = q[rows].view(span.rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * span.rows, head_dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)) * head_dim**-0.5  # [kv_heads, group * rows, context]
        if span.rows > 1:
            future = torch.ones(span.rows, span.context, dtype=torch.bool).triu(span.context - span.rows + 1)
            scores.view(kv_heads, group, span.rows, span.context).masked_fill_(future, float("-inf"))
        mixed = torch.bmm(scores.softmax(-1), values)
        out[rows] = mixed.view(kv_heads, group, span.rows, head_dim).permute(2, 0, 1, 3).reshape(span.rows, heads, head_dim)
    return out


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, all [rows, intermediate]. (SwiGLU: Shazeer, 2020)"""
    return F.silu(gate) * up
