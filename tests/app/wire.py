"""A WebSocket client that hides nothing: raw frames in and out, as no SDK would send them. What comes must be as the SDK has it."""

from __future__ import annotations

import json
from functools import cache
from types import TracebackType
from typing import Any, get_args

from openai import BaseModel
from openai.types.responses import Response
from openai.types.responses.responses_server_event import ResponsesServerEvent
from websockets.sync.client import ClientConnection, connect

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
OWN_REASONS = {"cancelled", "interrupted", "server_shutdown", "log_unavailable"}  # why a reply is incomplete, beside the SDK's reasons
OWN_FORMATS = {"regex", "grammar"}

Event = dict[str, Any]


class Wire:
    def __init__(self, url: str, **options: Any) -> None:
        self.connection: ClientConnection = connect(
            url.replace("http", "ws", 1) + "/v1/responses", open_timeout=10, max_size=None, **options
        )

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.connection.close()

    def send(self, event: Event | str | bytes) -> None:
        self.connection.send(json.dumps(event) if isinstance(event, dict) else event)

    def create(self, **fields: Any) -> None:
        self.send({"type": "response.create", **fields})

    def receive(self, timeout: float = 60.0) -> Event:
        event = json.loads(self.connection.recv(timeout))
        assert isinstance(event, dict)
        check_event(event)
        return event

    def rest(self) -> list[Event]:
        """The events up to the next terminal one."""
        events = [self.receive()]
        while events[-1]["type"] not in TERMINAL:
            events.append(self.receive())
        return events

    def respond(self, **fields: Any) -> list[Event]:
        """Create a response and take its events, which must be numbered without a gap."""
        self.create(**fields)
        events = self.rest()
        if events[-1]["type"] != "error":
            check_numbers(events)
        return events


def text_of(events: list[Event]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def check_numbers(events: list[Event]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def check_event(event: Event) -> None:
    """It is strictly of the type that the official SDK has for it."""
    if "response" in event:
        event = {**event, "response": _known(event["response"])}
    _server_events()[event["type"]].model_validate(event, strict=True)


def check_response(response: dict[str, Any]) -> None:
    Response.model_validate(_known(response), strict=True)


@cache
def _server_events() -> dict[str, type[BaseModel]]:
    union = get_args(ResponsesServerEvent)[0]
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(union)}


def _known(response: dict[str, Any]) -> dict[str, Any]:
    """The response with what the SDK has no word for in its words."""
    if response["status"] == "incomplete" and response["incomplete_details"]["reason"] in OWN_REASONS:
        response = {**response, "incomplete_details": {"reason": "max_output_tokens"}}
    if response["text"]["format"]["type"] in OWN_FORMATS:
        response = {**response, "text": {"format": {"type": "text"}}}
    return response
