"""The engine on a tiny real model, against transformers on the same weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core import Delta, EngineOptions, FinishReason, SamplingParams, Sequence, StepPlan, StepResult
from engine.engine import Engine
from engine.weights.checkpoint import Checkpoint

Replies = dict[int, list[Delta]]


@pytest.fixture
def engine(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Engine:
    return new_engine(tiny_checkpoint)


def new_engine(checkpoint: Checkpoint, **options: int) -> Engine:
    defaults = {"max_batch_size": 8, "max_step_tokens": 16, "max_total_tokens": 512, "block_size": 4}
    return Engine(checkpoint, EngineOptions(model="tiny", cache_dir=Path(), kernels="reference", **(defaults | options)))


@pytest.fixture(scope="session")
def oracle(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def greedy(oracle: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        ids = oracle.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return [int(id) for id in ids[0, len(prompt) :]]


def ask(id: int, prompt: list[int], max_tokens: int = 12, salt: bytes = b"a", **sampling: object) -> Sequence:
    defaults: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "logit_bias": {2: -100.0}}  # as min_new_tokens does to EOS
    return Sequence(id, salt, prompt, SamplingParams(max_tokens=max_tokens, **(defaults | sampling)))  # type: ignore[arg-type]


def run(engine: Engine, arrivals: dict[int, list[Sequence]], aborts: dict[int, list[Sequence]] | None = None) -> Replies:
    """Step until idle, with arrivals and aborts before the steps they name."""
    replies: Replies = {}
    for step in range(500):
        for id, delta in engine.step(arrivals.get(step, []), (aborts or {}).get(step, [])):
            replies.setdefault(id, []).append(delta)
        engine.scheduler.pool.check([s.table for s in engine.scheduler.running])
        if engine.idle and step >= max(arrivals):
            return replies
    raise AssertionError("the engine does not come to an end")


def ids_of(deltas: list[Delta]) -> list[int]:
    return [id for delta in deltas for id in delta.ids]


def test_greedy_replies_are_those_of_transformers_however_they_are_scheduled(engine: Engine, oracle: LlamaForCausalLM) -> None:
    """Prompts longer than a step, arriving at random, sharing prefixes, some seen before: each as if alone and cold (E12, E18)."""
    chance = random.Random(0)
    shared = [chance.randrange(3, 300) for _ in range(40)]
    asked = [
        ask(i, shared[: chance.randrange(0, 40)] + [chance.randrange(3, 300) for _ in range(chance.randrange(1, 30))]) for i in range(20)
    ]
    arrivals: dict[int, list[Sequence]] = {}
    for sequence in asked:
        arrivals.setdefault(chance.randrange(30), []).append(sequence)
    replies = run(engine, arrivals)
    for sequence in asked:
        ids = ids_of(replies[sequence.id])
        assert ids == greedy(oracle, sequence.prompt, 12)
        assert "".join(delta.text for delta in replies[sequence.id]) == engine.tokenizer.decode(ids), "no tail is lost (E7)"
        assert replies[sequence.id][-1].finish is FinishReason.LENGTH
    assert any(sequence.cached for sequence in asked)


def test_every_hit_length_gives_the_cold_reply(engine: Engine, oracle: LlamaForCausalLM) -> None:
    """E18: cached against cold at every length, not only at block edges."""
    whole = [3 + i for i in range(40)]
    run(engine, {0: [ask(0, whole, 1)]})
    for length in range(1, 40):
        sequence = ask(length, [*whole[:length], 299], 4)
        assert ids_of(run(engine, {0: [sequence]})[length]) == greedy(oracle, sequence.prompt, 4)
        assert sequence.cached == length // 4 * 4


def test_preempted_replies_are_what_they_would_have_been(tiny_checkpoint: Checkpoint, oracle: LlamaForCausalLM) -> None:
    """E12, sampled too: a pool too small for all."""
    small, large = (new_engine(tiny_checkpoint, max_total_tokens=tokens) for tokens in (80, 2000))
    for sampling in ({}, {"temperature": 1.0, "seed": 7}):
        asked = [[ask(i, [3 + i] * 9, 30, **sampling) for i in range(4)] for _ in range(2)]
        got, wanted = run(small, {0: asked[0]}), run(large, {0: asked[1]})
        assert sum(sequence.preemptions for sequence in asked[0])
        assert {id: ids_of(deltas) for id, deltas in got.items()} == {id: ids_of(deltas) for id, deltas in wanted.items()}


def test_the_next_turn_hits_the_reply(engine: Engine) -> None:
    first = ask(0, [5, 6, 7, 8, 9], 15)
    (deltas,) = run(engine, {0: [first]}).values()
    assert deltas[-1].reply == tuple(ids_of(deltas))
    second = ask(1, first.prompt + list(deltas[-1].reply) + [10, 11], 2)
    (deltas,) = run(engine, {0: [second]}).values()
    assert deltas[-1].cached == 16  # of 5 + 15 tokens, the last of which was never run (E11), the full blocks of 4


@pytest.mark.parametrize("step", range(12))
def test_a_cancelled_reply_ends_once_and_the_rest_go_on(engine: Engine, oracle: LlamaForCausalLM, step: int) -> None:
    """C7, E8: at every step, before, in and after its prefill."""
    doomed, other = ask(0, [4] * 50, 6), ask(1, [5] * 7, 20)
    replies = run(engine, {0: [doomed, other]}, {step: [doomed]})
    assert [delta.finish for delta in replies[0]].count(FinishReason.CANCELLED) <= 1
    assert replies[0][-1].finish
    assert ids_of(replies[1]) == greedy(oracle, other.prompt, 20)
    assert engine.scheduler.pool.owned == 0


def test_a_failing_step_ends_its_sequences_and_no_others(engine: Engine, monkeypatch: pytest.MonkeyPatch, oracle: LlamaForCausalLM) -> None:
    """C11: exactly one terminal delta each; who comes later is served."""
    real, calls = engine.runner.run, iter(range(100))

    def fails_once(plan: StepPlan) -> StepResult:
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return real(plan)

    monkeypatch.setattr(engine.runner, "run", fails_once)
    late = ask(2, [9, 9, 9])
    replies = run(engine, {0: [ask(0, [4, 5]), ask(1, [6, 7])], 6: [late]})
    for id in (0, 1):
        assert [delta.finish for delta in replies[id] if delta.finish] == [FinishReason.ERROR]
        assert "RuntimeError" in (replies[id][-1].error or "")
        assert list(replies[id][-1].reply) == ids_of(replies[id])
    assert ids_of(replies[2]) == greedy(oracle, late.prompt, 12)


def test_a_stop_string_ends_the_reply_and_is_not_shown(engine: Engine) -> None:
    """E6: whatever the reply is, cut it at each of its own substrings."""
    plain = run(engine, {0: [ask(0, [20, 21, 22], 20)]})[0]
    text = "".join(delta.text for delta in plain)
    for id, start in enumerate(range(2, len(text) - 3), start=1):
        stop = text[start : start + 3]
        deltas = run(engine, {0: [ask(id, [20, 21, 22], 20, stop=(stop,))]})[id]
        shown = "".join(delta.text for delta in deltas)
        assert shown == text[: text.index(stop)]
        assert deltas[-1].finish is FinishReason.STOP
        assert engine.tokenizer.decode(deltas[-1].reply) == shown


def test_exact_says_when_ids_and_text_agree(engine: Engine) -> None:
    """What a crash may take the ids of: never more, nor less, than the text that was shown."""
    deltas = run(engine, {0: [ask(0, [20, 21, 22], 60, stop=("never said",), temperature=1.5, seed=1)]})[0]
    ids: list[int] = []
    text = ""
    for delta in deltas[:-1]:
        ids += delta.ids
        text += delta.text
        assert not delta.exact or engine.tokenizer.decode(ids) == text
    assert {delta.exact for delta in deltas[:-1]} == {True, False}


def test_the_step_log_tells_who_was_served(engine: Engine) -> None:
    eight = [ask(i, [30 + i, 3], 20) for i in range(7)]
    ninth = ask(7, [99] * 20, 2)
    run(engine, {0: eight, 5: [ninth]})
    assert engine.steps[0].prefills == tuple((i, 2) for i in range(7))
    assert engine.steps[4].decodes == tuple(range(7))
    assert engine.steps[5].decodes == tuple(range(7))
    assert engine.steps[5].prefills == ((7, 9),)  # what the budget of 16 leaves
