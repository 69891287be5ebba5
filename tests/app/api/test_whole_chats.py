"""Clients that send their whole chat, and chats that outgrow the context, over the wire, on a tiny model. (slow)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.conversations import hostile
from tests.app.wire import Wire
from tests.serving import Server

pytestmark = pytest.mark.slow

TURNS = 40
SETTINGS = {"max_output_tokens": 24, "ignore_eos": True, "temperature": 0, "logit_bias": {"0": -100, "1": -100, "2": -100}}
LINE_FEEDS = {"max_tokens": 2, "logit_bias": {str(hostile.NEWLINE): 100}}


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.write_folder(folder / "model")
    running = Server(folder / "data", "--model", str(folder / "model"), "--kernels", "reference", "--store", "memory").start()
    yield running
    running.stop()


@pytest.fixture
def http(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "once"}])
def test_chat_completions_run_what_was_run(http: httpx.Client, headers: dict[str, str]) -> None:
    """E10. A reply of two line feeds is two tokens, though it would encode to one."""

    def complete(messages: list[dict[str, str]], times: str) -> tuple[dict[str, str], dict[str, Any]]:
        keys = {name: value + times for name, value in headers.items()}
        body = http.post("/v1/chat/completions", json={"messages": messages, **LINE_FEEDS}, headers=keys).json()
        return body["choices"][0]["message"], body["usage"]

    chat = [{"role": "user", "content": f"hello {headers}"}]
    reply, first = complete(chat, "first")
    assert reply["content"] == "\n\n"
    follow_up = {"role": "user", "content": "more"}
    _, second = complete([*chat, {"role": "assistant", "content": reply["content"]}, follow_up], "second")
    _, altered = complete([*chat, {"role": "assistant", "content": "\n\n\n"}, follow_up], "altered")
    lead = second["prompt_tokens"] - first["total_tokens"]
    assert lead > 0
    assert altered["prompt_tokens"] < second["prompt_tokens"], "three line feeds, encoded"


def test_a_long_conversation_goes_on_over_a_websocket(tiny_server: Server) -> None:
    with Wire(tiny_server.url) as wire:
        previous, tokens, cut = None, [], 0
        for number in range(TURNS):
            events = wire.respond(input=f"#{number}", previous_response_id=previous, truncation="auto", **SETTINGS)
            response = events[-1]["response"]
            assert events[0]["response"]["truncation"] == response["truncation"] == "auto"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            usage, previous = response["usage"], response["id"]
            if tokens and usage["input_tokens"] < tokens[-1]:
                cut += 1
            tokens.append(usage["input_tokens"])
        assert 1 <= cut <= TURNS / 5 and max(tokens) < hostile.CONTEXT
        refused = wire.respond(input="?" * hostile.CONTEXT, previous_response_id=previous, truncation="auto", **SETTINGS)[-1]
        assert refused["error"]["code"] == "context_length_exceeded"
        assert wire.respond(input="and?", previous_response_id=previous, truncation="auto", **SETTINGS)[-1]["response"]["usage"]


def test_a_long_conversation_goes_on_over_http_or_is_refused(http: httpx.Client) -> None:
    chat: list[dict[str, str]] = [{"role": "developer", "content": "Be kind."}]
    for number in range(TURNS):
        chat.append({"role": "user", "content": f"#{number}"})
        body = http.post("/v1/responses", json={"input": chat, "truncation": "auto", **SETTINGS}).json()
        assert body["truncation"] == "auto" and body["usage"]["input_tokens"] < hostile.CONTEXT
        chat.append({"role": "assistant", "content": body["output"][0]["content"][0]["text"]})
    chat.append({"role": "user", "content": "and?"})
    for setting in ({}, {"truncation": None}, {"truncation": "disabled"}):
        refused = http.post("/v1/responses", json={"input": chat, **setting, **SETTINGS})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    short = http.post("/v1/responses", json={"input": "hello", **SETTINGS}).json()
    assert short["truncation"] == "disabled"
    assert http.get(f"/v1/responses/{body['id']}").json()["truncation"] == "auto"


def test_other_ways_of_truncation_are_refused(http: httpx.Client) -> None:
    refused = http.post("/v1/responses", json={"input": "hello", "truncation": "middle"}).json()["error"]
    assert (refused["param"], refused["code"]) == ("truncation", "unsupported_value")
    assert "auto or disabled" in refused["message"]
