"""What a Responses WebSocket keeps and forgets: warm-ups, `store: false`, failed continuations. On the real server and model. (slow)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.wire import Event, Wire
from tests.serving import Server

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_output_tokens": 12}
UNKNOWN_CALL = [{"type": "function_call_output", "call_id": "call_unknown", "output": "?"}]


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    with Wire(server.url) as opened:
        yield opened


def ended(events: list[Event]) -> dict[str, Any]:
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    response: dict[str, Any] = events[-1]["response"]
    return response


def refused(events: list[Event]) -> tuple[int, str]:
    assert events[-1]["type"] == "error", events[-1]
    return events[-1]["status"], events[-1]["error"]["code"]


# Warm-ups


def warm_up(wire: Wire, **fields: Any) -> dict[str, Any]:
    events = wire.respond(generate=False, **fields)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    return ended(events)


@pytest.mark.parametrize("store", [True, False])
def test_a_warm_up_says_nothing_and_the_next_turn_finds_its_prompt(wire: Wire, store: bool) -> None:
    instructions = f"You are a terse assistant of the kind {store} who knows everything about the capitals of the countries of the world."
    warmed = warm_up(wire, instructions=instructions, input="What is the capital of France?", store=store)
    assert (warmed["output"], warmed["usage"]["output_tokens"]) == ([], 0)
    assert warmed["usage"]["input_tokens"] > 30
    turn = {"instructions": instructions, "previous_response_id": warmed["id"], "store": store}
    following = ended(wire.respond(input="And of Italy?", **turn, **GREEDY))
    covered = warmed["usage"]["input_tokens"] - 5  # without the opening of a reply, where the second message stands now
    assert following["usage"]["input_tokens_details"]["cached_tokens"] >= covered
    answer = ended(wire.respond(**turn, **GREEDY))
    assert answer["usage"]["input_tokens"] == warmed["usage"]["input_tokens"], "without input it replies to what was warmed up"
    assert "Paris" in answer["output"][0]["content"][0]["text"]


def test_instructions_alone_can_be_warmed_up(wire: Wire) -> None:
    instructions = "You are a pirate, and you say arr at the beginning of each and every sentence that you speak, matey."
    warmed = warm_up(wire, instructions=instructions, input=[])
    prewarmed = warm_up_by_cache_option(wire, instructions)
    assert prewarmed["usage"]["input_tokens"] == warmed["usage"]["input_tokens"]
    turn = ended(wire.respond(instructions=instructions, previous_response_id=warmed["id"], input="Hi", **GREEDY))
    assert turn["usage"]["input_tokens_details"]["cached_tokens"] >= warmed["usage"]["input_tokens"] - 5
    assert refused(wire.respond(generate=False)) == (400, "invalid_value")


def warm_up_by_cache_option(wire: Wire, instructions: str) -> dict[str, Any]:
    return ended(wire.respond(instructions=instructions, input=[], prompt_cache_options={"prewarm": True}))


# What is not stored


def test_what_is_not_stored_lives_and_dies_with_the_connection(wire: Wire, server: Server) -> None:
    stored = ended(wire.respond(input="My name is Ana.", **GREEDY))
    hidden = ended(wire.respond(input="I am 7.", previous_response_id=stored["id"], store=False, **GREEDY))
    assert hidden["store"] is False
    more = ended(wire.respond(input="How old am I?", previous_response_id=hidden["id"], store=False, **GREEDY))
    assert more["usage"]["input_tokens_details"]["cached_tokens"] >= hidden["usage"]["total_tokens"] - 1
    for path in (hidden["id"], f"{hidden['id']}/input_items"):
        assert httpx.get(f"{server.url}/v1/responses/{path}").status_code == 404
    with Wire(server.url) as other:
        assert refused(other.respond(input="And now?", previous_response_id=hidden["id"])) == (400, "previous_response_not_found")
    kept = ended(wire.respond(input="Keep this.", previous_response_id=more["id"], **GREEDY))
    assert httpx.get(f"{server.url}/v1/responses/{kept['id']}").status_code == 200


def test_lanes_fork_what_is_not_stored(wire: Wire) -> None:
    root = ended(wire.respond(stream_id="main", input="My name is Ana.", store=False, **GREEDY))
    for lane in ("main", "fork"):
        wire.create(stream_id=lane, input="Who am I?", previous_response_id=root["id"], store=False, **GREEDY)
    both = [ended(wire.rest()), ended(wire.rest())]
    assert both[0]["output"][0]["content"] == both[1]["output"][0]["content"]
    assert both[0]["id"] != both[1]["id"]


@pytest.mark.parametrize("lane", [{}, {"stream_id": "main"}], ids=["default lane", "named lane"])
@pytest.mark.parametrize(
    "bad",
    [{"input": UNKNOWN_CALL}, {"input": 5}, {"temperature": 9, "input": "x"}, {"input": "0 " * 20_000}],
    ids=["an unknown call", "no input at all", "a bad field", "beyond the context"],
)
def test_a_failed_continuation_evicts_its_parent(wire: Wire, lane: dict[str, str], bad: dict[str, Any]) -> None:
    parent = ended(wire.respond(input="Hi", store=False, **GREEDY, **lane))
    follow = {"previous_response_id": parent["id"], "store": False, **lane}
    status, _ = refused(wire.respond(**follow, **bad))
    assert status == 400
    assert refused(wire.respond(input="Again.", **GREEDY, **follow)) == (400, "previous_response_not_found")
    assert ended(wire.respond(input="Anew.", store=False, **GREEDY, **lane))


def test_a_failed_fork_leaves_the_other_lanes_parent(wire: Wire) -> None:
    parent = ended(wire.respond(stream_id="main", input="Hi", store=False, **GREEDY))
    follow = {"previous_response_id": parent["id"], "store": False}
    for lane in ({"stream_id": "fork"}, {}):
        assert refused(wire.respond(input=UNKNOWN_CALL, **follow, **lane)) == (400, "invalid_value")
    assert ended(wire.respond(stream_id="main", input="Go on.", **follow, **GREEDY))


def test_a_stored_parent_stays_in_the_log(wire: Wire) -> None:
    parent = ended(wire.respond(input="Hi", **GREEDY))
    assert refused(wire.respond(input=UNKNOWN_CALL, previous_response_id=parent["id"])) == (400, "invalid_value")
    assert ended(wire.respond(input="Go on.", previous_response_id=parent["id"], **GREEDY))


def test_a_cancelled_continuation_is_no_failed_one(wire: Wire) -> None:
    parent = ended(wire.respond(input="Hi", store=False, **GREEDY))
    follow = {"previous_response_id": parent["id"], "store": False}
    wire.create(input="Write a very long story.", ignore_eos=True, max_output_tokens=2000, **follow)
    wire.send({"type": "response.cancel"})
    assert ended(wire.rest())["incomplete_details"] == {"reason": "cancelled"}
    assert ended(wire.respond(input="Go on.", **follow, **GREEDY))


# The rest of the protocol


def test_steering_is_refused_in_the_protocols_own_event(wire: Wire) -> None:
    wire.create(stream_id="a", input="Write a very long story.", ignore_eos=True, max_output_tokens=300)
    response = wire.receive()["response"]
    wire.send({"type": "response.steer", "previous_response_id": response["id"], "input": "Shorter."})
    events = [wire.receive()]
    while events[-1]["type"] != "response.steer.failed":
        events.append(wire.receive())
    failed = events[-1]
    assert (failed["error"]["code"], failed["stream_id"]) == ("steering_not_supported", "a")
    assert failed["steer"] == {"previous_response_id": response["id"], "input": "Shorter."}
    wire.send({"type": "response.cancel", "stream_id": "a"})
    ended(wire.rest())
    wire.send(
        {
            "type": "response.steer",
            "previous_response_id": response["id"],
            "input": [{"type": "message", "role": "user", "content": "Shorter."}],
        }
    )
    assert "stream_id" not in wire.receive(), "what has ended is on no lane"
    wire.send({"type": "response.steer"})
    assert refused(wire.rest()) == (400, "invalid_value")


def test_fields_of_other_transports_are_ignored(server: Server) -> None:
    with Wire(server.url, additional_headers={"OpenAI-Beta": "responses_websockets=2026-02-06"}) as wire:
        fields = {"stream": True, "stream_options": {"include_obfuscation": True}, "background": True}
        plain, other = (wire.respond(input="Hi", **fields, **GREEDY) for fields in ({}, fields))
    assert {event["type"] for event in other} == {event["type"] for event in plain}
    assert ended(other)["background"] is False
    assert ended(other)["output"][0]["content"] == ended(plain)["output"][0]["content"]


def test_frames_may_be_binary(wire: Wire) -> None:
    wire.send(json.dumps({"type": "response.create", "stream_id": "b", "input": "Hi", **GREEDY}).encode())
    assert ended(wire.rest())["status"] in ("completed", "incomplete")
