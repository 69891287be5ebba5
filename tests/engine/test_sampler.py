from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import sampler
from engine.core import Sequence
from tests.engine.fakes import sequence


def choose(logits: list[float], asked: Sequence) -> int:
    return sampler.sample(torch.tensor([logits]), [asked])[0]


def kept(logits: list[float], **sampling: object) -> set[int]:
    """Every token that a thousand draws give."""
    row = torch.tensor(logits).expand(1000, -1)
    return set(sampler.sample(row, [sequence(0, [0], seed=seed, **sampling) for seed in range(1000)]))


def test_greedy_takes_the_largest() -> None:
    assert choose([1.0, 3.0, 2.0], sequence(0, [0], temperature=0)) == 1


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    draws = Counter(sampler.sample(logits.expand(4000, -1), [sequence(0, [0], seed=seed, temperature=0.7) for seed in range(4000)]))
    wanted = (logits / 0.7).softmax(0)
    for token in range(4):
        assert draws[token] / 4000 == pytest.approx(float(wanted[token]), abs=0.03)
    assert draws[3] == 0


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1, 2}),
        ({"temperature": 1e-6}, {0}),
        ({"temperature": 1e-320}, {0}),
        ({"logit_bias": {3: 100.0}}, {3}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3}),
    ],
)
def test_filters(sampling: dict[str, object], tokens: set[int]) -> None:
    assert kept([math.log(p) for p in (0.45, 0.3, 0.15, 0.1)], **sampling) == tokens


def test_penalties() -> None:
    asked = sequence(0, [0], temperature=0, presence_penalty=1.5)
    asked.output = [1, 1]
    assert choose([0.0, 3.0, 1.6], asked) == 2
    asked = sequence(0, [0], temperature=0, frequency_penalty=1.0)
    asked.output = [1, 1]
    assert choose([0.0, 3.0, 1.5], asked) == 2
    asked = sequence(0, [1], temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert choose([0.0, 3.0, 1.5], asked) == 1, "these two leave the prompt alone"
    asked = sequence(0, [1], temperature=0, repetition_penalty=2.5)
    assert choose([0.0, 3.0, 1.5], asked) == 2, "this one does not"
    asked = sequence(0, [1], temperature=0, repetition_penalty=2.0)
    assert choose([-1.5, -1.0], asked) == 0, "negative logits go down, not up"


@given(
    seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**40), tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=20)
)
def test_noise_is_a_pure_function_of_seed_position_and_token(seed: int, position: int, tokens: list[int]) -> None:
    """E12: whatever else is asked for with it."""
    together = sampler.noise(seed, position, torch.tensor(tokens))
    alone = torch.cat([sampler.noise(seed, position, torch.tensor([token])) for token in tokens])
    assert torch.equal(together, alone)
    assert torch.isfinite(together).all()


def test_noise_is_standard_gumbel_and_its_streams_are_apart() -> None:
    draws = torch.stack([sampler.noise(seed, position, torch.arange(500)) for seed in range(10) for position in range(10)])
    assert float(draws.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(draws.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    correlations = torch.corrcoef(draws)
    assert float((correlations - torch.eye(100)).abs().max()) < 0.25
    assert float(torch.corrcoef(draws.T).fill_diagonal_(0).abs().mean()) < 0.12


def test_each_position_draws_anew() -> None:
    flat = torch.zeros(1, 1000)
    drawn = set()
    for length in range(20):
        asked = sequence(0, [0] * (length + 1), seed=3)
        drawn.add(sampler.sample(flat, [asked])[0])
        asked.prompt, asked.output = [0], [0] * length
        drawn.add(sampler.sample(flat, [asked])[0])
    assert len(drawn) > 15, "another position, another draw"
    assert len(drawn) <= 20, "the position counts, however it is split into prompt and reply"


def test_a_row_is_chosen_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    asked = [sequence(i, [1, 2], seed=i, top_k=10 * (i % 2), top_p=0.9, repetition_penalty=1.1) for i in range(6)]
    assert sampler.sample(logits, asked) == [sampler.sample(logits[i : i + 1], asked[i : i + 1])[0] for i in range(6)]
