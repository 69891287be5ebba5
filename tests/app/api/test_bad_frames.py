"""What no client should send, on the real server: each frame gets a clear error and harms nobody. (slow)"""

from __future__ import annotations

import re
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.app.wire import Event, Wire
from tests.serving import Server

pytestmark = pytest.mark.slow


def create(**fields: Any) -> Event:
    return {"type": "response.create", "input": "hi"} | fields


BAD_FRAMES = {
    "not JSON": ("{", "invalid_json", None),
    "not an object": ("[1]", "invalid_value", None),
    "bytes that are no UTF-8": (b"\xff\xfe", "invalid_json", None),
    "a lone surrogate": ('{"type":"response.create","input":"\\ud800"}', "invalid_json", None),
    "no type": ({"input": "hi"}, "invalid_value", None),
    "an unknown type": ({"type": "response.destroy"}, "invalid_value", "type"),
    "a bad lane": (create(stream_id="a b", input="hi"), "invalid_stream_id", "stream_id"),
    "a wrong type": (create(input=5), "invalid_value", "input"),
    "an unknown field": (create(temprature=1), "invalid_value", "temprature"),
    "an unknown model": (create(model="gpt-9"), "model_not_found", "model"),
    "an unknown response": (create(previous_response_id="resp_x"), "previous_response_not_found", "previous_response_id"),
    "an unknown conversation": (create(conversation="conv_x"), "conversation_not_found", "conversation"),
    "a cancel of nothing": ({"type": "response.cancel", "response_id": "resp_x"}, "response_not_found", "response_id"),
    "no input": ({"type": "response.create"}, "invalid_value", "input"),
    "empty input": (create(input=""), "invalid_value", "input"),
    "an empty list": (create(input=[]), "invalid_value", "input"),
    "an empty message": (create(input=[{"role": "user", "content": ""}]), "invalid_value", "input"),
    "an unknown role": (create(input=[{"role": "king", "content": "hi"}]), "invalid_value", "input.0.role"),
    "an image": (
        create(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        "unsupported_content",
        "input.0.content",
    ),
    "an output of no call": (create(input=[{"type": "function_call_output", "call_id": "x", "output": "1"}]), "invalid_value", "input"),
    "a call's output without one": (create(input=[{"type": "function_call_output", "call_id": "x"}]), "invalid_value", "input.0"),
    "an item of another kind": (create(input=[{"type": "computer_call", "id": "x"}]), "unsupported_item", "input.0"),
    "an item that nobody said": (create(input=[{"type": "item_reference", "id": "msg_x"}]), "item_not_found", "input.0"),
    "a tool without a name": (create(tools=[{"type": "function"}]), "invalid_value", "tools.0"),
    "a tool of another kind": (create(tools=[{"type": "web_search"}]), "unsupported_tool", "tools.0"),
    "a number that cannot be kept": (
        create(tools=[{"type": "function", "name": "f", "parameters": {"type": "object", "maxProperties": 10**400}}], tool_choice="none"),
        "unsupported_value",
        None,
    ),
    "a choice of no tool": (create(tool_choice="required"), "invalid_value", "tool_choice"),
    "a format of another kind": (create(text={"format": {"type": "xml"}}), "invalid_value", "text.format"),
    "21 log probabilities": (create(top_logprobs=21), "invalid_value", "top_logprobs"),
    "a warm-up of nothing": (create(input=None, generate=False), "invalid_value", "input"),
    "a steer of nothing": ({"type": "response.steer"}, "invalid_value", None),
    "a lane without a name": (create(stream_id=""), "invalid_stream_id", "stream_id"),
    "a low verbosity": (create(text={"verbosity": "low"}), "unsupported_value", "text.verbosity"),
    "a hundred thousand messages": (create(input=[{"role": "user", "content": "x"}] * 70_000), "invalid_value", "input"),
    "no tokens": (create(max_output_tokens=0), "invalid_value", "max_output_tokens"),
    "absurdly many tokens": (create(max_output_tokens=10**12), "invalid_value", "max_output_tokens"),
    "a temperature of 3": (create(temperature=3), "invalid_value", "temperature"),
    "a hundred thousand stops": (create(stop=["x"] * 100_000), "invalid_value", "stop"),
    "an empty stop": (create(stop=""), "invalid_value", "stop"),
    "a stop id beyond the vocabulary": (create(stop_token_ids=[49152]), "invalid_value", "stop_token_ids"),
    "a bias beyond the vocabulary": (create(logit_bias={"49153": 1}), "invalid_value", "logit_bias"),
    "a bias on a word": (create(logit_bias={"cat": 1}), "invalid_value", "logit_bias"),
    "two places at once": (create(conversation="c", previous_response_id="r"), "invalid_value", "conversation"),
    "a prompt beyond the context": (create(input="0 " * 100_000), "context_length_exceeded", "input"),
    "deep nesting": ('{"type":"response.create","input":' + "[" * 5000 + "]" * 5000 + "}", None, None),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_bad_frame_gets_a_clear_error_and_harms_nobody(server: Server, what: str) -> None:
    """S3, S4, E14: the socket and a neighbour's stream go on."""
    frame, code, param = BAD_FRAMES[what]
    with Wire(server.url) as wire, Wire(server.url) as neighbour:
        neighbour.create(input="Count.", ignore_eos=True, max_output_tokens=6)
        wire.send(frame)  # type: ignore[arg-type]
        error = wire.receive()
        assert error["type"] == "error"
        assert 400 <= error["status"] < 500
        if code:
            assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        assert re.search(r"expected|does not exist|unknown field|missing required|supported only", error["error"]["message"])
        assert wire.respond(input="Hi", max_output_tokens=2)[-1]["type"] == "response.incomplete"
        assert neighbour.rest()[-1]["type"] == "response.incomplete"


def test_a_frame_of_ten_megabytes_closes_the_socket_with_1009(server: Server) -> None:
    with Wire(server.url) as wire, Wire(server.url) as neighbour:
        neighbour.create(input="Count.", ignore_eos=True, max_output_tokens=20)
        with pytest.raises(ConnectionClosed) as closed:
            wire.send("x" * 10_000_000)
            wire.receive()
        assert closed.value.rcvd
        assert closed.value.rcvd.code == 1009
        assert neighbour.rest()[-1]["type"] == "response.incomplete"
