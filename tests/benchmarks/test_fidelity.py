"""The reference, and what is said of others against it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from benchmarks.fidelity import Fidelity, Reference, agreement, compare, kernel_logits, measure, total
from engine.core import EngineOptions
from engine.weights.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Checkpoint) -> Reference:
    return Reference(tiny_checkpoint)


def test_a_known_pair_of_distributions_gives_its_known_figures() -> None:
    p, q = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.8, 0.2]])
    found = compare(p + 3.0, q - 7.0, [1, 0])  # a constant added to logits changes nothing
    kl = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75) + 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.5)) / 2
    assert found.kl == pytest.approx(kl)
    assert found.argmax == 0.5, "the first row's likeliest token is 0 (of two alike), the other's 1"
    assert found.perplexity_ratio == pytest.approx(2.0), "only position 0 has a next token: 0, of half its probability"


@given(st.integers(1, 150), st.integers(2, 9), st.integers(0, 1000))
def test_nothing_is_nearer_than_itself(positions: int, vocab: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    a, b = (chance.normal(size=(positions, vocab)).astype(np.float32) for _ in range(2))
    ids = [int(id) for id in chance.integers(0, vocab, positions)]
    same, other = compare(a, a, ids), compare(a, b, ids)
    assert same == Fidelity(0.0, 1.0, 1.0, positions)
    assert other.kl > 0
    assert 0 <= other.argmax <= 1


def test_shapes_and_numbers_are_checked() -> None:
    rows = np.zeros((3, 4), np.float32)
    for other, ids in ((np.zeros((3, 5), np.float32), [0] * 3), (rows, [0] * 2)):
        with pytest.raises(ValueError, match="expected logits of"):
            compare(rows, other, ids)
    with pytest.raises(ValueError, match="that are numbers"):
        compare(rows, np.full_like(rows, np.nan), [0] * 3)


def test_texts_count_by_their_length() -> None:
    whole = total([Fidelity(0.1, 1.0, 1.0, 10), Fidelity(0.4, 0.5, 2.0, 30)])
    assert (whole.kl, whole.argmax, whole.positions) == (pytest.approx(0.325), pytest.approx(0.625), 40)
    assert whole.perplexity_ratio == pytest.approx(2**0.75)
    assert "perplexity +68.18%" in str(whole)


def test_replies_agree_up_to_their_first_other_token() -> None:
    expected = [["The", " sea", "", " is", " wide"], ["Yes", "."]]
    found = agreement(expected, ["The sea is blue", "Yes. And more"])
    assert (found.prefix, found.length, found.equal, found.replies) == (3.0, 3.5, 1, 2)


def test_the_reference_is_transformers(reference: Reference, tiny_folder: Path) -> None:
    oracle = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    ids = [3 + 7 * at % 290 for at in range(70)]
    with torch.inference_mode():
        wanted = oracle(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(reference.logits(ids), wanted, atol=1e-4)


def test_sampled_replies_are_the_seed_s_and_follow_their_prompts(reference: Reference) -> None:
    questions = ["one", "a longer question than the other"]
    first, again, other = (reference.sampled(questions, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    for question, ids in zip(questions, first, strict=True):
        prompt = reference.prompt(question)
        assert ids[: len(prompt)] == prompt
        assert len(prompt) < len(ids) <= len(prompt) + 20


def test_greedy_replies_are_the_likeliest_tokens(reference: Reference) -> None:
    (pieces,) = reference.greedy(["one"], 8)
    ids = reference.prompt("one")
    text = ""
    for _ in pieces:
        ids.append(int(reference.logits(ids)[-1].argmax()))
        text = reference.tokenizer.decode(ids[len(reference.prompt("one")) :])
    assert text.startswith("".join(pieces))


def test_kernels_are_asked_for_every_position_in_steps(reference: Reference, tiny_checkpoint: Checkpoint) -> None:
    options = EngineOptions(model="tiny", cache_dir=Path(), kernels="reference", max_step_tokens=16)
    logits = kernel_logits(tiny_checkpoint, options)
    ids = [3 + 5 * at % 290 for at in range(50)]
    found = measure(reference.logits, logits, [ids, ids[:7]])
    assert found.positions == 57
    assert found.kl == pytest.approx(0.0, abs=1e-9)
    assert found.argmax == 1.0
