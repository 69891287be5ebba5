"""The default model, served by the batcher, against transformers on the same float32 weights. (slow)"""

from __future__ import annotations

import asyncio
import random
import time
import warnings
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from engine.batcher import Batcher, Generation
from engine.core import Delta, EngineOptions, FinishReason, Message, Prompt, SamplingParams
from engine.engine import StepRecord
from engine.weights.cache import default_cache_dir
from tests.oracle import check_greedy, load

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NEW_TOKENS = 64

PROMPTS = [
    "What is the capital of France?",
    "Count from 1 to 20.",
    "Write a haiku about the sea.",
    "Translate 'good morning' into German, Spanish and Japanese.",
    "def fibonacci(n):\n    # explain and complete this function\n",
    "List three uses of a paperclip, one per line.",
    "What is 17 * 23? Think step by step.",
    "你好，请介绍一下你自己。",
    "Explain photosynthesis to a child 🌱☀️",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 30,
    "Why is the sky blue?",
    "Give me a JSON object with the keys name, age and city.",
    "Tell me a joke about programmers.",
    "    spaces   and\ttabs\n\n\nand newlines   ",
    "Who wrote Hamlet, and in which year?",
    "SELECT name FROM users WHERE id = 42; -- what does this do?",
    "Ordne diese Wörter alphabetisch: Übung, Apfel, Öl, Zebra.",
    "Finish the sentence: Once upon a time, in a village by the river,",
    "What are the prime numbers below 50?",
    "Name 5 countries in Africa and their capitals.",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["reference", "exact"])
async def batcher(request: pytest.FixtureRequest) -> AsyncIterator[Batcher]:
    kinds = {"reference": {"kernels": "reference"}, "exact": {"exact": True}}
    made = Batcher(EngineOptions(model="default", cache_dir=default_cache_dir(), **kinds[request.param]))  # type: ignore[arg-type]
    made.start()
    await made.settled()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load()


def greedy(max_tokens: int = NEW_TOKENS, **sampling: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **sampling)  # type: ignore[arg-type]


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


async def turn(batcher: Batcher, messages: list[Message], delay: float = 0.0) -> tuple[Prompt, Delta]:
    await asyncio.sleep(delay)
    prompt = await batcher.prompt(messages)
    return prompt, (await collect(batcher.session(b"a").generate(prompt.ids, greedy())))[-1]


async def test_greedy_replies_are_those_of_transformers_alone_together_and_in_a_second_turn(
    batcher: Batcher, oracle: LlamaForCausalLM
) -> None:
    chance = random.Random(3)
    alone = [await turn(batcher, [Message("user", text)]) for text in PROMPTS]
    together = await asyncio.gather(*(turn(batcher, [Message("user", text)], chance.uniform(0, 2)) for text in PROMPTS))
    for text, (prompt, last) in zip(PROMPTS * 2, alone + together, strict=True):
        check_greedy(oracle, prompt.ids, last.reply, NEW_TOKENS, text[:30])

    async def second(text: str, prompt: Prompt, last: Delta) -> tuple[Prompt, Delta]:
        reply = Message("assistant", "", prompt.lead_ids, prompt.lead_digest, last.reply)
        return await turn(batcher, [Message("user", text), reply, Message("user", "Say that again in other words.")], chance.uniform(0, 2))

    seconds = await asyncio.gather(*(second(text, *one) for text, one in zip(PROMPTS, together, strict=True)))
    for text, first, (prompt, last) in zip(PROMPTS, together, seconds, strict=True):
        run = [*first[0].ids, *first[1].reply]
        assert prompt.ids[: len(run)] == run, "what was run is not tokenised again"
        assert last.cached >= len(run) - (first[1].finish is FinishReason.LENGTH), "all but a last token that was never run"
        check_greedy(oracle, prompt.ids, last.reply, NEW_TOKENS, f"second turn of {text[:30]}")


async def test_generate_itself_gives_the_same(batcher: Batcher, oracle: LlamaForCausalLM) -> None:
    for text in PROMPTS[:3]:
        prompt, last = await turn(batcher, [Message("user", text)])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about generation settings that greedy search does not use
            ids = oracle.generate(torch.tensor([prompt.ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2)
        wanted = [int(id) for id in ids[0, len(prompt.ids) :] if id != 2]
        assert list(last.reply) == wanted


async def eight_streams(batcher: Batcher, salt: bytes, tokens: int) -> tuple[set[int], asyncio.Task[list[list[Delta]]]]:
    """Eight conversations, all decoding: their ids, and what they will say."""
    assert batcher._engine
    prompts = [(await batcher.prompt([Message("user", text)])).ids for text in PROMPTS[:8]]
    eight = [batcher.session(salt).generate(ids, greedy(tokens, ignore_eos=True)) for ids in prompts]
    replies = asyncio.ensure_future(asyncio.gather(*map(collect, eight)))
    names = {generation.id for generation in eight}
    steps = batcher._engine.steps
    await until(lambda: len(steps) and set(steps[-1].decodes) == names)
    return names, replies  # type: ignore[return-value]


def steps_after(batcher: Batcher, index: int) -> list[StepRecord]:
    assert batcher._engine
    return [step for step in list(batcher._engine.steps) if step.index > index]


async def test_eight_streams_share_every_step_and_a_ninth_starts_within_two(batcher: Batcher) -> None:
    assert batcher._engine
    ninth_prompt = (await batcher.prompt([Message("user", PROMPTS[8])])).ids
    names, replies = await eight_streams(batcher, b"interleaved", 40)
    before = batcher._engine.steps[-1].index
    ninth = batcher.session(b"interleaved").generate(ninth_prompt, greedy(8, ignore_eos=True))
    assert (await collect(ninth))[-1].finish
    after = steps_after(batcher, before)
    started = next(at for at, step in enumerate(after, start=1) if ninth.id in dict(step.prefills))
    assert started <= 2 + 1, "the step under way when it came does not count"
    assert all(names <= set(step.decodes) for step in after[:20]), "a step left out a stream"
    await replies


async def test_a_very_long_message_delays_neither_the_loop_nor_any_stream(batcher: Batcher) -> None:
    """C8, at the engine's door: 200,000 characters are rendered and tokenised while eight conversations stream."""
    assert batcher._engine
    names, replies = await eight_streams(batcher, b"alive", 100)
    before, lags = batcher._engine.steps[-1].index, []
    encoding = asyncio.create_task(batcher.prompt([Message("user", "Why, 你好 <|im_end|> 12345? " * 8000)]))
    while not encoding.done():
        begin = time.perf_counter()
        await asyncio.sleep(0.005)
        lags.append(time.perf_counter() - begin)
    during = steps_after(batcher, before)
    assert len(encoding.result().ids) > 50_000
    assert max(lags) < 1.0
    assert all(names <= set(step.decodes) for step in during)
    assert all(deltas[-1].finish for deltas in await replies)


async def until(condition: object, seconds: float = 60.0) -> None:
    """The engine's step log has no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
