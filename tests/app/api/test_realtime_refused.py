"""What Realtime refuses, and whom it lets in: bad events, bad openings, keys. On the real server and model. (slow)"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.app.realtime_wire import RealtimeWire
from tests.app.wire import Event
from tests.serving import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def wire(server: Server) -> Iterator[RealtimeWire]:
    with RealtimeWire(server.url) as opened:
        yield opened


# What no client should send


def update(**session: Any) -> Event:
    return {"type": "session.update", "session": session}


def create(**item: Any) -> Event:
    return {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": "hi", **item}}


def respond(**response: Any) -> Event:
    return {"type": "response.create", "response": response}


USER: Event = {"type": "message", "role": "user", "content": "hi"}
BAD_TOOL: Event = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}}}
ASIDE: Event = {"input": [USER], "conversation": "none"}

BAD_EVENTS = {
    "not JSON": ("{", "invalid_json", None),
    "not an object": ("[1]", "invalid_value", None),
    "bytes that are no UTF-8": (b"\xff\xfe", "invalid_json", None),
    "no type": ({}, "invalid_value", "type"),
    "an unknown type": ({"type": "session.destroy"}, "invalid_value", "type"),
    "audio in": ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio_not_supported", "type"),
    "audio's end": ({"type": "input_audio_buffer.commit"}, "audio_not_supported", "type"),
    "audio out": ({"type": "output_audio_buffer.clear"}, "audio_not_supported", "type"),
    "an unknown field": (update(temprature=1), "invalid_value", "session.temprature"),
    "a field of the wrong type": (update(instructions=5), "invalid_value", "session.instructions"),
    "a reply in audio": (update(output_modalities=["text", "audio"]), "unsupported_value", "session.output_modalities"),
    "no modality": (update(output_modalities=[]), "unsupported_value", "session.output_modalities"),
    "a voice": (update(voice="ash"), "unsupported_value", "session.voice"),
    "turns found by voice": (update(turn_detection={"type": "server_vad"}), "unsupported_value", "session.turn_detection"),
    "a transcription": (update(type="transcription"), "unsupported_value", "session.type"),
    "another model": (update(model="gpt-9"), "invalid_value", "session.model"),
    "a part of the context": (
        update(truncation={"type": "retention_ratio", "retention_ratio": 0.8}),
        "unsupported_value",
        "session.truncation",
    ),
    "a server's tools": (update(tools=[{"type": "mcp", "server_label": "x"}]), "unsupported_tool", "session.tools.0"),
    "a tool that is not there": (update(tool_choice={"type": "function", "name": "f"}), "invalid_value", "session.tool_choice"),
    "no tokens": (update(max_output_tokens=0), "invalid_value", "session.max_output_tokens"),
    "endless tokens": (update(max_output_tokens="all"), "unsupported_value", "session.max_output_tokens"),
    "an unknown role": (create(role="king"), "invalid_value", "item.role"),
    "audio in a message": (create(content=[{"type": "input_audio", "audio": "AAAA"}]), "unsupported_content", "item.content"),
    "an unknown item": (create(type="dream"), "unsupported_item", "item"),
    "a long id": (create(id="x" * 257), "invalid_value", "item.id"),
    "the front's id": (create(id="root"), "invalid_value", "item.id"),
    "an unknown conversation": (respond(conversation="conv_x"), "invalid_value", "response.conversation"),
    "no input, instructions or conversation": (respond(input=[], conversation="none"), "invalid_value", None),
    "nothing to reply to": ({"type": "response.create"}, "invalid_value", "response.input"),
    "another conversation": (update(conversation_id="conv_x"), "invalid_value", "session.conversation_id"),
    "an output of no call": (create(type="function_call_output", call_id="x", output="1"), "invalid_value", "item.call_id"),
    "too many tokens": (
        respond(**ASIDE, max_output_tokens=1 << 40),
        "invalid_value",
        "response.max_output_tokens",
    ),
    "a reply that is spoken": (respond(output_modalities=["audio"]), "unsupported_value", "response.output_modalities"),
    "too much metadata": (respond(metadata={str(at): "x" for at in range(17)}), "invalid_value", "response.metadata"),
    "a bad schema": (
        respond(input=[], tool_choice="required", tools=[{"type": "function", "name": "f", "parameters": {"type": "never"}}]),
        "invalid_value",
        None,
    ),
    "a bad schema of a tool that is to be called": (
        respond(**ASIDE, tool_choice="required", tools=[BAD_TOOL]),
        None,
        "response.tools",
    ),
}


@pytest.mark.parametrize("name", BAD_EVENTS)
def test_a_bad_event_is_refused_and_the_session_goes_on(wire: RealtimeWire, name: str) -> None:
    frame, code, param = BAD_EVENTS[name]
    if isinstance(frame, dict):
        frame = {**frame, "event_id": "mine"}
    assert isinstance(frame, dict | str | bytes)
    wire.send(frame)
    refused = wire.receive()
    assert refused["type"] == "error"
    error = refused["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code or error["code"]), error
    if param:
        assert error["param"] == param or error["param"].startswith(f"{param}.")
    assert error["event_id"] == ("mine" if isinstance(frame, dict) else None)
    assert any(word in error["message"] for word in ("expected", "supported", "unknown field", "cannot")), error["message"]
    assert wire.ask(update())["session"] == wire.session


def test_what_the_session_said_is_named_as_the_sessions(wire: RealtimeWire) -> None:
    assert wire.ask(update(tools=[BAD_TOOL], max_output_tokens=1 << 40))["type"] == "session.updated"
    assert wire.ask(respond(**ASIDE, tool_choice="required", max_output_tokens=5))["error"]["param"].startswith("session.tools")
    assert wire.ask(respond(**ASIDE, tool_choice="none"))["error"]["param"] == "session.max_output_tokens"


@pytest.mark.parametrize(
    ("query", "code"), [("?model=gpt-9", "model_not_found"), ("?conversation=conv_x", "conversation_not_found"), ("?call_id=x", None)]
)
def test_what_cannot_be_opened_is_told_and_closed(server: Server, query: str, code: str | None) -> None:
    with RealtimeWire(server.url, query) as wire:
        assert wire.opening["type"] == "error"
        assert wire.opening["error"]["code"] == (code or "unsupported_value")
        with pytest.raises(ConnectionClosed) as closed:
            wire.receive()
    assert closed.value.rcvd
    assert closed.value.rcvd.code == 1008


def test_a_model_by_either_of_its_names(new_server: Callable[..., Server]) -> None:
    named = new_server("--model-name", "mine").start()
    with RealtimeWire(named.url, "?model=SmolLM2-135M-Instruct") as wire:
        assert wire.session["model"] == "mine"
        for name in ("mine", "SmolLM2-135M-Instruct"):
            assert wire.ask(update(model=name))["session"]["model"] == "mine"


# Keys


def test_keys_and_owners(new_server: Callable[..., Server]) -> None:
    """The key of a page: in a subprotocol, never echoed; an ephemeral one opens this alone, as its owner, with its settings."""
    guarded = new_server("--api-key", "key-of-ana-alone", "--api-key", "key-of-bob-alone").start()
    with pytest.raises(InvalidStatus):
        RealtimeWire(guarded.url)
    offered = ["realtime", "openai-insecure-api-key.key-of-ana-alone", "openai-beta.realtime-v1"]
    with RealtimeWire(guarded.url, subprotocols=offered) as wire:
        assert wire.connection.subprotocol == "realtime"
        wire.say("Hello")
        conversation = wire.session["conversation_id"]

    secrets = f"{guarded.url}/v1/realtime/client_secrets"
    assert httpx.post(secrets).status_code == 401
    settings = {"instructions": "Be brief.", "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 5, "temperature": 0}
    asked = {"expires_after": {"anchor": "created_at", "seconds": 30}, "session": {"type": "realtime", **settings}}
    made = httpx.post(secrets, json=asked, headers={"Authorization": "Bearer key-of-ana-alone"}).json()
    assert 25 <= made["expires_at"] - time.time() <= 31
    shown = made["session"]
    offered = ["realtime", f"openai-insecure-api-key.{made['value']}"]
    with RealtimeWire(guarded.url, f"?conversation={conversation}", subprotocols=offered) as page:
        assert page.connection.subprotocol == "realtime"
        begun = {"id": page.session["id"], "expires_at": page.session["expires_at"], "conversation_id": conversation}
        assert page.session == shown | begun
        assert page.reply(tool_choice="none", ignore_eos=True)["usage"]["output_tokens"] == 5
    for other in ({"Authorization": f"Bearer {made['value']}"},):
        assert httpx.get(f"{guarded.url}/v1/models", headers=other).status_code == 401
        assert httpx.post(secrets, headers=other).status_code == 401
    bob = {"Authorization": "Bearer key-of-bob-alone"}
    with RealtimeWire(guarded.url, f"?conversation={conversation}", additional_headers=bob) as stranger:
        assert stranger.opening["error"]["code"] == "conversation_not_found"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now"}}, "expires_after.anchor"),
        ({"session": {"output_modalities": ["audio"]}}, "session.output_modalities"),
        ({"session": {"type": "transcription"}}, "session.type"),
        ({"session": {"model": "gpt-9"}}, "session.model"),
        ({"sesion": {}}, "sesion"),
        ({"session": {"conversation_id": "conv_x"}}, "session.conversation_id"),
    ],
)
def test_client_secrets_that_are_refused(server: Server, asked: Event, param: str | None) -> None:
    answer = httpx.post(f"{server.url}/v1/realtime/client_secrets", json=asked)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
