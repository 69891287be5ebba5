"""The engine on the CPU kernels and a tiny model: what a reply is never depends on what else happens to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine import sampler
from engine.core import EngineOptions, FinishReason, Sequence
from engine.engine import Engine
from engine.kernels.batch import Batch
from engine.models.llama_cpu import CpuLlama
from engine.weights import packed
from engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import DEFAULTS
from tests.engine.models.test_llama_cpu import poisoned
from tests.engine.test_engine import ask, greedy, ids_of, run

NewEngine = Callable[..., Engine]

PROMPT = random.Random(5).choices(range(3, 300), k=150)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def oracle(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def reply(engine: Engine, sequence: Sequence) -> list[int]:
    return ids_of(run(engine, {0: [sequence]})[sequence.id])


@pytest.mark.parametrize("options", [{"exact": True}, {"exact": True, "max_step_tokens": 16, "max_total_tokens": 512, "threads": 1}])
def test_exact_greedy_replies_are_those_of_transformers(
    tiny_checkpoint: Checkpoint, new_engine: NewEngine, oracle: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    """Arriving at random, sharing prefixes, some seen before, some preempted: each as if alone and cold."""
    engine = new_engine(tiny_checkpoint, **options)
    chance = random.Random(0)
    shared = chance.choices(range(3, 300), k=60)
    asked = [ask(i, shared[: chance.randrange(61)] + chance.choices(range(3, 300), k=chance.randrange(1, 60))) for i in range(20)]
    arrivals: dict[int, list[Sequence]] = {}
    for sequence in asked:
        arrivals.setdefault(chance.randrange(30), []).append(sequence)
    replies = run(engine, arrivals)
    for sequence in asked:
        assert ids_of(replies[sequence.id]) == greedy(oracle, sequence.prompt, 12)
    assert any(sequence.cached for sequence in asked)


@pytest.fixture(scope="module")
def alone(quantised: Checkpoint, tiny_folder: Path) -> list[int]:
    """What PROMPT is answered with when nothing else was ever asked."""
    engine = Engine(quantised, EngineOptions(model="tiny", cache_dir=tiny_folder.parent / "cache", **DEFAULTS))
    ids = reply(engine, mine())
    engine.runner.decoder.close()  # type: ignore[attr-defined]
    return ids


def listen(engine: Engine, *sequences: Sequence) -> dict[int, np.ndarray]:
    """The logits that each of these was sampled from, float32 [tokens, vocab], by sequence. They come at the same time."""
    decoder: Any = engine.runner.decoder
    choose, heard = decoder.choose, dict[int, list[np.ndarray]]()

    def overhear(batch: Batch, asking: list[Sequence]) -> list[int]:
        for sequence, row in zip(asking, np.array(decoder.forward(batch)), strict=True):
            heard.setdefault(sequence.id, []).append(row)
        chosen: list[int] = choose(batch, asking)
        return chosen

    with mock.patch.object(decoder, "choose", overhear):
        run(engine, {0: list(sequences)})
    return {id: np.stack(rows) for id, rows in heard.items()}


def mine(id: int = 0, max_tokens: int = 40, salt: bytes = b"mine") -> Sequence:
    return ask(id, PROMPT, max_tokens, salt, **SAMPLED)


def others(count: int, seed: int = 0) -> list[Sequence]:
    """Prompts of any length, sampled too."""
    chance = random.Random(seed)
    return [
        ask(100 + i, chance.choices(range(3, 300), k=chance.randrange(1, 200)), chance.randrange(50, 90), temperature=1.0, seed=i)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threads": 1},
        {"threads": 2},
        *({"max_step_tokens": size} for size in (32, 33, 47, 128, 150)),
        {"max_step_tokens": 32, "lone_step_tokens": 128},
        {"block_size": 32},
    ],
)
def test_a_sampled_reply_is_the_same_after_a_restart_with_other_options(
    quantised: Checkpoint, new_engine: NewEngine, alone: list[int], options: dict[str, Any]
) -> None:
    """E12"""
    assert reply(new_engine(quantised, **options), mine()) == alone


@pytest.mark.parametrize("seed", range(3))
def test_a_sampled_reply_is_the_same_among_eight_others(quantised: Checkpoint, new_engine: NewEngine, alone: list[int], seed: int) -> None:
    """E12: they come before it, with it, while it runs, and go."""
    chance = random.Random(seed)
    arrivals: dict[int, list[Sequence]] = {20: [mine()]}
    for sequence in others(16, seed):
        arrivals.setdefault(chance.randrange(40), []).append(sequence)
    engine = new_engine(quantised, max_step_tokens=chance.choice((32, 64, 512)), lone_step_tokens=256)
    replies = run(engine, arrivals)
    assert ids_of(replies[0]) == alone
    assert max(len(step.decodes) for step in engine.steps) == 9


def test_a_sampled_reply_is_the_same_after_preemptions(quantised: Checkpoint, new_engine: NewEngine, alone: list[int]) -> None:
    """E12: run again, in other blocks, from the tokens it had."""
    engine = new_engine(quantised, max_total_tokens=544)
    sequence = mine(9)  # the newest gives way
    replies = run(engine, {0: [ask(i, [3 + i] * 60, 100, temperature=1.0, seed=i) for i in range(1, 5)], 1: [sequence]})
    assert ids_of(replies[9]) == alone
    assert sequence.preemptions


def test_a_sampled_reply_is_the_same_on_every_cache_hit(quantised: Checkpoint, new_engine: NewEngine, alone: list[int]) -> None:
    """E18: after a prompt that shares any number of its tokens."""
    engine = new_engine(quantised)
    hits = set()
    for length in range(1, len(PROMPT)):
        salt = length.to_bytes(4, "little")
        run(engine, {0: [ask(0, [*PROMPT[:length], 299 - PROMPT[length]], 1, salt)]})
        sequence = mine(1, 40 if length % 16 < 2 else 6, salt)
        got = reply(engine, sequence)
        assert got == alone[: len(got)]
        assert sequence.cached == length, "every token whose KV exists"
        hits.add(sequence.cached)
    assert hits == set(range(1, 150))


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"exact": True}, {"block_size": 32}])
def test_a_branch_from_anywhere_has_the_logits_of_a_cold_run(quantised: Checkpoint, new_engine: NewEngine, options: dict[str, Any]) -> None:
    """E18: from each token of a prompt and of its reply, in the middle of a block too. And what was copied stays as it was."""
    engine, cold = new_engine(quantised, **options), new_engine(quantised, **options)
    whole = [*PROMPT, *reply(engine, mine())]
    new = next(token for token in range(3, 300) if token not in whole)
    for cut in range(1, len(whole), 1 if not options else 3):
        prompt = [*whole[:cut], new, 7, 8]
        branch, again = ask(cut, prompt, 2, b"mine"), ask(cut, prompt, 2, b"%d" % cut)
        np.testing.assert_array_equal(listen(engine, branch)[cut], listen(cold, again)[cut])
        assert (branch.cached, again.cached) == (cut, 0)
    turn, again = ask(900, [*whole, 7], 20, b"mine"), ask(900, [*whole, 7], 20, b"cold")
    np.testing.assert_array_equal(listen(engine, turn)[900], listen(cold, again)[900])
    assert turn.cached == len(whole) - 1


def test_branches_of_one_last_block_at_the_same_time_have_every_token_of_it(quantised: Checkpoint, new_engine: NewEngine) -> None:
    """E18: each writes on in a copy of its own."""
    engine, cold = new_engine(quantised), new_engine(quantised)
    whole = [*PROMPT, *reply(engine, mine())]
    branches = [ask(at, [*whole, 20 + at], 30, b"mine", **SAMPLED) for at in range(5)]
    heard = listen(engine, *branches)
    for branch in branches:
        assert branch.cached == len(whole) - 1, "all that was run of it"
        np.testing.assert_array_equal(heard[branch.id], listen(cold, ask(9, branch.prompt, 30, b"%d" % branch.id, **SAMPLED))[9])


def test_the_next_turn_is_as_if_cold(quantised: Checkpoint, new_engine: NewEngine, alone: list[int]) -> None:
    """E11, E18: what was cached of the reply itself is what a cold run computes."""
    engine, cold = new_engine(quantised), new_engine(quantised)
    assert reply(engine, mine()) == alone
    for stop in range(1, len(alone) + 1):
        prompt = [*PROMPT, *alone[:stop], 5]
        turn, again = (ask(1 + stop, prompt, 4, temperature=1.0, seed=1, salt=salt) for salt in (b"mine", b"%d" % stop))
        assert reply(engine, turn) == reply(cold, again)
        assert turn.cached == len(PROMPT) + min(stop, len(alone) - 1), "all but the last token, which was never run"
        assert not again.cached


@pytest.mark.parametrize("exact", [False, True])
def test_a_reply_whose_logits_are_no_numbers_ends_alone(
    quantised: Checkpoint, new_engine: NewEngine, alone: list[int], monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """E13: one error for the one; its mates' tokens are what they would have been, and who comes later is served, in its blocks."""
    poison = next(token for token in range(3, 300) if token not in [*PROMPT, *alone])
    plain = packed.prepare_packed

    def prepare_poisoned(*arguments: Any) -> packed.PackedModel:
        return poisoned(plain(*arguments), poison)

    wanted = reply(new_engine(quantised, exact=exact), mine())
    monkeypatch.setattr(packed, "prepare_packed", prepare_poisoned)
    engine = new_engine(quantised, exact=exact, max_total_tokens=480)
    bad = [ask(1, [9] * 40 + [poison] + [9] * 40, 20), ask(2, [8] * 20 + [poison], 20)]
    replies = run(engine, {0: [mine(), bad[0]], 12: [bad[1]], 60: [mine(3, salt=b"later")]})
    for sequence in bad:
        (last,) = replies[sequence.id]
        assert last.finish is FinishReason.ERROR
        assert "numbers" in (last.error or "")
    assert ids_of(replies[0]) == ids_of(replies[3]) == wanted
    assert exact or wanted == alone
    assert engine.scheduler.pool.owned == 0


@pytest.mark.parametrize("at", [0, 3, -1])
def test_kv_that_is_no_number_fails_who_runs_on_it_and_not_the_next(
    quantised: Checkpoint, new_engine: NewEngine, alone: list[int], at: int
) -> None:
    """E13: whatever spoilt it, a conversation's blocks are not kept once they gave no numbers; another's are."""
    engine, cold = new_engine(quantised), new_engine(quantised)
    theirs = ask(1, PROMPT, 40, b"theirs", **SAMPLED)
    assert reply(engine, mine()) == reply(engine, theirs) == alone
    found = engine.scheduler.pool.cache.match(b"mine", [*PROMPT, *alone])
    spoilt = [*found.chain, found.part][at]
    assert spoilt
    engine.runner.decoder.load_block(spoilt.block, np.full(engine.runner.decoder.block_bytes, 0xFF, np.uint8))
    turn = [*PROMPT, *alone, 5]
    replies = run(engine, {0: [ask(id, [*turn, id], 4, b"mine", **SAMPLED) for id in (5, 6)]})  # at the same time
    assert [delta.finish for id in (5, 6) for delta in replies[id]] == [FinishReason.ERROR] * 2
    assert engine.scheduler.pool.owned == 0
    wanted = reply(cold, ask(3, turn, 4, **SAMPLED))
    healed, other = ask(3, turn, 4, b"mine", **SAMPLED), ask(3, turn, 4, b"theirs", **SAMPLED)
    assert reply(engine, healed) == reply(engine, other) == wanted
    assert (healed.cached, other.cached) == (0, len(turn) - 2)


def test_decoding_into_a_token_that_is_no_number(quantised: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """E13: what was said before it stays, and is the reply."""
    poison, plain = 77, packed.prepare_packed
    monkeypatch.setattr(packed, "prepare_packed", lambda *arguments: poisoned(plain(*arguments), poison))
    engine = new_engine(quantised)
    deltas = run(engine, {0: [ask(0, [5, 6, 7], 20, logit_bias={poison: 1000.0})]})[0]
    assert [delta.finish for delta in deltas] == [None, FinishReason.ERROR]
    assert ids_of(deltas) == list(deltas[-1].reply) == [poison]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.2, "repetition_penalty": 0.8, "presence_penalty": -0.4, "frequency_penalty": 0.2, "top_p": 0.95},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 250: -100.0, 17: 2.5}},
    {"temperature": 0.00001, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
]


def asked_in_every_way(tokens: int) -> list[Sequence]:
    chance = random.Random(2)
    return [
        ask(i, chance.choices(range(3, 300), k=chance.randrange(1, 40)), tokens, seed=chance.getrandbits(64), logit_bias=biases, **others_)
        for i, sampling in enumerate(SAMPLINGS)
        for others_ in [{name: value for name, value in sampling.items() if name != "logit_bias"}]
        for biases in [sampling.get("logit_bias", {})]
    ]


class Judged:
    """A decoder whose every choice is also put to the reference sampler, with the same logits."""

    def __init__(self, decoder: CpuLlama) -> None:
        self._decoder = decoder
        self.copy_block = decoder.copy_block
        self.chosen: list[int] = []
        self.wanted: list[int] = []

    def choose(self, batch: Batch, sequences: list[Sequence]) -> list[int]:
        logits = np.array(self._decoder.forward(batch))
        self.wanted += sampler.sample(torch.from_numpy(logits), sequences)
        chosen = self._decoder.choose(batch, sequences)
        self.chosen += chosen
        return chosen


def test_every_choice_is_the_reference_samplers(quantised: Checkpoint, new_engine: NewEngine) -> None:
    engine = new_engine(quantised, max_batch_size=8, max_step_tokens=40)
    decoder = engine.runner.decoder
    assert isinstance(decoder, CpuLlama)
    engine.runner.decoder = judged = Judged(decoder)
    try:
        run(engine, {i: [sequence] for i, sequence in enumerate(asked_in_every_way(40))})
    finally:
        engine.runner.decoder = decoder
    assert len(judged.chosen) == 40 * len(SAMPLINGS)
    assert judged.chosen == judged.wanted
    assert len(set(judged.chosen)) > 100, "not all the same"


def test_exact_sampled_replies_are_those_of_the_reference_engine(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    """Logits, sampler and all; no two tokens come as close as their rounding."""
    engines = new_engine(tiny_checkpoint, exact=True), new_engine(tiny_checkpoint, kernels="reference")
    one, other = (run(engine, {0: asked_in_every_way(40)}) for engine in engines)
    assert {id: ids_of(deltas) for id, deltas in one.items()} == {id: ids_of(deltas) for id, deltas in other.items()}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weights", ["auto", "int8", "float32", "bfloat16"])
def test_every_combination_of_options_serves(quantised: Checkpoint, new_engine: NewEngine, weights: str, kv_dtype: str) -> None:
    """Nearly the same model each time: a greedy reply begins as that of the float32 one."""
    wanted = reply(new_engine(quantised, weights="float32", exact=True), ask(0, PROMPT, 1))
    assert reply(new_engine(quantised, weights=weights, kv_dtype=kv_dtype), ask(0, PROMPT, 1)) == wanted


def test_options_reach_the_kernels(quantised: Checkpoint, new_engine: NewEngine) -> None:
    """Exact activations keep float32 KV unless another kind is asked for; the pool holds what it was asked to."""
    sizes = {}
    for name, options in {
        "default": {},
        "exact": {"exact": True},
        "exact, bfloat16": {"exact": True, "kv_dtype": "bfloat16"},
        "int8": {"kv_dtype": "int8"},
    }.items():
        decoder = new_engine(quantised, **options).runner.decoder
        assert isinstance(decoder, CpuLlama)
        sizes[name] = decoder.kv_bytes
    config = quantised.config
    values = 2 * config.layers * config.kv_heads * config.head_dim * DEFAULTS["max_total_tokens"]
    scales = values // config.head_dim
    assert sizes == {"default": 2 * values, "exact": 4 * values, "exact, bfloat16": 2 * values, "int8": values + 4 * scales}
