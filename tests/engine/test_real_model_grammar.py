"""The default model held to grammars, and its log probabilities. (slow)"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from engine.batcher import Batcher
from engine.core import EngineOptions, FinishReason, Grammar, Message, RequestError, SamplingParams
from engine.weights.cache import default_cache_dir
from tests.engine.batching import collect
from tests.engine.test_grammar import JSON, LARK, REGEX, is_json, is_lark
from tests.oracle import load

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batcher() -> AsyncIterator[Batcher]:
    made = Batcher(EngineOptions(model="default", cache_dir=default_cache_dir(), exact=True))
    made.start()
    await made.settled()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load()


def sampled(seed: int, **sampling: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 300, "seed": seed} | sampling))


async def text_of(batcher: Batcher, question: str, sampling: SamplingParams) -> str:
    prompt = await batcher.prompt([Message("user", question)])
    deltas = await collect(batcher.session(b"a").generate(prompt.ids, sampling))
    assert deltas[-1].finish is FinishReason.STOP, deltas[-1]
    return "".join(delta.text for delta in deltas)


async def test_replies_spell_what_their_grammar_says(batcher: Batcher) -> None:
    """50 seeds of each, side by side."""
    for grammar in (JSON, REGEX, LARK):
        await batcher.session(b"a").compile(grammar)
    asked = [(grammar, seed) for seed in range(50) for grammar in (JSON, REGEX, LARK)]
    asking = (text_of(batcher, "Make something up.", sampled(seed, grammar=grammar)) for grammar, seed in asked)
    texts = await asyncio.gather(*asking)
    assert len(set(texts)) > 100
    for (grammar, _), text in zip(asked, texts, strict=True):
        held = {JSON: is_json, LARK: is_lark, REGEX: lambda text: re.fullmatch(REGEX.source, text)}[grammar]
        assert held(text), text


async def test_any_json_object_is_one(batcher: Batcher) -> None:
    grammar = Grammar("json_schema", '{"type": "object"}')
    question = "Describe Paris as a JSON object with the keys name, country and population."
    assert isinstance(json.loads(await text_of(batcher, question, sampled(0, temperature=0.0, max_tokens=400, grammar=grammar))), dict)


async def test_neighbours_say_what_they_would_have_said(batcher: Batcher) -> None:
    free = sampled(5, max_tokens=40, ignore_eos=True, stop=("\n\n\n\n",))
    ids = (await batcher.prompt([Message("user", "Why is the sky blue?")])).ids
    alone = (await collect(batcher.session(b"a").generate(ids, free)))[-1].reply
    beside = [text_of(batcher, "Make something up.", sampled(seed, grammar=JSON)) for seed in range(6)]
    together, *texts = await asyncio.gather(collect(batcher.session(b"b").generate(ids, free)), *beside)
    assert together[-1].reply == alone  # type: ignore[union-attr]
    assert all(is_json(text) for text in texts if isinstance(text, str))


async def test_hostile_grammars_are_refused(batcher: Batcher) -> None:
    exponential = "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'
    for grammar in (
        Grammar("lark", exponential),
        Grammar("json_schema", '{"type": "integer", "multipleOf": 12345678}'),
        Grammar("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}})),
        Grammar("lark", 'start: %regex {"substring_chars": "' + "abc " * 30_000 + '"}'),
    ):
        with pytest.raises(RequestError):
            await batcher.session(b"a").compile(grammar)


async def test_log_probabilities_are_those_of_transformers(batcher: Batcher, oracle: LlamaForCausalLM) -> None:
    ids = (await batcher.prompt([Message("user", "Count from 1 to 20. " * 12)])).ids
    asked = sampled(3, max_tokens=30, ignore_eos=True, temperature=0.8, logprobs=5, prompt_logprobs=True)
    deltas = await collect(batcher.session(b"a").generate(ids, asked))
    found = [*deltas[0].prompt_logprobs, *(entry for delta in deltas for entry in delta.logprobs)]
    assert len(found) == len(ids) + 30
    whole = [*ids, *(id for delta in deltas for id in delta.ids)]
    with torch.inference_mode():
        rows = oracle(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    assert found[0] is None
    for row, entry, id in zip(rows[:-1], found[1:], whole[1:], strict=True):
        assert entry
        assert entry.id == id
        assert entry.logprob == pytest.approx(float(row[id]), abs=1e-3)
        assert [other.logprob for other in entry.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
