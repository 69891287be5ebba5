"""Events as a function of the log, and the end of a connection's time, on the tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai.types.realtime import RealtimeResponse
from starlette.websockets import WebSocket

from app.api.choices import finish_reason
from app.api.errors import ApiError
from app.api.models import Models
from app.api.realtime.events import told
from app.api.responses.events import follow
from app.api.responses.socket import ResponsesSocket
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.store.memory import MemoryStore
from app.store.records import Asked, Entry, Item, Response
from engine.batcher import Batcher
from engine.core import EngineOptions
from tests.app.wire import Event, check_event, check_numbers

pytestmark = pytest.mark.asyncio(loop_scope="module")


def run_of(status: str, texts: tuple[str, ...] = ("Hel", "lo"), calls: bool = False, **fields: Any) -> Run:
    """A run that has ended."""
    reply = Item(
        id="msg_1",
        parent=None,
        role="assistant",
        text="".join(texts),
        created_at=1.0,
        response="resp_1",
        status="completed" if status == "completed" else "incomplete",
        calls=calls,
    )
    response = Response(
        id="resp_1",
        owner="ana",
        conversation="conv_1",
        previous=None,
        input=[],
        output="msg_1",
        created_at=1.0,
        completed_at=2.5,
        request=Asked(model="m"),
        status=status,  # type: ignore[arg-type]
        **fields,
    )
    return Run(response, reply, [Entry([1], text) for text in texts])


async def events_of(run: Run, after: int = -1) -> list[Event]:
    events = [event async for event in follow(run, after)]
    for event in events:
        check_event(event)
    return events


async def test_a_failure_is_one_terminal_event_with_what_was_said_before_it() -> None:
    events = await events_of(run_of("failed", error="the engine broke"))
    check_numbers(events)
    ended = events[-1]
    assert ended["type"] == "response.failed"
    assert ended["response"]["error"] == {"code": "server_error", "message": "the engine broke"}
    (message,) = ended["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Hello")


async def test_a_grammar_that_failed_in_a_reply_is_told_as_the_request_s_fault_in_every_protocol() -> None:
    """It is not worth trying again, as the server's own faults are."""
    message = "the reply could not be held to its grammar: too many items"
    run = run_of("failed", error=message, error_code="invalid_grammar")
    ended = (await events_of(run))[-1]["response"]
    assert ended["error"] == {"code": "invalid_prompt", "message": message}, "one of the codes that clients know"
    (*_, done) = [event async for event in told(run, None)]
    assert done["response"]["status_details"]["error"] == {
        "type": "invalid_request_error",
        "code": "invalid_grammar",
        "message": message,
        "param": None,
    }
    RealtimeResponse.model_validate(done["response"], strict=True)
    with pytest.raises(ApiError) as failed:
        finish_reason(run.response)
    assert (failed.value.refusal.status, failed.value.refusal.code, str(failed.value)) == (400, "invalid_grammar", message)
    with pytest.raises(ApiError) as failed:
        finish_reason(run_of("failed", error="the engine broke", error_code="engine_error").response)
    assert (failed.value.refusal.status, failed.value.refusal.code) == (500, "server_error")


async def test_every_end_and_every_beginning() -> None:
    broken_off = ("<tool_call>", '\n{"name": "f", "argum', 'ents": {"a": ')
    for run in (
        run_of("completed"),
        run_of("completed", ()),
        run_of("incomplete", reason="max_output_tokens"),
        run_of("incomplete", reason="cancelled"),
        run_of("incomplete", (), reason="interrupted"),
        run_of("failed", (), error="x"),
        run_of("incomplete", ("I look.\n", *broken_off), calls=True, reason="max_output_tokens"),
        run_of("completed", ("I look.\n", *broken_off, "1}}\n</tool_call>", "\n<tool_call>\n{}"), calls=True),
    ):
        whole = await events_of(run)
        check_numbers(whole)
        assert whole[-1]["response"]["output"], "what was said, or an empty message"
        for after in range(len(whole) + 1):
            assert await events_of(run, after) == whole[after + 1 :]


# The end of a connection's time


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batcher(tiny_folder: Path) -> AsyncIterator[Batcher]:
    made = Batcher(EngineOptions(model=str(tiny_folder), cache_dir=tiny_folder.parent / "cache", kernels="reference", threads=1))
    made.start()
    await made.settled()
    yield made
    await made.close()


class Peer:
    """The client's side of a WebSocket, as ASGI sees it."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.frames.put_nowait({"type": "websocket.connect"})

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def events(self) -> list[Event]:
        return [json.loads(message["text"]) for message in self.sent if message["type"] == "websocket.send"]


async def served(batcher: Batcher, conversations: Conversations, peer: Peer, max_seconds: float) -> None:
    socket = WebSocket({"type": "websocket", "headers": [], "subprotocols": []}, peer.frames.get, peer.send)
    await socket.accept()
    await ResponsesSocket(socket, "ana", conversations, Models(batcher, None), max_seconds).serve()


async def test_a_connection_is_told_that_its_time_is_over(batcher: Batcher) -> None:
    peer = Peer()
    await served(batcher, Conversations(MemoryStore(), batcher, str.encode), peer, max_seconds=0.0)
    (error,) = peer.events
    check_event(error)
    assert (error["status"], error["error"]["code"]) == (400, "websocket_connection_limit_reached")
    assert peer.sent[-1] == {"type": "websocket.close", "code": 1001, "reason": "connection limit reached"}


async def test_what_runs_then_goes_on_if_it_is_stored(batcher: Batcher) -> None:
    conversations = Conversations(MemoryStore(), batcher, str.encode)
    peer = Peer()
    for lane, store in (("kept", True), ("lost", False)):
        create = {
            "type": "response.create",
            "stream_id": lane,
            "store": store,
            "input": "hello",
            "max_output_tokens": 200,
            "ignore_eos": True,
        }
        peer.frames.put_nowait({"type": "websocket.receive", "text": json.dumps(create)})
    await served(batcher, conversations, peer, max_seconds=1.0)
    *before, error = peer.events
    assert error["error"]["code"] == "websocket_connection_limit_reached"
    begun = {event["stream_id"]: event["response"]["id"] for event in before if event["type"] == "response.created"}
    assert set(begun) == {"kept", "lost"}
    run = await conversations.attach("ana", begun["kept"])
    assert (await run.done()).reason == "max_output_tokens"
    await conversations.close()
