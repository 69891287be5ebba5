"""Chat completions through the official SDK, on the real server and model. (slow)"""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, LengthFinishReasonError, NotFoundError, OpenAI
from pydantic import BaseModel
from tokenizers import Tokenizer

from engine.weights.convert import prepare
from tests.serving import Server

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Person(BaseModel):
    name: str
    age: int
    knows: list[str]


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def test_two_turns_and_a_stream(client: OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    reply = made.choices[0].message
    assert "Paris" in (reply.content or "")
    more: list[Any] = [*FRANCE, reply.model_dump(), {"role": "user", "content": "And of Italy?"}]
    with client.chat.completions.stream(model=MODEL, messages=more, temperature=0, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "Rome" in (final.choices[0].message.content or "")
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.usage and final.usage.prompt_tokens_details
    assert final.usage.prompt_tokens_details.cached_tokens is not None
    assert final.usage.prompt_tokens_details.cached_tokens >= made.usage.total_tokens - 1, "it finds all of the first turn"  # type: ignore[union-attr]
    assert final.choices[0].finish_reason == "stop"


def test_several_choices(client: OpenAI) -> None:
    def ask(n: int, seed: int) -> Any:
        return client.chat.completions.create(model=MODEL, messages=FRANCE, seed=seed, temperature=1.5, max_completion_tokens=12, n=n)

    made = ask(4, 7)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in made.choices]
    assert len(set(texts)) == 4
    alone = [ask(1, 7 + nth) for nth in range(4)]
    assert [one.choices[0].message.content for one in alone] == texts, "the nth draws with the nth seed"
    assert made.usage.prompt_tokens == alone[0].usage.prompt_tokens, "a prompt counts once"
    assert made.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    more: list[Any] = [*FRANCE, made.choices[2].message.model_dump(), {"role": "user", "content": "Why?"}]
    after = client.chat.completions.create(model=MODEL, messages=more, max_tokens=1).usage
    assert after.prompt_tokens_details.cached_tokens >= made.usage.prompt_tokens + 10, "any of them may go on"  # type: ignore[union-attr]
    assert len(ask(16, -(2**63)).choices) == len(ask(2, 2**63 - 1).choices) + 14


def test_several_choices_streamed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    with client.chat.completions.stream(**asked) as stream:
        list(stream)
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [choice.message.content for choice in whole.choices]


def test_a_retry_with_the_same_key_finds_every_choice(server: Server) -> None:
    body = {"messages": FRANCE, "max_tokens": 6, "n": 3, "logprobs": True}
    answers = [httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"Idempotency-Key": "three"}).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert len({choice["message"]["content"] for choice in answers[0]["choices"]}) == 3
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}, headers={"Idempotency-Key": "three"}
    ) as again:
        assert again.read().count(b'"role":"assistant"') == 3


def test_log_probabilities(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs and choice.logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content).decode() == choice.message.content
    for token in choice.logprobs.content:
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, values[0]), "greedy takes the likeliest"
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    with client.chat.completions.stream(**asked) as stream:
        list(stream)
        streamed = stream.get_final_completion()
    assert streamed.choices[0].logprobs == choice.logprobs
    plain = client.chat.completions.create(**asked | {"top_logprobs": 0, "max_tokens": 2}).choices[0].logprobs
    assert plain and plain.content and [token.top_logprobs for token in plain.content] == [[], []]
    assert client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=2).choices[0].logprobs is None


def test_parse_and_streamed_parse(client: OpenAI) -> None:
    """Under a grammar the default model's reply always is what was asked for, whatever it says."""
    ask: list[Any] = [{"role": "user", "content": "Invent a person, as JSON with name, age and knows."}]
    for seed in range(5):
        asked: dict[str, Any] = {"model": MODEL, "messages": ask, "seed": seed, "max_tokens": 700, "response_format": Person}
        try:
            parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
        except LengthFinishReasonError:  # a list without end is what was asked for, too
            continue
        assert isinstance(parsed, Person)
        with client.chat.completions.stream(**asked) as stream:
            list(stream)
            assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_forms_of_a_reply(client: OpenAI) -> None:
    def say(form: Any) -> str:
        made = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=400, seed=1, response_format=form)
        assert made.choices[0].finish_reason == "stop"
        return made.choices[0].message.content or ""

    assert re.fullmatch(r"(yes|no), [0-9]{3}", say({"type": "regex", "regex": "(yes|no), [0-9]{3}"}))
    assert say({"type": "grammar", "grammar": 'start: "a" ("b" | "c") "d"'}) in ("abd", "acd")
    closed = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    assert re.fullmatch(r'\{\s*"ok"\s*:\s*(true|false)\s*\}', say({"type": "json_schema", "json_schema": {"name": "ok", "schema": closed}}))
    assert "Paris" in say({"type": "text"})
    opened = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=20, response_format={"type": "json_object"})
    assert (opened.choices[0].message.content or "").startswith("{")


def test_a_message_goes_on(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0).choices[0].message.content or ""
    begun: list[Any] = [*FRANCE, {"role": "assistant", "content": whole[:14]}]
    for extra in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        made = client.chat.completions.create(model=MODEL, messages=begun, temperature=0, extra_body=extra)
        assert whole[:14] + (made.choices[0].message.content or "") == whole
    anew = client.chat.completions.create(model=MODEL, messages=begun, temperature=0, max_tokens=1).usage
    assert anew and made.usage and anew.prompt_tokens > made.usage.prompt_tokens, "the opening of a next message"
    closed = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=1, extra_body={"add_generation_prompt": False}).usage
    opened = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=1).usage
    assert closed and opened and closed.prompt_tokens < opened.prompt_tokens
    for messages, extra in (
        (FRANCE, {"continue_final_message": True}),
        ([*FRANCE, {"role": "assistant", "content": ""}], {"continue_final_message": True}),
        (begun, {"continue_final_message": True, "add_generation_prompt": True}),
    ):
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)
        assert refused.value.param == "continue_final_message"


def test_sampling_fields_have_their_effect(client: OpenAI) -> None:
    def say(**fields: Any) -> str:
        made = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=16, **fields)
        return made.choices[0].message.content or ""

    plain = say()
    assert say(stop=" of") == plain.partition(" of")[0]
    assert say(stop=["nowhere", "Paris"]) == plain.partition("Paris")[0]
    likely = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=1, logprobs=True, top_logprobs=2)
    assert likely.choices[0].logprobs and likely.choices[0].logprobs.content
    first, second = likely.choices[0].logprobs.content[0].top_logprobs
    tokenizer = Tokenizer.from_file(str(prepare("default").tokenizer_path))
    (first_id,), (second_id,) = (tokenizer.encode(token.token, add_special_tokens=False).ids for token in (first, second))
    assert plain.startswith(first.token)
    assert say(logit_bias={str(first_id): -100}).startswith(second.token)
    assert say(logit_bias={str(second_id): 100}, extra_body={"ignore_eos": True}) == 16 * second.token
    assert say(extra_body={"stop_token_ids": [first_id]}) == ""
    assert say(presence_penalty=2, frequency_penalty=2) != say(presence_penalty=-2, frequency_penalty=-2)
    assert say(extra_body={"repetition_penalty": 3.0}) != plain


def test_errors_are_the_sdks_own(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=FRANCE, response_format={"type": "regex", "regex": "["})  # type: ignore[misc]
    assert refused.value.param == "response_format"
    with pytest.raises(BadRequestError) as streamed:
        client.chat.completions.create(model=MODEL, messages=FRANCE, logit_bias={"1000000": 1}, stream=True)
    assert streamed.value.param == "logit_bias", "before the stream begins"
    with pytest.raises(APIStatusError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "0 " * 50_000}])
    assert (long.value.status_code, long.value.code) == (400, "context_length_exceeded")


def test_hints_and_unknown_fields_change_nothing(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0).choices[0].message.content
    hinted = client.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        store=True,
        parallel_tool_calls=True,
        tool_choice="none",
        extra_body={"chat_id": "x", "logprobs": False, "top_logprobs": 0, "best_of": 1},
    )
    assert hinted.choices[0].message.content == plain


def test_closing_the_stream_stops_the_work(server: Server, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, max_tokens=4000, n=3, stream=True, extra_body={"ignore_eos": True}
    )
    said = (chunk.choices[0].index for chunk in stream if chunk.choices[0].delta.content)
    assert 2 in said, "each has begun"
    stream.close()
    server.wait_until_idle()


async def test_the_asynchronous_client(server: Server) -> None:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    async with client, client.chat.completions.stream(model=MODEL, messages=FRANCE, temperature=0) as stream:
        text = "".join([event.delta async for event in stream if event.type == "content.delta"])
    assert "Paris" in text
