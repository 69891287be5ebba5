"""Log probabilities of generated tokens and of the prompt's, on tiny models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.batcher import Batcher
from engine.blocks import BlockPool
from engine.core import PROMPT_ROWS, Delta, FinishReason, Grammar, RequestError, SamplingParams, Sequence, TokenLogprob
from engine.engine import Engine
from engine.logprobs import Distribution
from engine.scheduler import Limits, Scheduler
from engine.weights.checkpoint import Checkpoint
from tests.engine import tiny
from tests.engine.batching import batcher, greedy
from tests.engine.fakes import FakeRunner
from tests.engine.test_engine import Replies, ask, ids_of, run

__all__ = ["batcher"]

NewEngine = Callable[..., Engine]

PROMPT = random.Random(7).choices(range(3, 300), k=50)
LONG = random.Random(8).choices(range(3, 300), k=3 * PROMPT_ROWS + 7)
ALL: dict[str, Any] = {"logprobs": 5, "prompt_logprobs": True}


@pytest.fixture(scope="module")
def oracle(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@torch.inference_mode()
def wanted(oracle: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """float64 [len(ids), vocab]: of what follows each position, by one forward pass over all."""
    return oracle(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def logprobs_of(deltas: list[Delta]) -> list[TokenLogprob]:
    for delta in deltas:
        assert [logprob.id for logprob in delta.logprobs] == list(delta.ids)
    return [logprob for delta in deltas for logprob in delta.logprobs]


def prompt_of(deltas: list[Delta]) -> tuple[TokenLogprob | None, ...]:
    assert not any(delta.prompt_logprobs for delta in deltas[1:]), "told once"
    return deltas[0].prompt_logprobs


def check(entry: TokenLogprob, row: torch.Tensor, top: int) -> None:
    assert entry.logprob == pytest.approx(float(row[entry.id]), abs=1e-4)
    assert len(entry.top) == top
    found = [other.logprob for other in entry.top]
    assert found == sorted(found, reverse=True)
    assert found == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
    for other in entry.top:
        assert other.logprob == pytest.approx(float(row[other.id]), abs=1e-4)
        assert other.top == ()


@pytest.mark.parametrize("options", [{"exact": True}, {"kernels": "reference"}, {"kernels": "reference", "max_step_tokens": 9}])
def test_they_are_the_log_softmax_of_the_models_logits(
    tiny_checkpoint: Checkpoint, new_engine: NewEngine, oracle: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    """Before temperature, penalties, bias and filters, of each token generated and of each of the prompt's."""
    engine = new_engine(tiny_checkpoint, **options)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 3, "top_p": 0.5},
        {"temperature": 2.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {7: 5.0}},
        {"temperature": 1.0, "grammar": Grammar("regex", "[a-z ]{40}")},
    ]
    asked = [ask(i, [*LONG[: 40 + 20 * i]], 10, logprobs=i, prompt_logprobs=i != 1, **way) for i, way in enumerate(ways)]
    replies = run(engine, {0: asked})
    for sequence in asked:
        deltas, start = replies[sequence.id], len(sequence.prompt)
        ids = ids_of(deltas)
        rows = wanted(oracle, sequence.prompt + ids)
        logprobs = logprobs_of(deltas)
        assert len(logprobs) == 10
        for at, entry in enumerate(logprobs):
            check(entry, rows[start - 1 + at], sequence.sampling.logprobs)
            assert entry.piece == engine.tokenizer.visible_bytes(entry.id)
        prompt = prompt_of(deltas)
        assert len(prompt) == (start if sequence.sampling.prompt_logprobs else 0)
        for at, found in enumerate(prompt):
            if at == 0:
                assert found is None
                continue
            assert found
            assert found.id == sequence.prompt[at]
            check(found, rows[at - 1], sequence.sampling.logprobs)


def test_those_who_ask_for_none_get_none(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    deltas = run(new_engine(tiny_checkpoint), {0: [ask(0, PROMPT), ask(1, PROMPT, **ALL)]})[0]
    assert not any(delta.logprobs or delta.prompt_logprobs for delta in deltas)


def test_prompt_logprobs_alone_have_nothing_beside_them(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    deltas = run(new_engine(tiny_checkpoint), {0: [ask(0, PROMPT, prompt_logprobs=True)]})[0]
    assert not any(delta.logprobs for delta in deltas)
    assert len(prompt_of(deltas)) == len(PROMPT)
    assert all(entry is None or entry.top == () for entry in prompt_of(deltas))


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
def test_short_prompts(tiny_checkpoint: Checkpoint, new_engine: NewEngine, prompt: list[int]) -> None:
    known = prompt_of(run(new_engine(tiny_checkpoint), {0: [ask(0, prompt, **ALL)]})[0])
    assert [entry and entry.id for entry in known] == [None, *prompt[1:]]


# However a reply ends


def test_each_delta_has_as_many_as_tokens_however_it_ends(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    engine = new_engine(tiny_checkpoint)
    free = run(engine, {0: [ask(0, PROMPT, 8, logprobs=0)]})[0]
    ids = ids_of(free)
    assert (free[-1].finish, len(logprobs_of(free))) == (FinishReason.LENGTH, 8)
    text = "".join(delta.text for delta in free)
    stopped = run(engine, {0: [ask(1, PROMPT, 8, logprobs=0, stop=(text[4:6],))]})[1]
    assert stopped[-1].finish is FinishReason.STOP
    assert logprobs_of(stopped) == logprobs_of(free)[: len(ids_of(stopped))], "those of text that is held back, or cut off, as well"
    by_id = run(engine, {0: [ask(2, PROMPT, 8, logprobs=0, stop_ids=(ids[3],))]})[2]
    assert by_id[-1].finish is FinishReason.STOP
    assert logprobs_of(by_id) == logprobs_of(free)[: ids.index(ids[3])], "the stop id is not part of the reply"
    ended = run(engine, {0: [ask(3, PROMPT, 8, ignore_eos=False, logit_bias={tiny.EOS: 100.0}, **ALL)]})[3]
    assert (ended[-1].finish, ended[0].ids, ended[0].logprobs) == (FinishReason.STOP, (), ())
    assert len(prompt_of(ended)) == len(PROMPT), "told with the only delta there is"
    cancelled = ask(4, PROMPT, 8, **ALL)
    deltas = run(engine, {0: [cancelled]}, {5: [cancelled]})[4]
    assert deltas[-1].finish is FinishReason.CANCELLED
    assert 0 < len(ids_of(deltas)) < 8
    assert [entry.logprob for entry in logprobs_of(deltas)] == [entry.logprob for entry in logprobs_of(free)[: len(ids_of(deltas))]]


def test_a_prompt_that_is_cancelled_half_way_tells_nothing(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    engine = new_engine(tiny_checkpoint)
    sequence = ask(0, LONG, **ALL)
    (only,) = run(engine, {0: [sequence]}, {2: [sequence]})[0]
    assert (only.finish, only.prompt_logprobs, only.logprobs) == (FinishReason.CANCELLED, (), ())
    again = run(engine, {0: [ask(1, LONG, **ALL)]})[1]
    assert again[0].cached == 0
    assert len(prompt_of(again)) == len(LONG)


def test_a_control_token_has_no_bytes(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    deltas = run(new_engine(tiny_checkpoint), {0: [ask(0, [tiny.BOS, tiny.EOS, 40], 3, logit_bias={tiny.EOS: 100.0}, **ALL)]})[0]
    assert [entry.piece for entry in logprobs_of(deltas)] == [b""] * 3
    assert [entry and entry.piece for entry in prompt_of(deltas)] == [None, b"", tiny.tokenizer().decode([40]).encode()]


# The same bits


def everything(replies: Replies, id: int) -> tuple[Any, ...]:
    deltas = replies[id]
    return tuple(ids_of(deltas)), tuple(entry for delta in deltas for entry in delta.logprobs), prompt_of(deltas)


def asked() -> list[Sequence]:
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1, "logprobs": 20, "prompt_logprobs": True},
        {"temperature": 1.0, "seed": 2, "logprobs": 3},
        {"temperature": 0.5, "seed": 3, "logprobs": 2, "grammar": Grammar("regex", "[a-f ]{30}")},
        {"temperature": 1.0, "seed": 4},
        {"prompt_logprobs": True, "logprobs": 1},
    ]
    return [ask(i, LONG[: 30 + 18 * i] if i != 4 else LONG[:90], 40, **way) for i, way in enumerate(ways)]


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 24, "max_batch_size": 5}, {"max_total_tokens": 208, "max_step_tokens": 33}])
def test_they_depend_on_nothing_that_shares_the_step(quantised: Checkpoint, new_engine: NewEngine, options: dict[str, Any]) -> None:
    """E12, to the bit: alone, together, with everything cached, and preempted."""
    alone = [everything(run(new_engine(quantised), {0: [sequence]}), sequence.id) for sequence in asked()]
    engine = new_engine(quantised, **options)
    tight = asked()
    together = run(engine, {0: tight[:3], 2: tight[3:]})
    assert [everything(together, i) for i in range(5)] == alone
    again = run(engine, {0: asked()})
    assert [everything(again, i) for i in range(5)] == alone
    if "max_total_tokens" in options:
        assert sum(sequence.preemptions for sequence in tight) > 0
    else:
        assert [again[i][0].cached > 0 for i in range(5)] == [False, True, True, True, False]


def test_a_prompt_run_for_its_logprobs_takes_nothing_from_the_cache_but_leaves_it_there(
    quantised: Checkpoint, new_engine: NewEngine
) -> None:
    engine = new_engine(quantised)
    first = run(engine, {0: [ask(0, LONG, 3, **ALL)]})[0]
    plain = run(engine, {0: [ask(1, LONG, 3)]})[1]
    assert (first[0].cached, plain[0].cached) == (0, len(LONG) - 1)
    again = run(engine, {0: [ask(2, LONG, 3, **ALL)]})[2]
    assert again[0].cached == 0
    assert prompt_of(again) == prompt_of(first)
    assert ids_of(again) == ids_of(plain) == ids_of(first)


def test_a_preempted_prompt_has_each_of_its_logprobs_once(quantised: Checkpoint, new_engine: NewEngine) -> None:
    """It gives way in the middle of its prompt, and what it had is found again."""
    alone = everything(run(new_engine(quantised), {0: [ask(0, LONG, 4, **ALL)]}), 0)
    engine = new_engine(quantised, max_batch_size=1)
    background = ask(0, LONG, 4, **ALL)
    background.priority = 1
    replies = run(engine, {0: [background], 2: [ask(1, PROMPT, 4)]})
    assert background.preemptions == 1
    assert replies[0][0].cached == 0
    assert everything(replies, 0) == alone
    prefilled = sum(count for record in engine.steps for id, count in record.prefills if id == 0)
    assert len(LONG) - 1 <= prefilled <= len(LONG), "no row twice"


def test_a_step_that_fails_tells_nothing_and_the_next_is_whole(
    quantised: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(quantised)
    forward, left = engine.runner.decoder.forward, [2]

    def failing(batch: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise OSError("no memory")
        return forward(batch)

    monkeypatch.setattr(engine.runner.decoder, "forward", failing)
    (only,) = run(engine, {0: [ask(0, LONG, 4, **ALL)]})[0]
    assert (only.finish, only.prompt_logprobs) == (FinishReason.ERROR, ())
    assert len(prompt_of(run(engine, {0: [ask(1, LONG, 4, **ALL)]})[1])) == len(LONG)


def test_a_row_that_is_no_number_ends_the_reply(quantised: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no token is chosen from it."""
    engine = new_engine(quantised)
    forward, spoilt = engine.runner.decoder.forward, [True]

    def spoiling(batch: Any) -> Any:
        logits = forward(batch)
        if spoilt.pop():
            logits[3, 5] = np.nan
        spoilt.append(False)
        return logits

    monkeypatch.setattr(engine.runner.decoder, "forward", spoiling)
    replies = run(engine, {0: [ask(0, LONG, 4, **ALL)], 3: [ask(1, PROMPT, 4, **ALL)]})
    assert "numbers that are none" in str(replies[0][-1].error)
    assert len(prompt_of(replies[1])) == len(PROMPT)


# How it is planned


def test_a_step_scores_no_more_rows_than_there_is_room_for() -> None:
    """Whoever asks; and everyone else's rows are as many as ever."""
    scheduler = Scheduler(BlockPool(400, 4), Limits(4, 256, 800, frozenset({0})))
    runner = FakeRunner(4)
    chance = random.Random(0)
    waiting = [
        Sequence(i, b"%d" % (i % 3), chance.choices(range(9), k=chance.randrange(1, 150)), SamplingParams(9, prompt_logprobs=i % 3 > 0))
        for i in range(60)
    ]
    scored: dict[int, list[int]] = {sequence.id: [] for sequence in waiting}
    everyone = list(waiting)
    while waiting or not scheduler.idle:
        plan = scheduler.plan([waiting.pop()] if waiting and chance.random() < 0.3 else [])
        assert sum(chunk.scores for chunk in plan.chunks) <= PROMPT_ROWS
        for chunk in plan.chunks:
            scored[chunk.sequence.id] += range(chunk.start, chunk.start + chunk.scores)
        assert not runner.move(plan.moves)
        scheduler.advance(plan, runner.run(plan))
        scheduler.pool.check([sequence.table for sequence in scheduler.running])
    for sequence in everyone:
        rows = range(len(sequence.prompt) - 1) if sequence.sampling.prompt_logprobs else []
        assert sorted(set(scored[sequence.id])) == list(rows)
        assert sequence.preemptions or len(scored[sequence.id]) == len(rows)
    assert max(len(sequence.prompt) for sequence in everyone) > 4 * PROMPT_ROWS


# The numbers themselves


def test_the_likeliest_are_in_order_and_of_equals_the_lower_ids() -> None:
    row = np.array([1.0, 3.0, 2.0, 3.0, 2.0, -np.inf, 2.0], np.float32)
    score = Distribution(row).score(0, 4)
    assert [id for id, _ in score.top] == [1, 3, 2, 4]
    total = math.log(math.fsum(map(math.exp, [1, 3, 2, 3, 2, 2])))
    assert score.logprob == pytest.approx(1 - total, rel=1e-14)
    assert [logprob for _, logprob in score.top] == pytest.approx([3 - total, 3 - total, 2 - total, 2 - total], rel=1e-14)
    assert Distribution(row).score(0, 0).top == ()
    assert len(Distribution(row).score(0, 20).top) == 7


def test_they_are_never_above_zero_and_large_logits_are_no_trouble() -> None:
    row = np.full(300, -3e38, np.float32)
    row[7] = 3e38
    assert Distribution(row).score(7, 1).logprob == 0
    assert math.exp(sum(Distribution(row[:5]).score(id, 0).logprob for id in range(5))) == pytest.approx(5.0**-5)
    row[3] = np.nan
    assert math.isnan(Distribution(row).score(7, 3).logprob)


# The door


@pytest.mark.parametrize("count", [-2, 21])
async def test_how_many_may_be_asked_for_is_bounded(batcher: Batcher, count: int) -> None:
    with pytest.raises(RequestError, match=f"0 to 20.*{count}") as refused:
        batcher.check([5], greedy(logprobs=count))
    assert refused.value.param == "top_logprobs"
    batcher.check([5], greedy(logprobs=20))


async def test_raw_prompts_are_encoded_as_text_and_decoded(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    text = "hello <|im_end|> you"
    ids = await batcher.encode(text)
    assert ids == batcher._engine.tokenizer.encode_plain(text)
    assert tiny.EOS not in ids
    assert await batcher.decode(ids) == text
    assert await batcher.decode([tiny.BOS, *ids, tiny.EOS]) == text
    assert await batcher.encode("") == []
    monkeypatch.setattr(batcher._engine.checkpoint, "add_bos", True)
    assert await batcher.encode(text) == [tiny.BOS, *ids]
    for id in (-1, 300):
        with pytest.raises(RequestError, match=f"0 to 299 in input, got {id}"):
            await batcher.decode([5, id])
    with pytest.raises(RequestError, match="surrogate"):
        await batcher.encode("a\ud800")


async def test_a_raw_prompt_that_is_too_long_is_refused_before_it_is_read(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    longest = batcher._engine.tokenizer.longest
    await batcher.encode("x" * (255 * longest))
    monkeypatch.setattr(batcher._engine, "encode", None)
    with pytest.raises(RequestError, match=r"fewer than 256 tokens.*at least 256") as refused:
        await batcher.encode("x" * (255 * longest + 1))
    assert refused.value.code == "context_length_exceeded"
