"""A WebSocket client that hides nothing: raw frames in and out, as no SDK would send them."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")

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
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events


def text_of(events: list[Event]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
