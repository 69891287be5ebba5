"""The HTTP side on the real server and model: chat completions, Responses, conversations, health. (slow)"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.serving import Server

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def http(server: Server) -> Any:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": 0, "max_tokens": 24} | fields)


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_completion(http: httpx.Client) -> None:
    body = chat(http).json()
    (choice,) = body["choices"]
    assert (body["object"], choice["finish_reason"], choice["message"]["role"]) == ("chat.completion", "stop", "assistant")
    assert "Paris" in choice["message"]["content"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = chat(http).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1, "one is left to run"
    assert again["choices"] == body["choices"]


def test_chat_stream(http: httpx.Client) -> None:
    whole = chat(http).json()["choices"][0]["message"]["content"]
    with http.stream("POST", "/v1/chat/completions", json={"messages": MESSAGES, "temperature": 0, "stream": True}) as response:
        assert response.headers["cache-control"] == "no-cache"
        chunks = sse(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert not any("usage" in chunk for chunk in chunks), "nobody asked for it"
    assert len({chunk["id"] for chunk in chunks}) == 1
    asked = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=asked) as response:
        chunks = sse(response)
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_chat_takes_what_real_clients_send(http: httpx.Client) -> None:
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert chat(http, messages=parts, user="u", chat_id="x", parallel_tool_calls=True, api_key="?").status_code == 200


def test_chat_by_the_official_sdk(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    made = client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=MESSAGES, temperature=0, extra_body={"top_k": 5})  # type: ignore[arg-type]
    assert "Paris" in (made.choices[0].message.content or "")
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=MESSAGES, n=1_000_000_000)  # type: ignore[arg-type]
    assert refused.value.param == "n"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "call_1"}]}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": "hi"}, 400, "messages"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**12}, 400, "max_tokens"),
        ({"n": 10**9}, 400, "n"),
        ({"stop": ["x"] * 100_000}, 400, "stop"),
        ({"n": 17}, 400, "n"),
        ({"n": 0}, 400, "n"),
        ({"logit_bias": {"49152": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
        ({"stop_token_ids": [49152]}, 400, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, 400, "stop_token_ids"),
        ({"temperature": 3}, 400, "temperature"),
        ({"seed": 2**64}, 400, "seed"),
        ({"logprobs": 1}, 400, "logprobs"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"response_format": {}}, 400, "response_format"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, 400, "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, 400, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "start"}}, 400, "response_format"),
        ({"tools": [{}]}, 400, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"guided_regex": "a*"}, 400, "guided_regex"),
        ({"min_tokens": 10**400}, 400, "min_tokens"),
        ({"structured_outputs": {"regex": "a*"}}, 400, "structured_outputs"),
        ({"continue_final_message": True}, 400, "continue_final_message"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, 400, "messages.0.tool_calls.0"),
        ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, 400, "messages.0.function_call"),
        ({"messages": [{"role": "user", "content": "x"}] * 100_000}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "0 " * 50_000}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, 413, None),
    ],
)
def test_bad_chat_requests(http: httpx.Client, fields: dict[str, Any], status: int, param: str | None) -> None:
    """S3, S4."""
    answer = chat(http, **fields)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_run(server: Server, stream: bool) -> None:
    """C7: over plain HTTP nobody could come back for it. Seen by the engine being idle long before the reply could have ended."""
    asked = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 4000, "stream": stream}
    with httpx.Client(base_url=server.url, timeout=1.0) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=asked) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=asked)
    server.wait_until_idle()


@pytest.mark.parametrize("way", ["background", "Idempotency-Key"])
def test_a_run_that_someone_may_come_back_for_goes_on(server: Server, way: str) -> None:
    asked = {"input": "Hi", "ignore_eos": True, "max_output_tokens": 60, "stream": True, "background": way == "background"}
    headers = {way: "come-back"} if way == "Idempotency-Key" else {}
    with httpx.Client(base_url=server.url, timeout=10) as client:
        with client.stream("POST", "/v1/responses", json=asked, headers=headers) as response:
            lines = response.iter_lines()
            created = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        with client.stream("GET", f"/v1/responses/{created['response']['id']}", params={"stream": "true"}) as rest:
            ended = sse(rest)[-1]["response"]
    assert ended["incomplete_details"] == {"reason": "max_output_tokens"}


def test_responses_over_http(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    made = client.responses.create(
        model="SmolLM2-135M-Instruct", input="What is the capital of France?", temperature=0, max_output_tokens=24
    )
    assert "Paris" in made.output_text
    with client.responses.stream(
        model="SmolLM2-135M-Instruct", input="And of Italy?", previous_response_id=made.id, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "Rome" in final.output_text
    with client.responses.stream(response_id=final.id, starting_after=3) as stream:
        assert next(iter(stream)).type == "response.output_text.delta"


def test_background_and_cancel(http: httpx.Client) -> None:
    body = {"input": "Write a long story.", "background": True, "ignore_eos": True, "max_output_tokens": 3000}
    made = http.post("/v1/responses", json=body).json()
    assert made["status"] == "in_progress"
    ended = http.post(f"/v1/responses/{made['id']}/cancel").json()
    assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "cancelled"})
    assert http.get(f"/v1/responses/{made['id']}").json() == ended


def test_idempotency_over_http(http: httpx.Client) -> None:
    """C4."""
    for path, body in (
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 5}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5}),
    ):
        answers = [http.post(path, json=body, headers={"Idempotency-Key": f"key of {path}"}).json() for _ in range(2)]
        assert answers[0] == answers[1]
        assert http.post(path, json=body).json()["id"] != answers[0]["id"]
        response = answers[0]["id"].replace("chatcmpl-", "resp_")
        assert http.get(f"/v1/responses/{response}").json()["status"] == "incomplete", "a stored completion is a response"
        other = http.post(path, json=body | {"temperature": 0.5}, headers={"Idempotency-Key": f"key of {path}"})
        error = other.json()["error"]
        assert (other.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "idempotency_error")
        assert f"key of {path}" in error["message"]
    unstored = http.post("/v1/responses", json={"input": "Hi", "store": False}, headers={"Idempotency-Key": "x"})
    assert unstored.json()["error"]["param"] == "store"


def test_conversations(http: httpx.Client) -> None:
    made = http.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()
    assert (made["object"], made["metadata"], made["title"]) == ("conversation", {"a": "b"}, "")
    assert http.post(f"/v1/conversations/{made['id']}", json={"metadata": {"c": "d"}}).json()["metadata"] == {"c": "d"}
    turn = {"conversation": made["id"], "input": "  What is\nthe capital of France? ", "max_output_tokens": 4}
    response = http.post("/v1/responses", json=turn).json()
    listed = http.get("/v1/conversations", params={"limit": 1}).json()
    assert listed["data"][0]["id"] == made["id"]
    assert listed["data"][0]["title"] == "What is the capital of France?"
    items = http.get(f"/v1/conversations/{made['id']}/items", params={"order": "asc"}).json()
    assert [item["role"] for item in items["data"]] == ["user", "assistant"]
    assert items["data"][1]["content"] == response["output"][0]["content"]
    page = http.get(f"/v1/conversations/{made['id']}/items", params={"limit": 1}).json()
    assert (page["data"][0]["role"], page["has_more"]) == ("assistant", True)
    rest = http.get(f"/v1/conversations/{made['id']}/items", params={"limit": 1, "after": page["last_id"]}).json()
    assert (rest["data"][0]["role"], rest["has_more"]) == ("user", False)
    assert http.delete(f"/v1/conversations/{made['id']}").json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for path in (f"/v1/conversations/{made['id']}", f"/v1/conversations/{made['id']}/items", f"/v1/responses/{response['id']}"):
        assert http.get(path).status_code == 404
    for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "conv_x"}):
        assert http.get("/v1/conversations", params=query).status_code in (400, 404)


def test_models_and_health(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("SmolLM2-135M-Instruct", "model")
    assert http.get(f"/v1/models/{model['id']}").json() == model
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready", "model": model["id"], "live": 0}
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    refused = http.put("/v1/models")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert http.put("/v1/responses/resp_x").headers["allow"] == "DELETE, GET, HEAD", "each has a route of its own"


def test_the_page_and_its_files(http: httpx.Client) -> None:
    for path in ("/", "/c/conv_x"):
        page = http.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
    assert http.get("/static/js/main.js").status_code == 200
    assert http.get("/static/../app/server.py").status_code == 404
    assert http.get("/static/%2e%2e/pyproject.toml").status_code == 404
    begin = time.perf_counter()
    http.get("/static/js/main.js", headers={"Range": "bytes=" + ",".join(f"{i}-{i}" for i in range(10_000))})
    assert time.perf_counter() - begin < 5, "S8"
