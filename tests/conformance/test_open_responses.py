"""The Open Responses checks of a WebSocket: written from their description, started all at once, as their runner does. (slow)

Each has 10 seconds for the upgrade and 30 for a turn. Each event is held to the official SDK's own types on the way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.app.wire import TERMINAL, Event, check_event, check_numbers
from tests.serving import Server

pytestmark = pytest.mark.slow

UPGRADE_SECONDS, TURN_SECONDS = 10.0, 30.0
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}


class Client:
    def __init__(self, connection: ClientConnection, model: str) -> None:
        self._connection = connection
        self._model = model

    async def create(self, **fields: Any) -> None:
        event = {"type": "response.create", "model": self._model, "max_output_tokens": 24, "temperature": 0, **fields}
        await self._connection.send(json.dumps(event))

    async def turn(self) -> list[Event]:
        """The events up to the next terminal one."""
        events: list[Event] = []
        async with asyncio.timeout(TURN_SECONDS):
            while not events or events[-1]["type"] not in TERMINAL:
                events.append(json.loads(await self._connection.recv()))
                check_event(events[-1])
        return events

    async def respond(self, text: str, **fields: Any) -> dict[str, Any]:
        await self.create(input=said(text), **fields)
        return response_of(await self.turn())


Check = Callable[[Client, "Open"], Awaitable[None]]
Open = Callable[[], Any]


def said(text: str) -> list[Event]:
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]


def response_of(events: list[Event]) -> dict[str, Any]:
    """The response that a turn ended with, after the events that announced it."""
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    check_numbers(events)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {response["id"]}
    if "response.output_text.delta" in kinds:
        assert (
            kinds.index("response.output_item.added")
            < kinds.index("response.content_part.added")
            < kinds.index("response.output_text.delta")
        )
    return response


async def sequential_turns(client: Client, open: Open) -> None:
    ids = [(await client.respond(f"Count to {number}."))["id"] for number in (2, 3, 4)]
    assert len(set(ids)) == 3


async def continuation(client: Client, open: Open) -> None:
    first = await client.respond("My name is Ana.", store=True)
    second = await client.respond("What is my name?", previous_response_id=first["id"], store=True)
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    async with open() as again:
        assert (await again.respond("And again?", previous_response_id=second["id"]))["output"]


async def not_stored_is_gone_after_a_reconnect(client: Client, open: Open) -> None:
    first = await client.respond("My name is Ana.", store=False)
    assert (await client.respond("What is my name?", previous_response_id=first["id"], store=False))["output"]
    async with open() as again:
        await again.create(input=said("What is my name?"), previous_response_id=first["id"], store=False)
        (error,) = await again.turn()
        assert error["error"]["code"] == "previous_response_not_found"
        assert (await again.respond("Hello."))["output"], "the socket goes on"


async def lanes_in_parallel(client: Client, open: Open) -> None:
    lanes = ("planner", "critic.2", "re-search_3")
    for lane in lanes:
        await client.create(input=said(f"You are {lane}."), stream_id=lane)
    by_lane: dict[str, list[Event]] = {lane: [] for lane in lanes}
    ended = 0
    async with asyncio.timeout(TURN_SECONDS):
        while ended < len(lanes):
            event = json.loads(await client._connection.recv())
            by_lane[event["stream_id"]].append(event)
            ended += event["type"] in TERMINAL
    for events in by_lane.values():
        assert response_of(events)["output"]
    assert "stream_id" not in (await client.respond("Hello."))


async def a_failed_continuation_evicts(client: Client, open: Open) -> None:
    first = await client.respond("My name is Ana.", store=False, stream_id="main")
    follow = {"previous_response_id": first["id"], "store": False, "stream_id": "main"}
    await client.create(input=[{"type": "function_call_output", "call_id": "call_unknown", "output": "42"}], **follow)
    (error,) = await client.turn()
    assert (error["stream_id"], error["error"]["type"]) == ("main", "invalid_request_error")
    assert 400 <= error["status"] < 500
    await client.create(input=said("What is my name?"), **follow)
    (error,) = await client.turn()
    assert error["error"]["code"] == "previous_response_not_found"


async def warm_up(client: Client, open: Open) -> None:
    settings = {"instructions": "You are an assistant that helps with the weather of places all over the world.", "tools": [TOOL]}
    warmed = await client.respond("What is the weather in Paris?", generate=False, **settings)
    assert (warmed["status"], warmed["output"]) == ("completed", [])
    assert warmed["usage"]["input_tokens"] > 0
    after = await client.respond("Tell me.", previous_response_id=warmed["id"], tool_choice="none", **{**settings, "tools": [TOOL]})
    assert after["id"] != warmed["id"]
    assert after["output"]


async def a_tool_call_and_its_output(client: Client, open: Open) -> None:
    first = await client.respond(
        "What is the weather in Paris?", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=80
    )
    (call,) = first["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert isinstance(json.loads(call["arguments"])["location"], str)
    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": '{"temperature": 21}'}]
    await client.create(input=output, previous_response_id=first["id"], tools=[TOOL], tool_choice="none")
    assert response_of(await client.turn())["output"][0]["type"] == "message"


CHECKS: tuple[Check, ...] = (
    sequential_turns,
    continuation,
    not_stored_is_gone_after_a_reconnect,
    lanes_in_parallel,
    a_failed_continuation_evicts,
    warm_up,
    a_tool_call_and_its_output,
)


@pytest.fixture(scope="module")
def outcomes(server: Server) -> dict[str, BaseException | None]:
    """How each check ended; they ran side by side."""
    model = server.model

    @asynccontextmanager
    async def open() -> AsyncIterator[Client]:
        async with connect(server.url.replace("http", "ws", 1) + "/v1/responses", open_timeout=UPGRADE_SECONDS) as connection:
            yield Client(connection, model)

    async def run(check: Check) -> None:
        async with open() as client:
            await check(client, open)

    async def all_at_once() -> list[BaseException | None]:
        return await asyncio.gather(*map(run, CHECKS), return_exceptions=True)

    return dict(zip((check.__name__ for check in CHECKS), asyncio.run(all_at_once()), strict=True))


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_open_responses(outcomes: dict[str, BaseException | None], check: str) -> None:
    if fault := outcomes[check]:
        raise fault
