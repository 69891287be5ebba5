"""Responses over HTTP with the official SDK, on the real server and model. (slow)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, ConflictError, NotFoundError, OpenAI
from openai.types.responses import Response

from tests.app.wire import Event, check_event, check_numbers, check_response
from tests.serving import Server

pytestmark = pytest.mark.slow

FRANCE, ITALY = "What is the capital of France?", "And of Italy?"
STORY: dict[str, Any] = {"input": "Write a very long story.", "max_output_tokens": 2000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def asking(server: Server) -> dict[str, Any]:
    return {"model": server.model, "temperature": 0, "max_output_tokens": 24}


def replayed(server: Server, id: str, after: int | None = None) -> list[Event]:
    """The events of a retrieved stream, each checked; the lines around them too."""
    query = "" if after is None else f"&starting_after={after}"
    with httpx.stream("GET", f"{server.url}/v1/responses/{id}?stream=true{query}", timeout=60) as stream:
        return events_of(stream)


def events_of(stream: httpx.Response) -> list[Event]:
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
    blocks = "".join(stream.iter_text()).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events = []
    for block in blocks[:-2]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        check_event(events[-1])
    return events


# The SDK's ways to a response, two turns each


def test_create(client: OpenAI, asking: dict[str, Any]) -> None:
    first = client.responses.create(input=FRANCE, **asking)
    second = client.responses.create(input=ITALY, previous_response_id=first.id, **asking)
    assert ("Paris" in first.output_text, "Rome" in second.output_text) == (True, True)
    assert second.usage
    assert second.usage.input_tokens_details.cached_tokens > 0
    for response in (first, second):
        assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
        check_response(httpx.get(f"{client.base_url}responses/{response.id}").json())


def test_create_streaming(client: OpenAI, asking: dict[str, Any]) -> None:
    id = None
    for text, capital in ((FRANCE, "Paris"), (ITALY, "Rome")):
        events = list(client.responses.create(input=text, previous_response_id=id, stream=True, **asking))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert capital in events[-1].response.output_text
        id = events[-1].response.id


def test_the_stream_helper(client: OpenAI, asking: dict[str, Any]) -> None:
    id = None
    for text, capital in ((FRANCE, "Paris"), (ITALY, "Rome")):
        with client.responses.stream(input=text, previous_response_id=id, **asking) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert capital in "".join(deltas) == final.output_text
        id = final.id
    with client.responses.stream(response_id=id, starting_after=3) as stream:
        assert next(iter(stream)).type == "response.output_text.delta"


async def test_the_asynchronous_client(server: Server, asking: dict[str, Any]) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        first = await client.responses.create(input=FRANCE, **asking)
        async with client.responses.stream(input=ITALY, previous_response_id=first.id, **asking) as stream:
            final = await stream.get_final_response()
        assert "Rome" in final.output_text
        async with client.responses.connect() as connection:

            async def turn(**fields: Any) -> Response:
                await connection.response.create(**fields, **asking)
                async for event in connection:
                    if event.type == "response.completed":
                        return event.response
                raise AssertionError("the connection ended before the response did")

            third = await turn(input="And of Spain?", previous_response_id=final.id)
            fourth = await turn(input="And of Spain?", previous_response_id=final.id)
        assert third.output_text == fourth.output_text
        assert "Madrid" in third.output_text


def test_websocket_errors_by_the_sdk(client: OpenAI, asking: dict[str, Any]) -> None:
    with client.responses.connect() as connection:
        connection.response.create(input="x", previous_response_id="resp_nowhere", **asking)
        error = connection.recv()
        assert error.type == "error"
        assert error.error.code == "previous_response_not_found"
        connection.send({"type": "response.create", "input": "Hi", **STORY} | {"extra_body": None})  # type: ignore[arg-type]
        assert connection.recv().type == "error", "unknown fields are told of"


# What is stored, and what becomes of it


def test_a_stream_is_taken_up_from_any_number_on(server: Server, client: OpenAI, asking: dict[str, Any]) -> None:
    response = client.responses.create(input=FRANCE, **asking)
    whole = replayed(server, response.id)
    check_numbers(whole)
    assert whole[0]["type"] == "response.created"
    last = len(whole) - 1
    for after in (0, 1, 2, 3, last - 1, last, last + 100):
        assert replayed(server, response.id, after) == whole[after + 1 :]


def test_a_live_stream_is_taken_up_too(server: Server, client: OpenAI) -> None:
    made = client.responses.create(background=True, **STORY | {"max_output_tokens": 60})
    assert made.status == "in_progress"
    whole = replayed(server, made.id)
    check_numbers(whole)
    assert whole[-1]["response"]["usage"]["output_tokens"] == 60
    stream = client.responses.create(background=True, stream=True, **STORY | {"max_output_tokens": 60})
    begun = next(iter(stream))
    stream.close()
    followed = list(client.responses.retrieve(begun.response.id, stream=True, starting_after=begun.sequence_number))
    assert [event.sequence_number for event in followed] == list(range(1, len(followed) + 1))
    assert followed[-1].type == "response.incomplete"


def test_cancel(client: OpenAI) -> None:
    made = client.responses.create(background=True, **STORY)
    ended = client.responses.cancel(made.id)
    assert (ended.status, ended.incomplete_details and ended.incomplete_details.reason) == ("incomplete", "cancelled")
    assert client.responses.retrieve(made.id).to_dict() == ended.to_dict()
    assert client.responses.cancel(made.id).to_dict() == ended.to_dict(), "once more changes nothing"
    with client.responses.create(stream=True, **STORY) as stream:
        begun = next(iter(stream))
        client.responses.cancel(begun.response.id)
        *_, last = stream
    assert last.type == "response.incomplete"
    with pytest.raises(NotFoundError):
        client.responses.cancel("resp_nowhere")


def test_delete(server: Server, client: OpenAI, asking: dict[str, Any]) -> None:
    first = client.responses.create(input=FRANCE, **asking)
    second = client.responses.create(input=ITALY, previous_response_id=first.id, **asking)
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.cancel(first.id),
        lambda: client.responses.input_items.list(first.id),
    ):
        with pytest.raises(NotFoundError):
            gone()
    with pytest.raises(BadRequestError, match="does not exist"):
        client.responses.create(input="And now?", previous_response_id=first.id, **asking)
    third = client.responses.create(input="And of Spain?", previous_response_id=second.id, **asking)
    assert third.usage
    assert third.usage.input_tokens_details.cached_tokens > 0, "what was said stays, for what follows it"
    running = client.responses.create(background=True, **STORY)
    client.responses.delete(running.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(running.id)
    server.wait_until_idle()


def test_input_items(client: OpenAI, asking: dict[str, Any]) -> None:
    said = [{"role": "user" if number % 2 == 0 else "assistant", "content": f"Number {number}"} for number in range(7)]
    first = client.responses.create(input=said, **asking)  # type: ignore[arg-type]
    second = client.responses.create(input="Number 8", previous_response_id=first.id, **asking)
    whole = [item.to_dict() for item in client.responses.input_items.list(first.id, order="asc", limit=2)]
    assert [item["content"][0]["text"] for item in whole] == [f"Number {number}" for number in range(7)]  # type: ignore[index]
    newest = client.responses.input_items.list(first.id, limit=3)
    assert [item.content[0].text for item in newest.data] == ["Number 6", "Number 5", "Number 4"]  # type: ignore[union-attr]
    assert newest.has_more
    (own,) = client.responses.input_items.list(second.id)
    assert own.to_dict()["role"] == "user", "what it follows is in the responses before it"
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_nowhere"}):
        with pytest.raises(BadRequestError):
            client.responses.input_items.list(first.id, **query)  # type: ignore[arg-type]


def test_input_tokens_are_counted_as_they_are_read(client: OpenAI, asking: dict[str, Any]) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "description": "Does it.", "strict": False}
    instructions = "Be brief."
    for more in ({}, {"instructions": instructions}, {"instructions": instructions, "tools": [tool], "tool_choice": "none"}):
        first = client.responses.create(input=FRANCE, **more, **asking)
        assert first.usage
        assert client.responses.input_tokens.count(input=FRANCE, **more).input_tokens == first.usage.input_tokens
        second = client.responses.create(input=ITALY, previous_response_id=first.id, **more, **asking)
        counted = client.responses.input_tokens.count(input=ITALY, previous_response_id=first.id, **more)
        assert second.usage
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == second.usage.input_tokens
    with pytest.raises(BadRequestError):
        client.responses.input_tokens.count(input="")
    with pytest.raises(BadRequestError):
        client.responses.input_tokens.count(input="x", previous_response_id="resp_nowhere")


# What is refused, by the SDK's classes


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (BadRequestError, {"input": ""}, "input"),
        (BadRequestError, {"temperature": 3}, "temperature"),
        (BadRequestError, {"extra_body": {"stream_id": "a"}}, "stream_id"),
        (BadRequestError, {"background": True, "store": False}, "store"),
        (BadRequestError, {"extra_body": {"moderation": {"model": "m"}}}, "moderation"),
        (BadRequestError, {"tools": [{"type": "web_search"}]}, "tools.0"),
        (
            BadRequestError,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}]},
            "input.0.content",
        ),
        (NotFoundError, {"model": "gpt-9"}, "model"),
        (BadRequestError, {"previous_response_id": "resp_nowhere"}, "previous_response_id"),
        (NotFoundError, {"conversation": "conv_nowhere"}, "conversation"),
    ],
)
def test_error_classes(client: OpenAI, asking: dict[str, Any], kind: type[BadRequestError], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(kind) as refused:
        client.responses.create(**{"input": "Hi", **asking, **fields})
    assert refused.value.param == param
    assert refused.value.request_id


def test_a_response_in_progress_is_no_parent_yet(client: OpenAI, asking: dict[str, Any]) -> None:
    made = client.responses.create(background=True, **STORY)
    with pytest.raises(ConflictError) as refused:
        client.responses.create(input="And?", previous_response_id=made.id, **asking)
    assert refused.value.code == "response_in_progress"
    client.responses.cancel(made.id)


@pytest.mark.parametrize(
    "query", ["stream=maybe", "stream=true&starting_after=-2", "stream=true&starting_after=x", "stream=true&starting_after=1e3"]
)
def test_bad_queries(server: Server, client: OpenAI, asking: dict[str, Any], query: str) -> None:
    made = client.responses.create(input="Hi", **asking)
    answer = httpx.get(f"{server.url}/v1/responses/{made.id}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("stream", "starting_after")
