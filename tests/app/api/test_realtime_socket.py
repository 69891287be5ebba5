"""Realtime on the wire, as no SDK would send it, on the real server and model. (slow)"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.app.realtime_wire import GREEDY, LONG, RealtimeWire
from tests.app.wire import Event, text_of
from tests.serving import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def wire(server: Server) -> Iterator[RealtimeWire]:
    with RealtimeWire(server.url) as opened:
        yield opened


def held(server: Server, wire: RealtimeWire) -> list[Event]:
    """The conversation's items, as another protocol shows them."""
    page = httpx.get(f"{server.url}/v1/conversations/{wire.session['conversation_id']}/items?order=asc").raise_for_status()
    return list(page.json()["data"])


HELLO = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]

# The session


def test_a_session_is_shown_whole_and_updated_in_part(wire: RealtimeWire, server: Server) -> None:
    session = wire.session
    assert (session["object"], session["type"], session["model"]) == ("realtime.session", "realtime", server.model)
    assert 3500 < session["expires_at"] - time.time() < 3700
    assert (session["max_output_tokens"], session["output_modalities"]) == ("inf", ["text"])
    first = wire.ask({"type": "session.update", "session": {"instructions": "Be brief.", "max_output_tokens": 7}})["session"]
    assert first == session | {"instructions": "Be brief.", "max_output_tokens": 7}
    second = wire.ask({"type": "session.update", "session": {"instructions": "", "max_output_tokens": "inf", "seed": 5}})["session"]
    assert second == session | {"seed": 5}
    assert wire.ask({"type": "session.update", "session": second})["session"] == second, "as it was shown it may be sent back"
    for_speech = {
        "audio": {
            "input": {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": {"type": "semantic_vad"}, "transcription": None},
            "output": {"voice": "ash", "format": {"type": "audio/pcm", "rate": 24000}},
        },
        "tracing": "auto",
    }
    assert wire.ask({"type": "session.update", "session": for_speech})["session"] == second


def test_settings_of_the_session_and_of_one_response(wire: RealtimeWire) -> None:
    wire.ask({"type": "session.update", "session": {"max_output_tokens": 3, "ignore_eos": True, "temperature": 0}})
    wire.say("Hello")
    assert wire.reply()["usage"]["output_tokens"] == 3
    response = wire.reply(max_output_tokens=5, instructions="You are a pirate and speak like one, always.")
    assert (response["usage"]["output_tokens"], response["status"]) == (5, "incomplete")
    assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    again = wire.reply()
    assert again["usage"]["output_tokens"] == 3


def test_an_empty_session_leaves_nothing_behind(server: Server) -> None:
    with RealtimeWire(server.url) as wire:
        assert wire.respond()[-1]["type"] == "error"
        unknown = f"{server.url}/v1/conversations/{wire.session['conversation_id']}"
        assert httpx.get(unknown).status_code == 404
        wire.say("Hello")
        assert httpx.get(unknown).json()["title"] == "Hello"
        listed = httpx.get(f"{server.url}/v1/conversations").json()["data"]
        assert listed[0]["id"] == wire.session["conversation_id"]


# Items


def test_items_are_placed_named_found_and_deleted(wire: RealtimeWire, server: Server) -> None:
    second = wire.say("two", item={"id": "item_two"})
    assert second["id"] == "item_two"
    create = {"type": "conversation.item.create", "item": {"type": "message", "role": "system", "content": "one"}}
    first = wire.ask({**create, "previous_item_id": "root"})
    wire.receive()
    assert first["previous_item_id"] is None
    third = wire.ask({**create, "item": {**create["item"], "content": "three"}, "previous_item_id": "item_two"})  # type: ignore[dict-item]
    wire.receive()
    assert third["previous_item_id"] == "item_two"
    assert [item["content"][0]["text"] for item in held(server, wire)] == ["one", "two", "three"]

    found = wire.ask({"type": "conversation.item.retrieve", "item_id": "item_two"})
    assert found["item"] == second
    again = wire.ask({**create, "item": {**create["item"], "id": "item_two"}})  # type: ignore[dict-item]
    assert again["error"]["code"] == "item_already_exists"
    nowhere = wire.ask({**create, "previous_item_id": "item_x"})
    assert nowhere["error"]["param"] == "previous_item_id"

    gone = wire.ask({"type": "conversation.item.delete", "item_id": "item_two"})
    assert (gone["type"], gone["item_id"]) == ("conversation.item.deleted", "item_two")
    assert wire.ask({"type": "conversation.item.retrieve", "item_id": "item_two"})["error"]["code"] == "item_not_found"
    assert [item["content"][0]["text"] for item in held(server, wire)] == ["one", "three"]
    assert wire.say("two again", item={"id": "item_two"})["id"] == "item_two"


def test_deleting_what_was_said_changes_the_next_prompt(wire: RealtimeWire) -> None:
    wire.say("Hello", item={"id": "keep"})
    alone = wire.reply(conversation="none", **GREEDY)["usage"]["input_tokens"]
    wire.say("A quite long sentence that is to be forgotten.", item={"id": "forget"})
    assert wire.reply(conversation="none", **GREEDY)["usage"]["input_tokens"] > alone
    wire.ask({"type": "conversation.item.delete", "item_id": "forget"})
    assert wire.reply(conversation="none", **GREEDY)["usage"]["input_tokens"] == alone


def test_a_reply_is_truncated_to_what_was_heard(wire: RealtimeWire, server: Server) -> None:
    wire.say("What is the capital of France?")
    item = wire.reply(**GREEDY)["output"][0]
    text = item["content"][0]["text"]
    truncate = {"type": "conversation.item.truncate", "item_id": item["id"], "content_index": 0}
    for wrong, param in (
        ({"audio_end_ms": 1500}, "audio_end_ms"),
        ({}, "audio_end_ms"),
        ({"text_end": len(text) + 1}, "text_end"),
        ({"audio_end_ms": 0, "content_index": 1}, "content_index"),
        ({"audio_end_ms": 0, "item_id": "item_x"}, "item_id"),
        ({"audio_end_ms": 0, "item_id": held(server, wire)[0]["id"]}, "item_id"),
    ):
        assert wire.ask(truncate | wrong)["error"]["param"] == param
    cut = wire.ask(truncate | {"audio_end_ms": 0, "text_end": 7})
    assert (cut["type"], cut["item_id"], cut["text_end"]) == ("conversation.item.truncated", item["id"], 7)
    assert wire.ask({"type": "conversation.item.retrieve", "item_id": item["id"]})["item"]["content"][0]["text"] == text[:7]
    assert wire.reply(**GREEDY)["status"] in ("completed", "incomplete")
    emptied = wire.ask(truncate | {"audio_end_ms": 0})
    assert (emptied["type"], emptied["audio_end_ms"]) == ("conversation.item.truncated", 0)
    assert held(server, wire)[1]["content"][0]["text"] == ""


def test_an_interruption_is_a_cancel_and_a_truncate_at_once(wire: RealtimeWire) -> None:
    wire.say("Tell me a very long story.")
    wire.send({"type": "response.create", "response": LONG})
    item_id = wire.until("response.output_text.delta")[-1]["item_id"]
    wire.send({"type": "response.cancel"})
    wire.send({"type": "conversation.item.truncate", "item_id": item_id, "content_index": 0, "audio_end_ms": 0, "text_end": 1})
    wire.send({"type": "response.create", "response": GREEDY})
    first = wire.until("response.done", "error")
    assert first[-1]["response"]["status"] == "cancelled"
    rest = wire.until("response.done", "error")
    assert rest[-1]["type"] == "response.done"
    assert [event["type"] for event in rest[:2]] == ["conversation.item.truncated", "response.created"]


# Responses


def test_one_response_at_a_time_writes_to_the_conversation(wire: RealtimeWire, server: Server) -> None:
    wire.say("Tell me a very long story.")
    wire.send({"type": "response.create", "response": LONG})
    wire.until("response.output_text.delta")
    wire.send({"type": "response.create", "event_id": "too soon"})
    refused = wire.until("error")[-1]["error"]
    assert (refused["code"], refused["event_id"]) == ("conversation_already_has_active_response", "too soon")
    with RealtimeWire(server.url, f"?conversation={wire.session['conversation_id']}") as other:
        assert other.respond()[-1]["error"]["code"] == "conversation_already_has_active_response"
        assert other.ask({"type": "response.cancel"})["error"]["code"] == "response_cancel_not_active"
    wire.send({"type": "response.cancel"})
    assert wire.until("response.done")[-1]["response"]["status"] == "cancelled"


def test_a_cancel_finds_what_is_not_accepted_yet_and_nothing_is_an_error(wire: RealtimeWire) -> None:
    wire.say("Tell me a very long story.")
    wire.send({"type": "response.create", "response": LONG})
    wire.send({"type": "response.cancel", "event_id": "1"})
    events = wire.until("response.done", "error")
    assert events[-1]["response"]["status"] == "cancelled"
    assert len(events) < 100
    for cancel in ({}, {"response_id": events[-1]["response"]["id"]}, {"response_id": "resp_x"}):
        refused = wire.ask({"type": "response.cancel", "event_id": "2", **cancel})["error"]
        assert (refused["code"], refused["event_id"]) == ("response_cancel_not_active", "2")
    assert wire.reply(**GREEDY)["status"] in ("completed", "incomplete")


def test_what_follows_a_cancel_at_once_need_not_wait_for_it(wire: RealtimeWire) -> None:
    wire.say("Tell me a very long story.")
    wire.send({"type": "response.create", "response": LONG})
    first = wire.until("response.output_text.delta")[0]["response"]["id"]
    wire.send({"type": "response.cancel"})
    wire.send({"type": "response.create", "response": GREEDY})
    cancelled, following = wire.until("response.done", "error"), wire.until("response.done", "error")
    assert (cancelled[-1]["response"]["id"], cancelled[-1]["response"]["status"]) == (first, "cancelled")
    assert following[0]["type"] == "response.created"
    assert following[-1]["response"]["status"] in ("completed", "incomplete")


def test_one_beside_the_conversation_is_cancelled_by_its_id(wire: RealtimeWire) -> None:
    wire.say("Tell me a very long story.")
    wire.send({"type": "response.create", "response": {**LONG, "conversation": "none"}})
    id = wire.until("response.output_text.delta")[-1]["response_id"]
    wire.send({"type": "response.cancel"})
    assert wire.until("error")[-1]["error"]["code"] == "response_cancel_not_active", "it is none of the conversation's"
    wire.send({"type": "response.cancel", "response_id": id})
    assert wire.until("response.done")[-1]["response"]["status"] == "cancelled"


def test_beside_the_conversation_the_prompt_is_the_conversations_and_the_cache_knows_it(wire: RealtimeWire) -> None:
    wire.say("What is the capital of France?")
    ours = wire.reply(**GREEDY)
    wire.say("And of Italy?")
    beside = wire.reply(conversation="none", **GREEDY)
    assert "Rome" in beside["output"][0]["content"][0]["text"]
    assert beside["usage"]["input_token_details"]["cached_tokens"] >= ours["usage"]["total_tokens"]
    again = wire.reply(**GREEDY)
    assert again["output"][0]["content"] == beside["output"][0]["content"]
    assert again["usage"]["input_tokens"] == beside["usage"]["input_tokens"]


def test_at_most_sixteen_beside_the_conversation(wire: RealtimeWire) -> None:
    wire.say("Tell me a very long story.")
    for _ in range(17):
        wire.send({"type": "response.create", "response": {**LONG, "conversation": "none"}})
    assert wire.until("error")[-1]["error"]["code"] == "rate_limit_exceeded"


def test_a_responses_own_input(wire: RealtimeWire, server: Server) -> None:
    wire.say("My name is Ana.", item={"id": "item_ana"})
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the capital of France?"}]}
    plain = wire.reply(conversation="none", input=[question], **GREEDY)
    assert "Paris" in plain["output"][0]["content"][0]["text"]
    referring = wire.reply(conversation="none", input=[{"type": "item_reference", "id": "item_ana"}, question], **GREEDY)
    assert referring["usage"]["input_tokens"] > plain["usage"]["input_tokens"]
    refused = wire.respond(conversation="none", input=[{"type": "item_reference", "id": "item_x"}])[-1]["error"]
    assert (refused["code"], refused["param"]) == ("item_not_found", "response.input.0.id")
    empty = wire.reply(input=[], instructions="Say hello.", **GREEDY)
    assert empty["usage"]["input_tokens"] < plain["usage"]["input_tokens"]
    assert [item["role"] for item in held(server, wire)] == ["user", "assistant"], "its reply is the conversation's, its input is not"
    following = wire.reply(**GREEDY)
    assert following["status"] in ("completed", "incomplete")


def test_a_call_and_its_text_go_together(wire: RealtimeWire) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    wire.say("Call f twice.")
    response = wire.reply(tools=[tool], tool_choice={"type": "function", "name": "f"}, temperature=0, max_output_tokens=500)
    calls = response["output"]
    assert {call["type"] for call in calls} == {"function_call"}
    reference = wire.reply(
        conversation="none",
        input=[{"type": "item_reference", "id": call["id"]} for call in calls]
        + [{"type": "function_call_output", "call_id": call["call_id"], "output": "done"} for call in calls],
        **GREEDY,
    )
    assert reference["status"] in ("completed", "incomplete")
    wire.send({"type": "conversation.item.delete", "item_id": calls[0]["id"]})
    assert [wire.receive()["item_id"] for _ in calls] == [call["id"] for call in calls]


def test_what_a_client_says_was_called(wire: RealtimeWire) -> None:
    wire.say("How is the weather?")
    call = {"type": "function_call", "call_id": "call_mine", "name": "weather", "arguments": "{}", "id": "item_call"}
    added = wire.ask({"type": "conversation.item.create", "item": call})
    wire.receive()
    assert added["item"] == call | {"object": "realtime.item", "status": "completed"}
    unknown = {"type": "function_call_output", "call_id": "call_x", "output": "rain"}
    assert wire.ask({"type": "conversation.item.create", "item": unknown})["type"] == "error"
    output = wire.ask({"type": "conversation.item.create", "item": {**unknown, "call_id": "call_mine"}})
    wire.receive()
    assert (output["item"]["output"], output["previous_item_id"]) == ("rain", "item_call")
    assert wire.reply(**GREEDY)["output"]


def test_texts_of_a_reply_are_what_its_events_say(wire: RealtimeWire) -> None:
    wire.say("Tell me a story.")
    events = wire.respond(max_output_tokens=30, seed=3)
    assert text_of(events) == events[-1]["response"]["output"][0]["content"][0]["text"]


# Ends


def test_a_reply_outlives_its_socket_and_one_beside_the_conversation_does_not(server: Server) -> None:
    with RealtimeWire(server.url) as gone:
        gone.say("Count to 20.")
        gone.send({"type": "response.create", "response": {**LONG, "max_output_tokens": 40}})
        response = gone.until("response.created")[-1]["response"]
        gone.send({"type": "response.create", "response": {**LONG, "max_output_tokens": 6000, "conversation": "none"}})
        gone.until("response.created")
    url = f"{server.url}/v1/responses/{response['id']}"
    with httpx.stream("GET", f"{url}?stream=true", timeout=60) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert events[-1]["response"]["usage"]["output_tokens"] == 40
    server.wait_until_idle()


def test_a_cancel_counts_even_if_the_socket_closes_before_the_response_is_accepted(server: Server) -> None:
    for _ in range(5):
        with RealtimeWire(server.url) as gone:
            gone.say("Tell me a very long story. " * 500)
            gone.send({"type": "response.create", "response": {**LONG, "max_output_tokens": 3000}})
            gone.send({"type": "response.cancel"})
    server.wait_until_idle()


def test_a_client_that_does_not_read_is_still_heard(server: Server) -> None:
    """Events that it does not take fill its socket, and its cancel is carried out all the same; others notice nothing."""
    with RealtimeWire(server.url, max_queue=1) as deaf:
        deaf.say("x " * 100_000, item={"id": "long"})
        deaf.send({"type": "response.create", "response": {**LONG, "max_output_tokens": 8000, "conversation": "none", "input": HELLO}})
        id = deaf.until("response.created")[-1]["response"]["id"]
        for _ in range(400):  # each is answered by 200 KB
            deaf.send({"type": "conversation.item.retrieve", "item_id": "long"})
        with RealtimeWire(server.url) as other:
            other.say("Hello")
            assert other.reply(max_output_tokens=8, ignore_eos=True)["usage"]["output_tokens"] == 8
        deaf.send({"type": "response.cancel", "response_id": id})
        server.wait_until_idle()
        deaf.connection.socket.close()
