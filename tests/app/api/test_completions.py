"""Legacy completions through the official SDK, on the real server and model, judged by transformers. (slow)"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from openai import BadRequestError, OpenAI
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from engine.weights.convert import prepare
from tests import oracle
from tests.serving import Server

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Ünïcödé “quotes” and 漢字 🎉:", "<|im_start|>user\nHi<|im_end|>\n"]


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(prepare("default").tokenizer_path))


@pytest.fixture(scope="module")
def judge() -> Iterator[LlamaForCausalLM]:
    yield oracle.load()


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """For text that spells no control token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def generate(server: Server, **body: Any) -> Any:
    return httpx.post(f"{server.url}/generate", json=body, timeout=120).json()


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_greedy_replies_are_transformers_own(server: Server, tokenizer: Tokenizer, judge: LlamaForCausalLM, prompt: str) -> None:
    ids = plain_ids(tokenizer, prompt)
    as_text = generate(server, prompt=prompt, temperature=0, max_new_tokens=48)
    as_ids = generate(server, input_ids=ids, temperature=0, max_new_tokens=48)
    assert as_text["output_ids"] == as_ids["output_ids"]
    assert as_ids["meta_info"]["prompt_tokens"] == len(ids)
    oracle.check_greedy(judge, ids, as_ids["output_ids"], 48, prompt)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_and_its_ids_are_the_same_prompt(client: OpenAI, prompt: str) -> None:
    """By log probabilities: the ids that text was run as spell it whole, and nothing typed is a control token (S7)."""
    scored = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert scored.text == prompt
    assert scored.logprobs and scored.logprobs.tokens
    assert b"".join(spelt(token) for token in scored.logprobs.tokens).decode() == prompt


def spelt(token: str) -> bytes:
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


def test_echo_and_log_probabilities(client: OpenAI, tokenizer: Tokenizer, judge: LlamaForCausalLM) -> None:
    prompt = PROMPTS[0]
    ids = plain_ids(tokenizer, prompt)
    made = client.completions.create(model=MODEL, prompt=ids, max_tokens=4, temperature=0, echo=True, logprobs=3)
    choice = made.choices[0]
    assert made.usage and (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(ids), 4)
    assert choice.text.startswith(prompt) and choice.finish_reason == "length"
    scores = choice.logprobs
    assert scores and scores.tokens and scores.token_logprobs and scores.top_logprobs and scores.text_offset
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset) == len(ids) + 4
    assert "".join(scores.tokens) == choice.text
    assert all(choice.text.startswith(token, at) for token, at in zip(scores.tokens, scores.text_offset, strict=True))
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None  # type: ignore[comparison-overlap]
    run = [*ids, *(plain_ids(tokenizer, token)[0] for token in scores.tokens[len(ids) :])]
    with torch.inference_mode():
        expected = torch.log_softmax(judge(torch.tensor([run])).logits[0].double(), -1)
    for at in range(1, len(run)):
        row, told = expected[at - 1], scores.top_logprobs[at]
        assert scores.token_logprobs[at] == pytest.approx(float(row[run[at]]), abs=1e-3)
        assert told[scores.tokens[at]] == scores.token_logprobs[at]
        likeliest = [tokenizer.decode([id]) for id in row.topk(3).indices]
        assert 3 <= len(told) <= 4 and set(told) >= set(likeliest)


def test_a_prompt_is_scored_alone(client: OpenAI) -> None:
    """max_tokens 0: what evaluation harnesses ask."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hello there, world", "echo": True, "logprobs": 1, "temperature": 0}
    alone = client.completions.create(**asked, max_tokens=0)
    longer = client.completions.create(**asked, max_tokens=3).choices[0].logprobs
    assert alone.usage and alone.usage.completion_tokens == 0
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("Hello there, world", "length")
    scores = alone.choices[0].logprobs
    assert scores and longer and scores.token_logprobs and longer.token_logprobs
    assert longer.token_logprobs[: len(scores.token_logprobs)] == scores.token_logprobs, "the same, cold and with the prompt in the cache"
    again = client.completions.create(**asked, max_tokens=0)
    assert again.choices[0].logprobs == scores


def test_several_prompts_and_choices(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "seed": 5, "max_tokens": 8}
    made = client.completions.create(**asked, prompt=PROMPTS[:3], n=2, echo=True)
    assert [choice.index for choice in made.choices] == list(range(6))
    tokens = 0
    for at, prompt in enumerate(PROMPTS[:3]):
        alone = client.completions.create(**asked, prompt=prompt, n=2)
        assert alone.usage
        tokens += alone.usage.prompt_tokens
        assert [choice.text for choice in made.choices[2 * at : 2 * at + 2]] == [prompt + choice.text for choice in alone.choices]
    assert made.usage and made.usage.prompt_tokens == tokens


def test_a_stream_is_the_whole_in_parts(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "seed": 5, "max_tokens": 8, "prompt": PROMPTS[:2], "n": 2, "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert (parts[-1].choices, parts[-1].usage and parts[-1].usage.completion_tokens) == ([], whole.usage and whole.usage.completion_tokens)
    for choice in whole.choices:
        own = [part.choices[0] for part in parts[:-1] if part.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for one in own for value in getattr(one.logprobs, field)] == getattr(choice.logprobs, field)


def test_defaults_and_forms(client: OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="Once upon a time", extra_body={"ignore_eos": True, "best_of": 1, "suffix": None})
    assert made.usage and made.usage.completion_tokens == 16
    assert (made.choices[0].finish_reason, made.choices[0].logprobs, made.object) == ("length", None, "text_completion")
    stopped = client.completions.create(model=MODEL, prompt="1, 2, 3,", temperature=0, max_tokens=40, stop=[" 6"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (" 4, 5,", "stop")
    form = {"type": "regex", "regex": "[a-c]{5}"}
    spelled = client.completions.create(model=MODEL, prompt="x", extra_body={"response_format": form}).choices[0]
    assert re.fullmatch("[a-c]{5}", spelled.text) and spelled.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[1, 2], [3, 2**31]]}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 2}, "prompt"),
        ({"prompt": "0 " * 50_000}, "prompt"),
        ({"prompt": [5] * 100_000, "echo": True}, "prompt"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    ],
)
def test_bad_requests(client: OpenAI, server: Server, fields: dict[str, Any], param: str) -> None:
    """S3, S4."""
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", extra_body=fields)
    assert refused.value.param == param
    server.wait_until_idle()
