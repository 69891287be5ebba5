"""The oracle against plain definitions, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import reference
from engine.kernels.batch import Span


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm() -> None:
    x, weight = random(5, 8), random(8, seed=1)
    for row, got in zip(x, reference.rms_norm(x, weight, 1e-5), strict=True):
        rms = math.sqrt(sum(float(v) ** 2 for v in row) / 8 + 1e-5)
        assert torch.allclose(got, row / rms * weight)


def test_rope_turns_pairs() -> None:
    x, angles = random(3, 2, 8), random(3, 4, seed=1)
    turned = reference.rope(x, angles.cos(), angles.sin())
    for row in range(3):
        for head in range(2):
            for pair in range(4):
                before = complex(x[row, head, pair], x[row, head, pair + 4])
                after = before * complex(math.cos(angles[row, pair]), math.sin(angles[row, pair]))
                assert turned[row, head, pair].item() == pytest.approx(after.real)
                assert turned[row, head, pair + 4].item() == pytest.approx(after.imag)


def test_silu_mul() -> None:
    gate, up = random(2, 6), random(2, 6, seed=1)
    assert torch.allclose(reference.silu_mul(gate, up), gate / (1 + (-gate).exp()) * up)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), group=st.sampled_from([1, 2, 3, 4]), kv_heads=st.integers(1, 3), block_size=st.sampled_from([1, 2, 4, 16]))
def test_paged_attention_is_causal_attention_over_the_right_blocks(data: st.DataObject, group: int, kv_heads: int, block_size: int) -> None:
    """Several sequences in one step, their blocks scattered, decodes and chunks with and without a prefix; unread slots hold NaN (E13)."""
    head_dim, heads = 4, group * kv_heads
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=4))
    blocks = [math.ceil((prefix + rows) / block_size) for prefix, rows in lengths]
    order = data.draw(st.permutations(range(sum(blocks) + 1)))
    cache = torch.full((2, len(order), block_size, kv_heads, head_dim), float("nan"), dtype=torch.float64)
    queries, spans, wanted, first = [], [], [], 0
    for index, (prefix, rows) in enumerate(lengths):
        context = prefix + rows
        table, order = np.array(order[: blocks[index]]), order[blocks[index] :]
        q, k, v = (
            random(rows, heads, head_dim, seed=index),
            random(context, kv_heads, head_dim, seed=50 + index),
            random(context, kv_heads, head_dim, seed=90 + index),
        )
        slots = torch.tensor([int(table[at // block_size]) * block_size + at % block_size for at in range(context)])
        reference.write_kv(cache, k, v, slots)
        spans.append(Span(first, rows, context, table))
        queries.append(q)
        wanted.append(naive_attention(q, k, v, prefix))
        first += rows
    got = reference.paged_attention(torch.cat(queries), cache, spans)
    assert torch.allclose(got, torch.cat(wanted))


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int) -> torch.Tensor:
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        seen = prefix + row + 1
        for head in range(q.shape[1]):
            weights = (k[:seen, head // group] @ q[row, head] / math.sqrt(q.shape[2])).softmax(0)
            out[row, head] = weights @ v[:seen, head // group]
    return out


def test_attention_survives_scores_far_below_any_stand_in_for_minus_infinity() -> None:
    """E13: true scores below -5e4."""
    q = torch.full((2, 1, 4), 1e3)
    k = torch.full((2, 1, 4), -1e3)
    cache = torch.zeros(2, 1, 4, 1, 4)
    reference.write_kv(cache, k, torch.tensor([[[1.0] * 4], [[3.0] * 4]]), torch.tensor([0, 1]))
    got = reference.paged_attention(q, cache, [Span(0, 2, 2, np.array([0]))])
    assert got.tolist() == [[[1.0] * 4], [[2.0] * 4]]
