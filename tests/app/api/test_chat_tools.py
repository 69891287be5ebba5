"""Tools over chat completions, through the official SDK on the real server and model. (slow)"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.serving import Server

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"{name} of a city", "parameters": schema, "strict": True}}


CITY = {"type": "string", "enum": ["Paris", "Rome"]}
WEATHER = tool("weather", city=CITY, unit={"type": "string", "enum": ["C", "F"]})
TIME = tool("time", city=CITY)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def test_a_required_call_and_the_turn_after_it(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER, TIME], "temperature": 0}
    made = client.chat.completions.create(**asked, messages=ASK, tool_choice="required", parallel_tool_calls=False)
    choice = made.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls and len(choice.message.tool_calls) == 1
    call: Any = choice.message.tool_calls[0]
    assert call.type == "function" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in CITY["enum"] and call.function.name in ("weather", "time")

    answered: list[Any] = [*ASK, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}]
    after = client.chat.completions.create(**asked, messages=answered, tool_choice="none")
    assert after.choices[0].message.tool_calls is None and after.choices[0].message.content
    again = client.chat.completions.create(**asked, messages=answered, tool_choice="auto", max_tokens=20)
    assert made.usage and again.usage and again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens is not None
    assert again.usage.prompt_tokens_details.cached_tokens >= made.usage.prompt_tokens, "the call is found as it was run"
    silent: list[Any] = [*ASK, {"role": "assistant", "tool_calls": choice.message.model_dump()["tool_calls"]}, answered[-1]]
    same = client.chat.completions.create(**asked, messages=silent, tool_choice="auto", max_tokens=20)
    assert same.choices[0].message == again.choices[0].message, "content may be missing"


@pytest.mark.parametrize("name", ["weather", "time"])
def test_a_named_call(client: OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    for seed in range(3):
        made = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[WEATHER, TIME], tool_choice=choice, seed=seed, parallel_tool_calls=False
        )
        (call,) = made.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == name
        assert set(json.loads(call.function.arguments)) == ({"city", "unit"} if name == "weather" else {"city"})


def test_a_stream_of_calls_is_the_whole_in_parts(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [WEATHER, TIME], "tool_choice": "required", "seed": 4, "n": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        deltas = [call for one in own for call in one.delta.tool_calls or ()]
        for at, call in enumerate(choice.message.tool_calls or ()):
            parts = [delta for delta in deltas if delta.index == at]
            assert call.type == "function" and parts[0].function
            assert (parts[0].type, parts[0].function.name, parts[0].function.arguments) == ("function", call.function.name, "")
            assert all(part.id is None and part.function and part.function.name is None for part in parts[1:])
            assert len(parts) > 3, "as they come"
            assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments
        assert own[0].delta.content is None and not any(one.delta.content for one in own)
        assert own[-1].finish_reason == choice.finish_reason
    ids = [delta.id for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or () if delta.id]
    assert len(set(ids)) == len(ids) == sum(len(choice.message.tool_calls or ()) for choice in whole.choices)


def test_the_sdks_helpers_read_calls(client: OpenAI) -> None:
    tools: Any = [pydantic_function_tool(Weather)]
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(3):
        parsed: Any = client.chat.completions.parse(**asked, seed=seed).choices[0].message.tool_calls
        assert isinstance(parsed[0].function.parsed_arguments, Weather)
        with client.chat.completions.stream(**asked, seed=seed) as stream:
            kinds = [event.type for event in stream]
            final: Any = stream.get_final_completion().choices[0].message.tool_calls
        assert final[0].function.parsed_arguments == parsed[0].function.parsed_arguments
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)


def test_several_calls_and_their_answers(client: OpenAI) -> None:
    """As other models make them: text, two calls, their outputs in any order."""
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "time", "arguments": arguments}}
        for at, arguments in enumerate(('{"city": "Paris"}', '{"city":"Rome"}'))
    ]
    chat: list[Any] = [
        *ASK,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "12:00"},
    ]
    made = client.chat.completions.create(model=MODEL, messages=chat, tools=[TIME], temperature=0, max_tokens=30)
    assert made.choices[0].message.role == "assistant"
    without = client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=30)
    assert without.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "tool_call_id": "call_9", "content": "x"}], "messages"),
        ([{"role": "tool", "content": "x"}], "messages.1.tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f"}}]}], "messages.1.tool_calls.0"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]}],
            "messages.1.tool_calls.0.arguments",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}], "messages.1.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "f"}}]}], "messages.1.tool_calls.0.id"),
    ],
)
def test_bad_calls_and_answers(client: OpenAI, messages: list[Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[*ASK, *messages], tools=[TIME])
    assert refused.value.param == param


def test_bad_tools_are_the_askers_alone(client: OpenAI) -> None:
    """A bad schema is refused, and who streams meanwhile notices nothing."""
    said = client.chat.completions.create(model=MODEL, messages=ASK, seed=2, max_tokens=40).choices[0].message.content
    stream = client.chat.completions.create(model=MODEL, messages=ASK, seed=2, max_tokens=40, stream=True)
    parts = [next(stream)]
    bad: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "strange"}}}}}
    for tools, choice, param in (
        ([bad], "required", "tools"),
        ([TIME], {"type": "function", "function": {"name": "weather"}}, "tool_choice"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], "required", "tools"),
        ([TIME, TIME], "auto", "tools"),
        ([TIME] * 200, "auto", "tools"),
    ):
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=ASK, tools=tools, tool_choice=choice)  # type: ignore[arg-type]
        assert refused.value.param == param
    parts += stream
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said


def test_tools_and_a_form_at_once(client: OpenAI) -> None:
    """The model either calls, or says what the form allows."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["sunny", "rainy"]}}}
    for seed in range(4):
        made = client.chat.completions.create(model=MODEL, messages=ASK, tools=[TIME], response_format=form, seed=seed, max_tokens=200)
        message = made.choices[0].message
        assert message.tool_calls or json.loads(message.content or "") in ("sunny", "rainy")


@pytest.mark.parametrize("limit", [12, 16, 20])
def test_a_call_that_was_cut_is_history_like_any(client: OpenAI, limit: int) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    made = client.chat.completions.create(**asked, messages=ASK, tool_choice="required", max_tokens=limit)
    choice = made.choices[0]
    assert choice.finish_reason == "length" and made.usage
    again: list[Any] = [*ASK, choice.message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
    after = client.chat.completions.create(**asked, messages=again, max_tokens=4)
    assert after.usage and after.usage.prompt_tokens_details
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) >= made.usage.total_tokens - 1, "found as it was run"
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = client.responses.create(
        model=MODEL,
        input=items,
        temperature=0,
        tool_choice="required",
        max_output_tokens=limit,
        tools=[{"type": "function", **WEATHER["function"]}],
    )
    told: Any = [item.to_dict() for item in response.output]
    references: Any = [{"type": "item_reference", "id": item["id"]} for item in told]
    for history in (told, references):
        counted = client.responses.input_tokens.count(input=[*items, *history, {"role": "user", "content": "Go on."}])
        assert counted.input_tokens > 0
    assert client.conversations.create(items=[*items, *told]).id
