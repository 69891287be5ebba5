"""Conversations and their items with the official SDK, on the real server and model. (slow)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.app.wire import Wire
from tests.serving import Server

pytestmark = pytest.mark.slow

CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def asking(server: Server) -> dict[str, Any]:
    return {"model": server.model, "temperature": 0, "max_output_tokens": 16}


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def kinds_of(client: OpenAI, id: str) -> list[str]:
    return [getattr(item, "role", item.type) for item in client.conversations.items.list(id, order="asc")]


def test_a_conversation_is_made_changed_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "x"}, items=[user("My name is Ana.")])
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "y"}
    assert client.conversations.delete(made.id).to_dict() == {"id": made.id, "object": "conversation.deleted", "deleted": True}
    for gone in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(NotFoundError):
            gone(made.id)
    with pytest.raises(NotFoundError):
        client.conversations.update(made.id, metadata={})


def test_items_are_added_listed_retrieved_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(items=[user("What is the weather in Paris?")])
    added = client.conversations.items.create(made.id, items=[CALL, OUTPUT, user("Thanks.")])  # type: ignore[list-item]
    assert [item.type for item in added.data] == ["function_call", "function_call_output", "message"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[-1].id, False)
    listed = list(client.conversations.items.list(made.id, order="asc", limit=1))
    assert [item.id for item in listed][1:] == [item.id for item in added.data]
    for item in listed:
        assert client.conversations.items.retrieve(item.id or "", conversation_id=made.id).to_dict() == item.to_dict()
    call = listed[1].to_dict()
    assert {name: call[name] for name in CALL} == CALL
    assert client.conversations.items.delete(listed[3].id or "", conversation_id=made.id).id == made.id
    assert kinds_of(client, made.id) == ["user", "function_call", "function_call_output"]
    for lost in (client.conversations.items.retrieve, client.conversations.items.delete):
        for id in (listed[3].id or "", "msg_nowhere"):
            with pytest.raises(NotFoundError):
                lost(id, conversation_id=made.id)


def test_turns_of_a_conversation(client: OpenAI, asking: dict[str, Any]) -> None:
    made = client.conversations.create(items=[user("My name is Ana.")])
    first = client.responses.create(conversation=made.id, input="What is my name?", **asking)
    assert first.conversation
    assert first.conversation.id == made.id
    second = client.responses.create(conversation={"id": made.id}, input="Say it again.", **asking)
    assert second.usage
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert kinds_of(client, made.id) == ["user", "user", "assistant", "user", "assistant"]
    client.conversations.items.create(made.id, items=[user("And a third time.")])
    third = client.responses.create(conversation=made.id, **asking)
    assert kinds_of(client, made.id)[-2:] == ["user", "assistant"]
    assert third.output_text
    reply = client.conversations.items.list(made.id).data[0]
    assert reply.id == third.output[0].id
    counted = client.responses.input_tokens.count(conversation=made.id, input="Once more.")
    fourth = client.responses.create(conversation=made.id, input="Once more.", **asking)
    assert fourth.usage
    assert counted.input_tokens == fourth.usage.input_tokens


def test_what_is_deleted_is_not_told_to_the_model(client: OpenAI, asking: dict[str, Any]) -> None:
    made = client.conversations.create(items=[user("My name is Ana, and this is a secret that nobody should be told.")])
    (secret,) = client.conversations.items.list(made.id)
    before = client.responses.input_tokens.count(conversation=made.id, input="Hi")
    client.conversations.items.delete(secret.id or "", conversation_id=made.id)
    after = client.responses.input_tokens.count(conversation=made.id, input="Hi")
    assert after.input_tokens < before.input_tokens - 10
    assert client.responses.create(conversation=made.id, input="Hi", **asking).output_text


def test_a_tools_output_is_added_to_a_conversation(client: OpenAI, asking: dict[str, Any]) -> None:
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    made = client.conversations.create()
    calling = {**asking, "max_output_tokens": 80, "tools": [tool], "parallel_tool_calls": False}
    first = client.responses.create(conversation=made.id, input="How is it?", tool_choice="required", **calling)
    (call,) = first.output
    assert call.type == "function_call"
    answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
    client.responses.create(conversation=made.id, input=answer, tool_choice="none", **calling)
    assert kinds_of(client, made.id) == ["user", "function_call", "function_call_output", "assistant"]


async def test_the_asynchronous_client(server: Server, asking: dict[str, Any]) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        made = await client.conversations.create()
        for text in ("My name is Ana.", "What is my name?"):
            await client.responses.create(conversation=made.id, input=text, **asking)
        assert [item.type async for item in client.conversations.items.list(made.id)] == ["message"] * 4
        await client.conversations.delete(made.id)


def test_listing_the_extension(server: Server, client: OpenAI, asking: dict[str, Any]) -> None:
    made = [client.conversations.create(metadata={"number": str(number)}).id for number in range(3)]
    client.responses.create(conversation=made[0], input="  What is\nthe capital of France? ", **asking)
    with httpx.Client(base_url=server.url) as http:
        page = http.get("/v1/conversations", params={"limit": 2}).json()
        assert [one["id"] for one in page["data"]] == [made[0], made[2]], "the last updated first"
        assert page["data"][0]["title"] == "What is the capital of France?"
        assert (page["has_more"], page["last_id"]) == (True, made[2])
        rest = http.get("/v1/conversations", params={"limit": 1, "after": page["last_id"]}).json()
        assert rest["data"][0]["id"] == made[1]
        for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "conv_nowhere"}):
            assert http.get("/v1/conversations", params=query).status_code in (400, 404)


def test_deleting_ends_what_runs(server: Server, client: OpenAI) -> None:
    made = client.conversations.create()
    with Wire(server.url) as wire:
        wire.create(conversation=made.id, input="Write a very long story.", ignore_eos=True, max_output_tokens=2000)
        wire.receive()
        client.conversations.delete(made.id)
        assert wire.rest()[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
    server.wait_until_idle()


@pytest.mark.parametrize(
    "body",
    [
        {"items": [{"type": "message", "role": "king", "content": "x"}]},
        {"items": [OUTPUT]},
        {"items": [{"type": "item_reference", "id": "msg_x"}]},
        {"items": "x"},
        {"items": [user("x")] * 101},
        {"metadata": {"x": 1}},
        {"metadata": {"x": "y" * 513}},
        {"unknown": 1},
    ],
)
def test_bad_conversations(server: Server, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/conversations", json=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_bad_items(client: OpenAI) -> None:
    made = client.conversations.create()
    for items in ([], [user("x")] * 101, [OUTPUT], [CALL, OUTPUT, OUTPUT], [{"type": "message", "role": "user"}]):
        with pytest.raises(BadRequestError):
            client.conversations.items.create(made.id, items=items)  # type: ignore[arg-type]
    assert kinds_of(client, made.id) == []


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_reply_that_was_deleted_is_told_to_nobody(client: OpenAI, asking: dict[str, Any], logprobs: bool) -> None:
    made = client.conversations.create()
    include: Any = ["message.output_text.logprobs"] if logprobs else []
    reply = client.responses.create(conversation=made.id, input="What is the capital of France?", include=include, **asking)
    assert reply.output_text
    client.conversations.items.delete(reply.output[0].id or "", conversation_id=made.id)
    assert client.responses.retrieve(reply.id).output == []
    events = list(client.responses.retrieve(reply.id, stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", f"response.{reply.status}"]


def test_items_that_answer_no_call_are_named(client: OpenAI) -> None:
    output: Any = {"type": "function_call_output", "call_id": "nowhere", "output": "1"}
    made = client.conversations.create()
    with pytest.raises(BadRequestError) as refused:
        client.conversations.items.create(made.id, items=[output])
    assert refused.value.param == "items"
    with pytest.raises(BadRequestError) as refused:
        client.conversations.create(items=[output])
    assert refused.value.param == "items"
