"""The official JavaScript SDK on the real server: each test runs a case of a script in js/ and judges what it saw. (slow)

The SDK asks for Node 22; 20 does. Below 22 the platform's own WebSocket, which one of its Realtime classes uses, is behind a flag.
"""

from __future__ import annotations

import json
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import node
from tests.certificates import make_certificate
from tests.node import Node
from tests.serving import Server

pytestmark = pytest.mark.slow

KEY = "sk-javascript-test"
CITIES = ("Paris", "Rome")
TURN = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REALTIME_TURN = [
    "conversation.item.added",
    "conversation.item.done",
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]

Case = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Node:
    assert shutil.which("node") and shutil.which("npm"), "expected node and npm: `make system` installs them for the tests"
    if node.version() < node.OLDEST:
        pytest.skip(f"expected Node {'.'.join(map(str, node.OLDEST))} or newer, got {'.'.join(map(str, node.version()))}")
    return Node(Path(__file__).parent / "js", tmp_path_factory.mktemp("js"))


@pytest.fixture(scope="module")
def case(scripts: Node, server: Server) -> Case:
    """Runs a case, called script.case, on the server that everyone uses."""
    environment = {"HOCKET_URL": server.url, "HOCKET_MODEL": server.model, "HOCKET_KEY": "unused"}

    def run(name: str) -> list[Any]:
        script, _, case = name.partition(".")
        return scripts.run(f"{script}.mjs", case, environment=environment)

    return run


@pytest.fixture(scope="module")
def guarded(scripts: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Runs a case on a server with TLS that asks for a key."""
    folder = tmp_path_factory.mktemp("guarded")
    cert, key = make_certificate(folder)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--api-key", KEY, "--store", "memory")
    server = Server(folder / "server", *flags).start(wait=False)
    url = server.url.replace("http", "https")
    trusting, deadline = ssl.create_default_context(cafile=cert), time.monotonic() + 120
    while httpx.get(f"{url}/readyz", verify=trusting).status_code != 200:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    model = httpx.get(f"{url}/v1/models", verify=trusting, headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]
    environment = {"HOCKET_URL": url, "HOCKET_MODEL": model, "HOCKET_KEY": KEY, "NODE_EXTRA_CA_CERTS": str(cert)}

    def run(name: str, **more: str) -> list[Any]:
        script, _, case = name.partition(".")
        return scripts.run(f"{script}.mjs", case, environment=environment | more)

    yield run
    server.stop()


def once(types: list[str]) -> list[str]:
    """Neighbours of one type as one."""
    return [kind for at, kind in enumerate(types) if at == 0 or types[at - 1] != kind]


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def cached(response: Any) -> int:
    tokens: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return tokens


# Responses over HTTP


def test_create_two_responses(case: Case) -> None:
    *turns, listed = case("responses_http.create")
    for turn in turns:
        response = turn["response"]
        assert response["output_text"] == turn["text"] == response["output"][0]["content"][0]["text"] != ""
        assert turn["requestID"].startswith("req_")
        assert {**turn["found"], "output_text": turn["text"]} == response, "as it is retrieved"
    first, second = (turn["response"] for turn in turns)
    assert second["previous_response_id"] == first["id"]
    assert cached(second) > cached(first)
    assert [item["role"] for item in listed["items"]] == ["user"]


def test_the_stream_helper_of_responses(case: Case) -> None:
    texts = [turn["text"] for turn in case("responses_http.create")[:2]]
    turns = case("responses_http.stream")
    assert len(turns) == 2
    for turn, text in zip(turns, texts, strict=True):
        assert once(turn["types"])[:-1] == TURN and turn["types"][-1] in ("response.completed", "response.incomplete")
        assert turn["numbers"] == list(range(len(turn["numbers"])))
        assert turn["deltas"] == turn["snapshot"] == turn["response"]["output_text"] == text
    assert turns[1]["response"]["previous_response_id"] == turns[0]["response"]["id"]


def test_a_stream_is_taken_up_again(case: Case) -> None:
    (seen,) = case("responses_http.resume")
    assert seen["numbers"][0] == seen["last"] + 1 and seen["numbers"] == list(range(seen["numbers"][0], seen["numbers"][-1] + 1))
    assert seen["deltas"] == seen["text"] != ""


def test_cancel_a_response(case: Case) -> None:
    (seen,) = case("responses_http.cancel")
    assert seen == {"begun": "in_progress", "ended": "incomplete", "incomplete_details": {"reason": "cancelled"}}


@pytest.mark.parametrize("script", ["responses_http", "chat"])
def test_leaving_a_stream_ends_its_work(case: Case, server: Server, script: str) -> None:
    assert case(f"{script}.abort") == [{"aborted": True}]
    server.wait_until_idle()


def test_a_function_call_over_two_responses(case: Case) -> None:
    (seen,) = case("responses_http.call")
    call = seen["call"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert seen["deltas"] == call["arguments"]
    assert json.loads(call["arguments"])["city"] in CITIES
    assert seen["second"]["output"][0]["type"] == "message"
    assert cached(seen["second"]) > 0


def test_a_named_conversation(case: Case) -> None:
    seen, deleted, gone = case("responses_http.conversation")
    assert seen["roles"] == ["user", "assistant"] * 2
    assert seen["metadata"] == {"topic": "capitals"}
    assert deleted == {"id": seen["id"], "object": "conversation.deleted", "deleted": True}
    assert (gone["class"], gone["status"]) == ("NotFoundError", 404)


def test_error_classes_of_responses(case: Case) -> None:
    bad, unknown, streamed, missing, model = case("responses_http.errors")
    assert (bad["class"], bad["status"], bad["param"], bad["type"]) == ("BadRequestError", 400, "temperature", "invalid_request_error")
    assert {**streamed, "requestID": bad["requestID"]} == bad
    assert (unknown["code"], unknown["param"]) == ("previous_response_not_found", "previous_response_id")
    assert (missing["class"], missing["status"]) == ("NotFoundError", 404)
    assert (model["class"], model["code"]) == ("NotFoundError", "model_not_found")
    ids = {error["requestID"] for error in (bad, unknown, streamed, missing, model)}
    assert len(ids) == 5 and all(id.startswith("req_") for id in ids)


def test_a_wrong_key_over_https(guarded: Case) -> None:
    refused, allowed = guarded("responses_http.refused")
    assert (refused["class"], refused["status"]) == ("AuthenticationError", 401)
    assert refused["requestID"].startswith("req_")
    assert allowed["status"] == "incomplete"


# Responses over WebSocket


def test_two_turns_on_a_websocket(case: Case) -> None:
    *turns, end = case("responses_ws.turns")
    texts = [turn["text"] for turn in case("responses_http.create")[:2]]
    for turn, text in zip(turns, texts, strict=True):
        assert once(turn["types"])[:-1] == TURN and turn["types"][-1] in ("response.completed", "response.incomplete")
        assert turn["numbers"] == list(range(len(turn["numbers"])))
        assert turn["text"] == turn["response"]["output"][0]["content"][0]["text"] == text
    first, second = (turn["response"] for turn in turns)
    assert second["previous_response_id"] == first["id"] and cached(second) > 0
    assert end == [{"type": "close", "code": 1000}]


def test_lanes_of_a_websocket(case: Case) -> None:
    left, right = case("responses_ws.lanes")
    assert left["text"] == right["text"] != ""
    assert left["numbers"] == right["numbers"] == list(range(len(left["numbers"])))


def test_a_warm_up_on_a_websocket(case: Case) -> None:
    (seen,) = case("responses_ws.warm_up")
    assert (seen["warm"]["status"], seen["warm"]["output"]) == ("completed", [])
    assert cached(seen["response"]) > 0


def test_cancel_on_a_websocket(case: Case) -> None:
    (end,) = case("responses_ws.cancel")
    assert (end["type"], end["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "cancelled"})


def test_an_error_on_a_websocket(case: Case) -> None:
    error, after = case("responses_ws.errors")
    assert (error["class"], error["error"]["code"]) == ("WebSocketError", "previous_response_not_found")
    assert error["sdk"] == error["error"]["message"]
    assert after["type"] == "response.incomplete", "the connection goes on"


def test_a_websocket_with_a_wrong_key(guarded: Case) -> None:
    (error,) = guarded("responses_ws.refused")
    assert error["class"] == "WebSocketError" and "401" in error["sdk"]
    assert len(guarded("responses_ws.turns")) == 3, "with the right one, over TLS"


# Chat completions


def test_two_chat_completions(case: Case) -> None:
    first, second = case("chat.create")
    for turn in (first, second):
        choice = turn["completion"]["choices"][0]
        assert choice["message"]["content"] and choice["finish_reason"] in ("stop", "length")
        assert turn["requestID"].startswith("req_")
    usage = second["completion"]["usage"]
    ran = first["completion"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= ran["prompt_tokens"] + ran["completion_tokens"] - 1


def test_the_stream_helper_of_chat_completions(case: Case) -> None:
    whole = [turn["completion"] for turn in case("chat.create")]
    turns = case("chat.stream")
    for turn, completion in zip(turns, whole, strict=True):
        assert turn["deltas"] == turn["content"] == completion["choices"][0]["message"]["content"]
        assert turn["completion"]["choices"][0]["finish_reason"] == completion["choices"][0]["finish_reason"]
        asked = {name: completion["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert asked.items() <= turn["usage"].items()
        assert (turn["last"]["choices"], turn["last"]["usage"]["total_tokens"]) == ([], asked["total_tokens"])


def test_usage_is_told_only_where_it_is_asked_for(case: Case) -> None:
    (chunks,) = case("chat.usage_unasked")
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_tools_of_chat_completions(case: Case) -> None:
    (seen,) = case("chat.tools")
    (call,) = seen["message"]["tool_calls"]
    assert (seen["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert seen["deltas"] == call["function"]["arguments"]
    assert json.loads(seen["deltas"])["city"] in CITIES
    assert seen["answer"]["message"]["content"] and seen["answer"]["finish_reason"] in ("stop", "length")


def test_the_sdk_runs_the_tools(case: Case) -> None:
    for seen in case("chat.run_tools"):
        assert seen["called"]["city"] in CITIES
        assert (seen["call"]["name"], json.loads(seen["call"]["arguments"]), seen["result"]) == ("weather", seen["called"], "21 degrees")


def test_error_classes_of_chat_completions(case: Case) -> None:
    bad, streamed, empty, model = case("chat.errors")
    assert (bad["class"], bad["param"]) == (streamed["class"], streamed["param"]) == ("BadRequestError", "temperature")
    assert (empty["class"], empty["param"]) == ("BadRequestError", "messages")
    assert (model["class"], model["code"]) == ("NotFoundError", "model_not_found")


def test_models_and_completions(case: Case, server: Server) -> None:
    models, completion = case("chat.models")
    assert models == [server.model]
    assert completion["text"] == completion["streamed"] != ""


# Realtime, over TLS, by both of the SDK's classes


@pytest.fixture(params=["ws", "websocket"])
def realtime(guarded: Callable[..., list[Any]], request: pytest.FixtureRequest) -> Case:
    return lambda name: guarded(f"realtime.{name}", HOCKET_SOCKET=request.param)


def test_two_realtime_turns(realtime: Case) -> None:
    created, updated, *turns = realtime("turns")
    assert (created["session"]["type"], created["session"]["output_modalities"]) == ("realtime", ["text"])
    assert updated["session"] == created["session"] | {"instructions": "You answer in one sentence."}
    for events in turns:
        assert once([event["type"] for event in events]) == REALTIME_TURN
        assert len({event["event_id"] for event in events}) == len(events)
        response = events[-1]["response"]
        assert text_of(events) == response["output"][0]["content"][0]["text"] != ""
        assert response["conversation_id"] == created["session"]["conversation_id"]
    first, second = (events[-1]["response"]["usage"] for events in turns)
    assert second["input_token_details"]["cached_tokens"] >= first["total_tokens"] - 1, "what was run is not run again"
    assert len(turns) == 2


def test_a_realtime_response_out_of_band(realtime: Case) -> None:
    (seen,) = realtime("out_of_band")
    aside = seen["aside"]
    assert not any(event["type"].startswith("conversation.item") for event in aside)
    response = aside[-1]["response"]
    assert (response["conversation_id"], response["metadata"]) == (None, {"topic": "aside"})
    assert text_of(aside) == response["output"][0]["content"][0]["text"]
    assert seen["asked"]["conversation_id"]
    assert seen["unknown"]["error"]["code"] == "item_not_found", "it is no part of the conversation"


def test_cancel_a_realtime_response(realtime: Case) -> None:
    cancelled, nothing, after = realtime("cancel")
    assert cancelled["response"]["status"] == "cancelled"
    assert (nothing["type"], nothing["error"]["event_id"]) == ("error", "mine")
    assert after["response"]["status"] in ("completed", "incomplete"), "the session goes on"


def test_an_ephemeral_realtime_key(realtime: Case) -> None:
    (seen,) = realtime("ephemeral")
    assert seen["secret"]["value"] == "ek_" and seen["secret"]["expires_at"] > time.time()
    assert seen["opening"]["type"] == "session.created"
    assert seen["opening"]["session"]["instructions"] == "You are a pirate."


def test_realtime_with_a_wrong_key(guarded: Callable[..., list[Any]]) -> None:
    (by_package,), (by_platform,) = (guarded("realtime.refused", HOCKET_SOCKET=socket) for socket in ("ws", "websocket"))
    assert by_package == {"type": "failure", "message": "Unexpected server response: 401"}
    assert by_platform["type"] == "failure", "as in a browser, without the reason"
