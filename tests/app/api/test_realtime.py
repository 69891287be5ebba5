"""Realtime through the official SDK, unmodified, on the real server and model. (slow)"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.realtime import RealtimeErrorEvent, RealtimeServerEvent
from openai.types.realtime.realtime_function_tool_param import RealtimeFunctionToolParam
from websockets.exceptions import ConnectionClosedError

from tests.serving import Server

pytestmark = pytest.mark.slow

SETTINGS: Any = {"type": "realtime", "output_modalities": ["text"], "temperature": 0, "max_output_tokens": 24}
WEATHER: RealtimeFunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as made:
        yield made


def message(text: str) -> Any:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def until_done(connection: Any) -> list[Any]:
    events: list[RealtimeServerEvent] = []
    for event in connection:
        events.append(event)
        if event.type in ("response.done", "error"):
            return events
    raise AssertionError("the connection ended before the response did")


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_two_turns(client: OpenAI, server: Server) -> None:
    with client.realtime.connect(model=server.model) as connection:
        created = connection.recv()
        assert created.type == "session.created"
        connection.session.update(session=SETTINGS)
        assert connection.recv().type == "session.updated"

        def turn(text: str) -> list[Any]:
            connection.conversation.item.create(item=message(text))
            connection.response.create()
            return until_done(connection)

        first, second = turn("What is the capital of France?"), turn("And of Italy?")
    deltas = sum(event.type == "response.output_text.delta" for event in first)
    assert [event.type for event in first] == [
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    added, _, begun, *_, done = first
    assert begun.response.id == done.response.id == next(event.response_id for event in first if event.type == "response.output_item.done")
    assert first[4].previous_item_id == added.item.id
    assert (begun.response.status, begun.response.output, done.response.status) == ("in_progress", [], "completed")
    text = text_of(first)
    assert "Paris" in text
    assert done.response.output[0].content[0].text == first[-5].text == text
    usage = done.response.usage
    assert usage.output_tokens == usage.output_token_details.text_tokens >= deltas  # tokens that come together are told together
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "Rome" in text_of(second)
    assert second[0].previous_item_id == done.response.output[0].id
    assert second[-1].response.usage.input_token_details.cached_tokens >= usage.total_tokens
    assert second[-1].response.conversation_id == done.response.conversation_id == created.session.conversation_id  # type: ignore[union-attr]


async def test_out_of_band_and_cancel(server: Server) -> None:
    """Beside a reply that goes on, another one is made of the conversation, and neither knows of the other."""
    made = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused")
    async with made as client, client.realtime.connect(model=server.model) as connection:
        await connection.session.update(session=SETTINGS)
        await connection.conversation.item.create(item=message("Tell me a very long story."))
        long: Any = {"ignore_eos": True, "max_output_tokens": 2000}
        await connection.response.create(response=long)
        await connection.response.create(response={"conversation": "none", "metadata": {"for": "a title"}})
        events: list[Any] = []
        async with asyncio.timeout(60):
            async for event in connection:
                events.append(event)
                if event.type != "response.done":
                    continue
                if event.response.metadata:
                    await connection.response.cancel()
                else:
                    break
        ends = [event.response for event in events if event.type == "response.done"]
        beside, ours = ends
        assert (beside.metadata, beside.conversation_id) == ({"for": "a title"}, None)
        assert beside.status in ("completed", "incomplete")
        assert (ours.status, ours.status_details.type, ours.status_details.reason) == ("cancelled", "cancelled", "client_cancelled")
        added = [event.item.id for event in events if event.type == "conversation.item.added"]
        assert beside.output[0].id not in added
        assert ours.output[0].id in added
        await connection.conversation.item.retrieve(item_id=beside.output[0].id)
        refused = await connection.recv()
        assert isinstance(refused, RealtimeErrorEvent)
        assert refused.error.code == "item_not_found"
        held = await client.conversations.items.list(ours.conversation_id, order="asc")
        assert [item.id async for item in held] == [added[0], ours.output[0].id]


def test_a_tool_is_called_and_its_output_continues_the_turn(client: OpenAI, server: Server) -> None:
    with client.realtime.connect(model=server.model) as connection:
        connection.recv()
        session = SETTINGS | {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 100, "parallel_tool_calls": False}
        connection.session.update(session=session)
        updated = connection.recv()
        assert updated.session.tools[0].name == "get_weather"  # type: ignore[union-attr]
        connection.conversation.item.create(item=message("How is the weather in Rome?"))
        connection.response.create()
        events = until_done(connection)
        call = events[-1].response.output[0]
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(event.delta for event in arguments) == call.arguments
        assert {event.call_id for event in arguments} == {call.call_id}
        done = next(event for event in events if event.type == "response.function_call_arguments.done")
        assert (done.name, done.arguments, done.call_id, done.item_id) == (call.name, call.arguments, call.call_id, call.id)

        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'}
        connection.conversation.item.create(item=output)
        connection.response.create(response={"tool_choice": "none"})
        answered = until_done(connection)
        assert (answered[0].item.type, answered[0].previous_item_id) == ("function_call_output", call.id)
        assert answered[-1].response.output[0].type == "message"
        connection.conversation.item.create(item=output)
        assert until_done(connection)[-1].error.type == "invalid_request_error"  # answered already


def test_a_tools_output_may_be_sent_before_the_reply_that_calls_it_has_ended(client: OpenAI, server: Server) -> None:
    with client.realtime.connect(model=server.model) as connection:
        connection.recv()
        connection.session.update(session=SETTINGS | {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 100})
        connection.recv()
        connection.conversation.item.create(item=message("How is the weather in Rome?"))
        connection.response.create()
        for event in connection:
            assert event.type != "error"
            if event.type == "response.function_call_arguments.done":
                break
        output: Any = {"type": "function_call_output", "call_id": event.call_id, "output": "clear"}  # type: ignore[union-attr]
        connection.conversation.item.create(item=output)
        connection.response.create(response={"tool_choice": "none"})
        calling, answering = until_done(connection), until_done(connection)
    assert calling[-1].response.output[0].call_id == output["call_id"]
    assert [event.type for event in answering[:3]] == ["conversation.item.added", "conversation.item.done", "response.created"]
    assert answering[0].item.call_id == output["call_id"]
    assert text_of(answering)


def test_errors_name_the_event_and_leave_the_session_open(client: OpenAI, server: Server) -> None:
    with client.realtime.connect(model=server.model) as connection:
        connection.recv()
        connection.conversation.item.delete(item_id="item_x", event_id="mine")
        refused = connection.recv()
        assert isinstance(refused, RealtimeErrorEvent)
        assert (refused.error.event_id, refused.error.code, refused.error.param) == ("mine", "item_not_found", "item_id")
        connection.session.update(session={"type": "realtime", "output_modalities": ["audio"]})
        refused = connection.recv()
        assert isinstance(refused, RealtimeErrorEvent)
        assert refused.error.param == "session.output_modalities"
        connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        assert connection.recv().type == "session.updated"


def test_an_unknown_model_is_told_once_and_the_connection_ends(client: OpenAI) -> None:
    with client.realtime.connect(model="gpt-9") as connection:
        refused = connection.recv()
        assert isinstance(refused, RealtimeErrorEvent)
        assert refused.error.code == "model_not_found"
        with pytest.raises(ConnectionClosedError):
            connection.recv()


def test_a_conversation_goes_on_over_responses_and_back(client: OpenAI, server: Server) -> None:
    settings: Any = {"temperature": 0, "max_output_tokens": 24}
    with client.realtime.connect(model=server.model) as connection:
        id: Any = connection.recv().session.conversation_id  # type: ignore[union-attr]
        connection.conversation.item.create(item=message("What is the capital of France?"))
        connection.response.create(response=settings)
        begun = until_done(connection)[-1].response
        retrieved = client.responses.retrieve(begun.id)
        assert retrieved.output_text == begun.output[0].content[0].text

        second = client.responses.create(conversation=id, input="And of Italy?", **settings)
        assert "Rome" in second.output_text
        assert second.usage
        assert second.usage.input_tokens_details.cached_tokens >= begun.usage.total_tokens

        connection.conversation.item.create(item=message("And of Spain?"))
        connection.response.create(response=settings)
        third = until_done(connection)
        assert third[0].previous_item_id == second.output[0].id
        assert third[-1].response.usage.input_token_details.cached_tokens >= second.usage.total_tokens
    with client.realtime.connect(extra_query={"conversation": id}) as connection:
        assert connection.recv().session.conversation_id == id  # type: ignore[union-attr]
        connection.conversation.item.retrieve(item_id=second.output[0].id)
        assert connection.recv().item.content[0].text == second.output_text  # type: ignore[union-attr]
        connection.conversation.item.create(item=message("And of Portugal?"))
        connection.response.create(response=settings)
        fourth = until_done(connection)
    assert fourth[-1].response.usage.input_token_details.cached_tokens >= third[-1].response.usage.total_tokens
    assert len(client.conversations.items.list(id, order="asc").data) == 8


def test_a_client_secret(client: OpenAI, server: Server) -> None:
    made = client.realtime.client_secrets.create(
        expires_after={"anchor": "created_at", "seconds": 60},
        session={"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]},
    )
    assert made.session.type == "realtime"
    assert made.session.instructions == "Be brief."
    with OpenAI(base_url=f"{server.url}/v1", api_key=made.value) as page, page.realtime.connect(model=server.model) as connection:
        assert connection.recv().session.instructions == "Be brief."  # type: ignore[union-attr]
