"""A raw Realtime client: frames in and out, as no SDK would send them. What comes must be as the SDK has it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, get_args

from openai import BaseModel
from openai.types.realtime.realtime_server_event import RealtimeServerEvent
from websockets.sync.client import connect

from tests.app.wire import Event, Wire

GREEDY = {"temperature": 0, "max_output_tokens": 24}
LONG = {"ignore_eos": True, "max_output_tokens": 2000}


class RealtimeWire(Wire):
    def __init__(self, url: str, query: str = "", **options: Any) -> None:
        self.connection = connect(f"{url.replace('http', 'ws', 1)}/v1/realtime{query}", open_timeout=10, max_size=None, **options)
        self._event_ids: set[str] = set()
        self.opening = self.receive()

    @property
    def session(self) -> dict[str, Any]:
        """As it was when it was created."""
        assert self.opening["type"] == "session.created"
        session: dict[str, Any] = self.opening["session"]
        return session

    def receive(self, timeout: float = 60.0) -> Event:
        event = json.loads(self.connection.recv(timeout))
        _server_events()[event["type"]].model_validate(event, strict=True)
        assert event["event_id"] not in self._event_ids
        self._event_ids.add(event["event_id"])
        assert isinstance(event, dict)
        return event

    def until(self, *kinds: str) -> list[Event]:
        """The events up to the next of one of these types."""
        events = [self.receive()]
        while events[-1]["type"] not in kinds:
            events.append(self.receive())
        return events

    def ask(self, event: Event) -> Event:
        """Send an event that is answered by one."""
        self.send(event)
        return self.receive()

    def say(self, text: str, **fields: Any) -> Event:
        """A message of the user's; returns the item."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields.pop("item", {})}
        self.send({"type": "conversation.item.create", "item": item, **fields})
        added, done = self.receive(), self.receive()
        assert (added["type"], done["type"]) == ("conversation.item.added", "conversation.item.done"), (added, done)
        assert added["item"] == done["item"]
        created: Event = added["item"]
        return created

    def respond(self, **fields: Any) -> list[Event]:
        """A response, up to its end."""
        self.send({"type": "response.create", "response": fields})
        return self.until("response.done", "error")

    def reply(self, **fields: Any) -> dict[str, Any]:
        """A response as it has ended."""
        response: dict[str, Any] = self.respond(**fields)[-1]["response"]
        return response


@cache
def _server_events() -> dict[str, type[BaseModel]]:
    union = get_args(RealtimeServerEvent)[0]
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(union)}
