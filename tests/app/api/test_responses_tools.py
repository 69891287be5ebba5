"""Tools, structured output and log probabilities over Responses, on the real server and model. (slow)"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from tests.app.wire import Event, Wire, check_response, text_of
from tests.serving import Server

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
}
TIME = {**WEATHER, "name": "get_time", "description": "Get the time in a city."}
CALLING = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 100}
ASKED = "What is the weather in Paris?"


class City(BaseModel):
    name: str
    big: bool


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    with Wire(server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def called(events: list[Event]) -> dict[str, Any]:
    """The one call that a response consists of."""
    (call,) = events[-1]["response"]["output"]
    assert call["type"] == "function_call", call
    return dict(call)


def test_the_events_of_a_call_in_order(wire: Wire) -> None:
    events = wire.respond(input=ASKED, **CALLING)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("response.function_call_arguments.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * deltas,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added, done, item_done, call = events[2]["item"], events[-3], events[-2]["item"], called(events)
    arguments = "".join(event["delta"] for event in events[3 : 3 + deltas])
    assert arguments == done["arguments"] == call["arguments"]
    assert set(json.loads(arguments)) == {"city"}
    assert (added["arguments"], added["status"]) == ("", "in_progress")
    assert {added["id"], item_done["id"], call["id"]} == {done["item_id"]}
    assert added["call_id"] == call["call_id"]
    assert item_done == call


@pytest.mark.parametrize("output", ["21 degrees", [{"type": "input_text", "text": "21 "}, {"type": "input_text", "text": "degrees"}]])
def test_an_output_continues_the_turn(wire: Wire, output: Any) -> None:
    first = wire.respond(input=ASKED, **CALLING)
    answer = [{"type": "function_call_output", "call_id": called(first)["call_id"], "output": output}]
    second = wire.respond(
        previous_response_id=first[-1]["response"]["id"],
        input=answer,
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_output_tokens=24,
    )
    response = second[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["message"]
    assert "tools" in response
    again = wire.respond(
        previous_response_id=first[-1]["response"]["id"], input=answer, tool_choice="none", temperature=0, max_output_tokens=1
    )
    assert again[-1]["type"] != "error", "the branch is free of the other's output"
    twice = wire.respond(previous_response_id=response["id"], input=answer)[-1]
    assert (twice["status"], twice["error"]["param"]) == (400, "input")


def test_a_whole_history_without_a_store(wire: Wire) -> None:
    calling = {**CALLING, "store": False}
    first = wire.respond(input=ASKED, **calling)
    call = called(first)
    history = [
        {"role": "user", "content": ASKED},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"},
    ]
    second = wire.respond(input=history, **{**calling, "tool_choice": {"type": "function", "name": "get_weather"}})
    usage = second[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= first[-1]["response"]["usage"]["total_tokens"] - 1, "found by its text"
    assert called(second)["name"] == "get_weather"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "function_call_output", "call_id": "call_x", "output": "?"}], "input"),
        ([{"type": "function_call_output", "output": "?"}], "input.0"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}], "input.0.arguments"),
        ([{"type": "function_call", "call_id": "a", "name": "f g", "arguments": "{}"}], "input.0.name"),
        ([{"type": "function_call", "call_id": "a", "name": "f"}], "input.0"),
        ([{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_nowhere"}], "input.1"),
        ([{"role": "user", "content": "x"}, {"type": "item_reference"}], "input.1"),
    ],
)
def test_bad_items(wire: Wire, items: list[dict[str, Any]], param: str) -> None:
    (error,) = wire.respond(input=items)
    assert error["error"]["param"] == param
    assert error["status"] in (400, 404)


def test_the_choice_of_a_tool(wire: Wire) -> None:
    both = {**CALLING, "tools": [WEATHER, TIME]}
    for name in ("get_time", "get_weather"):
        assert called(wire.respond(input=ASKED, **{**both, "tool_choice": {"type": "function", "name": name}}))["name"] == name
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    assert called(wire.respond(input=ASKED, **{**both, "tool_choice": allowed}))["name"] == "get_time"
    none = wire.respond(input=ASKED, **{**both, "tool_choice": "none"})[-1]["response"]
    assert [item["type"] for item in none["output"]] == ["message"]
    auto = wire.respond(input=ASKED, **{**both, "tool_choice": "auto"})[-1]
    assert auto["type"] in ("response.completed", "response.incomplete")


def test_references_stand_for_the_items_themselves(wire: Wire, client: OpenAI) -> None:
    """As clients do that send a whole chat with the ids of its replies."""
    said = wire.respond(input="What is the capital of France?", temperature=0, max_output_tokens=24)[-1]["response"]
    called_first = wire.respond(input=ASKED, **CALLING)[-1]["response"]
    call = called_first["output"][0]
    spelled, named = (
        [
            {"role": "user", "content": "What is the capital of France?"},
            message,
            {"role": "user", "content": ASKED},
            again,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"},
        ]
        for message, again in (
            (said["output"][0], call),
            ({"type": "item_reference", "id": said["output"][0]["id"]}, {"type": "item_reference", "id": call["id"]}),
        )
    )
    texts = [text_of(wire.respond(input=items, temperature=0, max_output_tokens=24)) for items in (spelled, named)]
    assert texts[0] == texts[1]
    counts = {client.responses.input_tokens.count(input=items).input_tokens for items in (spelled, named)}  # type: ignore[arg-type]
    assert len(counts) == 1
    client.responses.delete(said["id"])
    assert wire.respond(input=named)[-1]["error"]["code"] == "item_not_found"


def test_structured_output(wire: Wire, client: OpenAI, server: Server) -> None:
    schema = City.model_json_schema() | {"additionalProperties": False}
    format = {"type": "json_schema", "name": "city", "schema": schema, "strict": True}
    for seed in range(3):
        events = wire.respond(input="Describe Paris.", text={"format": format}, seed=seed, max_output_tokens=120)
        if events[-1]["type"] == "response.completed":
            City.model_validate_json(text_of(events))
    assert events[-1]["response"]["text"]["format"]["schema"] == schema
    asked = {"model": server.model, "input": "Is Paris a big city?", "temperature": 0, "max_output_tokens": 200}
    parsed = client.responses.parse(text_format=City, **asked)  # type: ignore[arg-type]
    assert isinstance(parsed.output_parsed, City)
    object = text_of(wire.respond(input="A JSON object.", text={"format": {"type": "json_object"}}, seed=1, max_output_tokens=40))
    assert object.lstrip().startswith("{")
    number = text_of(wire.respond(input="A number.", text={"format": {"type": "regex", "regex": "[0-9]{3}"}}, max_output_tokens=9))
    assert number.isdigit()
    assert len(number) == 3
    bad = {"type": "nothing"}
    bad_tool = {**WEATHER, "parameters": {"type": "object", "properties": {"a": bad}}}
    fields: list[tuple[str, Any]] = [
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": bad}}}),
        ("text.format", {"extra_body": {"text": {"format": {"type": "regex", "regex": "("}}}}),
        ("tools", {"tools": [bad_tool], "tool_choice": "required"}),
    ]
    for param, field in fields:
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(model=server.model, input="x", **field)
        assert refused.value.param == param


def test_log_probabilities(wire: Wire, server: Server) -> None:
    asked = {"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 12, "top_logprobs": 3}
    events = wire.respond(**asked, include=["message.output_text.logprobs"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    part = events[-1]["response"]["output"][0]["content"][0]
    tokens = [token for event in deltas for token in event["logprobs"]]
    assert part["logprobs"][: len(tokens)] == tokens
    assert b"".join(bytes(token["bytes"]) for token in part["logprobs"]).decode() == part["text"]
    for token in tokens:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == token["logprob"], "it was greedy"
        assert sum(math.exp(other["logprob"]) for other in token["top_logprobs"]) <= 1.0001
    stored = httpx.get(f"{server.url}/v1/responses/{events[-1]['response']['id']}").json()
    check_response(stored)
    assert stored == events[-1]["response"]
    plain = wire.respond(**{**asked, "top_logprobs": None})[-1]["response"]["output"][0]["content"][0]
    assert (plain["text"], plain["logprobs"]) == (part["text"], [])
