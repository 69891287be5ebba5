"""What Realtime clients send, as it is read, and how a session ends. Without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.channel import Channel
from app.api.errors import ApiError
from app.api.models import Models
from app.api.realtime.default import DefaultConversation
from app.api.realtime.http import Realtime
from app.api.realtime.schema import ResponseFields, Session, SessionFields, SessionUpdate, changed, read_event
from app.api.realtime.socket import RealtimeSocket
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Said
from app.ephemeral import EphemeralKeys
from app.store.memory import MemoryStore
from app.store.records import Asked, Item, Response
from engine.core import NotReadyError


def session(**settings: Any) -> Session:
    return Session("sess_1", "m", None, "conv_1", 0, SessionFields(**settings))


def test_an_update_changes_what_it_names_and_null_names_nothing() -> None:
    before = SessionFields(instructions="a", max_output_tokens=5, temperature=0.5)
    after = changed(before, SessionFields(instructions="", max_output_tokens="inf"))
    assert (after.instructions, after.max_output_tokens, after.temperature) == ("", "inf", 0.5)
    event, _ = read_event('{"type": "session.update", "session": {"instructions": null, "temperature": 1}}')
    assert isinstance(event, SessionUpdate)
    after = changed(before, event.session)
    assert (after.instructions, after.temperature) == ("a", 1)


def test_a_refused_update_changes_nothing() -> None:
    made = session(instructions="a")
    with pytest.raises(ApiError):
        made.update(SessionFields(instructions="b", voice="ash"))
    assert made.shown()["instructions"] == "a"


def test_a_response_says_more_than_its_session() -> None:
    turn = session(instructions="a", max_output_tokens=5, seed=1).turn("ana", ResponseFields(max_output_tokens="inf", seed=2), None)
    assert (turn.instructions, turn.sampling.max_tokens, turn.sampling.seed) == ("a", 0, 2)
    assert (turn.conversation, turn.stored, turn.truncation, turn.items) == ("conv_1", True, "auto", [])
    context = (Said("user", "hi"),)
    aside = session(truncation="disabled").turn("ana", ResponseFields(conversation="none", metadata={"a": "b"}), context)
    assert (aside.conversation, aside.stored, aside.truncation, aside.context) == (None, False, "disabled", context)
    assert aside.request.metadata == {"a": "b"}


NAMED_BY_A_NUMBER = '{"type": "response.create", "event_id": 5}'


@pytest.mark.parametrize(
    ("frame", "event_id"),
    [
        ('{"type": "response.create", "event_id": "mine", "response": {"temperature": 9}}', "mine"),
        ('{"type": "input_audio_buffer.append", "event_id": "mine"}', "mine"),
        ('{"type": 5, "event_id": "mine"}', "mine"),
        (NAMED_BY_A_NUMBER, None),
        ('{"event_id": "mine"', None),
        (b"\xff", None),
    ],
)
def test_what_is_wrong_is_told_with_the_clients_name_for_it(frame: str | bytes, event_id: str | None) -> None:
    fault, told = read_event(frame)
    assert told == event_id
    assert isinstance(fault, ApiError) or frame == NAMED_BY_A_NUMBER


class SilentChannel(Channel):
    """A client that says nothing."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.closed: tuple[int, str] | None = None

    async def frames(self) -> AsyncIterator[str | bytes]:
        await asyncio.Event().wait()
        yield ""

    async def send(self, event: dict[str, Any]) -> None:
        self.heard.append(event)

    async def part(self, event: dict[str, Any], code: int, reason: str) -> None:
        self.heard.append(event)
        self.closed = (code, reason)


def silent_socket(channel: SilentChannel) -> tuple[RealtimeSocket, Conversations]:
    conversations = Conversations(MemoryStore(), None, lambda owner: b"")  # type: ignore[arg-type]
    conversation = DefaultConversation(conversations.threads, "ana", "conv_1", exists=False)
    return RealtimeSocket(channel, "ana", session(), conversation, conversations), conversations


class ClosedChannel(SilentChannel):
    """A client that is gone, which the reader has not seen yet."""

    async def send(self, event: dict[str, Any]) -> None:
        raise WebSocketDisconnect(1006)


async def test_one_beside_the_conversation_ends_with_its_client_whoever_sees_it_go_first() -> None:
    socket, _ = silent_socket(ClosedChannel())
    run = Run(
        Response(
            id="resp_1", owner="ana", conversation="", previous=None, input=[], output="msg_1", created_at=0, request=Asked(store=False)
        ),
        Item(id="msg_1", parent=None, role="assistant", text="", created_at=0, response="resp_1", status="in_progress"),
    )
    socket._aside.add(run)
    await socket._tell(run, None)
    assert run.stopped_because == "cancelled"


async def test_a_session_that_lasts_too_long_is_told_and_ends() -> None:
    channel = SilentChannel()
    socket, conversations = silent_socket(channel)
    await socket.serve(seconds=0.05)
    created, over = channel.heard
    assert (created["type"], over["type"], over["error"]["code"]) == ("session.created", "error", "session_expired")
    assert created["event_id"] != over["event_id"]
    assert channel.closed == (1001, "session expired")
    assert await conversations.threads.listed("ana", 1) == []


class LoadingModels(Models):
    def __init__(self) -> None:
        pass

    def served(self, asked: str | None) -> str:
        raise NotReadyError("the model is being loaded", loading=True)


async def test_while_the_model_is_loaded_clients_are_told_to_come_again() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    conversations = Conversations(MemoryStore(), None, lambda owner: b"")  # type: ignore[arg-type]
    realtime = Realtime(conversations, LoadingModels(), EphemeralKeys())
    scope = {"type": "websocket", "subprotocols": ["realtime"], "query_string": b"", "state": {"owner": "ana", "ephemeral": None}}
    await realtime._socket(WebSocket(scope, receive, send))
    accepted, told, closed = sent
    assert accepted["subprotocol"] == "realtime"
    event = json.loads(told["text"])
    assert (event["type"], event["error"]["code"], event["error"]["type"]) == ("error", "model_loading", "server_error")
    assert event["error"]["retry_after"] > 0
    assert event["event_id"]
    assert closed["code"] == 1013
