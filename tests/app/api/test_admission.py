"""What clients are told when the room is full, and whose work is background: the whole server in this process, on the tiny model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from openai.types.responses.responses_server_event import ResponseWsError

import app.server
from app.cli import listen
from app.refusal import Refusal
from app.settings import Settings
from app.store import StoreError
from app.store.memory import MemoryStore
from app.websocket import WebSocketProtocol
from engine.batcher import Batcher, Generation
from engine.core import Sequence, StepPlan, StepResult
from tests.app.wire import TERMINAL, Event, Wire

ROOM = 4  # two run, two wait
HINT = 2.3456  # seconds; said as long as nothing has ended
SHORT = {"ignore_eos": True, "max_output_tokens": 4}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello you"}], "max_tokens": 4}


class Hall:
    """A server whose engine can be held before its next step."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sequences: list[Sequence] = []  # as they came
        self._go_on, started, hall = threading.Event(), threading.Event(), self

        class Observed(Batcher):
            def start(self) -> None:
                super().start()
                hall.batcher = self
                started.set()

            def _submit(self, *request: Any) -> Generation:
                generation = super()._submit(*request)
                hall.sequences.append(generation.sequence)
                return generation

        monkeypatch.setattr(app.server, "Batcher", Observed)
        listeners = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
        config = uvicorn.Config(app.server.create_app(settings), loop="asyncio", ws=WebSocketProtocol, lifespan="on", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=(listeners,))
        self._thread.start()
        assert started.wait(60)
        asyncio.run_coroutine_threadsafe(self.batcher.settled(), self.batcher._loop).result(60)
        assert self.batcher._engine
        real = self.batcher._engine.runner.run

        def run(plan: StepPlan) -> StepResult:
            self._go_on.wait(60)
            return real(plan)

        monkeypatch.setattr(self.batcher._engine.runner, "run", run)
        self.let_go()

    def hold(self) -> None:
        self._go_on.clear()

    def let_go(self) -> None:
        self._go_on.set()

    def close(self) -> None:
        self.let_go()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def http(self, owner: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, headers={"authorization": f"Bearer {owner}-key"})

    def wire(self, owner: str) -> Wire:
        return Wire(self.url, additional_headers={"Authorization": f"Bearer {owner}-key"})

    def sdk(self, owner: str, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=f"{owner}-key", max_retries=max_retries)


@pytest.fixture
def hall(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    monkeypatch.setattr("engine.admission.DEFAULT_SECONDS", HINT)
    (tmp_path / "keys").write_text("ana-key ana\nben-key ben\n")
    settings = Settings(
        model=str(tiny_folder),
        cache_dir=tiny_folder.parent / "cache",
        data_dir=tmp_path,
        store="memory",
        api_key=[str(tmp_path / "keys")],
        kernels="reference",
        threads=1,
        max_batch_size=2,
        max_queue=ROOM - 2,
    )
    made = Hall(settings, monkeypatch)
    yield made
    made.close()


def enter(wire: Wire, requests: int = ROOM) -> None:
    """Returns once they are all live."""
    for lane in range(requests):
        wire.create(input="hello you", stream_id=f"lane-{lane}", **SHORT)
    begun = 0
    while begun < requests:
        event = wire.receive()
        assert event["type"] not in TERMINAL, event
        begun += event["type"] == "response.content_part.added"


def finish(wire: Wire, requests: int = ROOM) -> list[Event]:
    return [wire.rest()[-1] for _ in range(requests)]


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"input": "hi", **SHORT}), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_room_answers_429_and_when_to_try_again(hall: Hall, path: str, body: dict[str, Any], stream: bool) -> None:
    hall.hold()
    with hall.wire("ana") as flood, hall.http("ana") as http:
        enter(flood)
        answer = http.post(path, json=body | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (429, "3", "2346")
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "4 requests are running or waiting" in error["message"] and error["message"].endswith("try again in 3 s")
        hall.let_go()
        assert {event["type"] for event in finish(flood)} == {"response.incomplete"}
        assert http.post(path, json=body | {"stream": stream}).status_code == 200
    assert len(hall.sequences) == ROOM + 1, "what was refused has not come"


def test_the_official_sdk_waits_as_long_as_it_is_told(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    hall.hold()
    slept: list[float] = []
    with hall.wire("ana") as flood:
        enter(flood)

        def instead_of_sleeping(seconds: float) -> None:
            slept.append(seconds)
            hall.let_go()
            finish(flood)

        monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**{**vars(time), "sleep": instead_of_sleeping}))
        made = hall.sdk("ana", max_retries=1).responses.create(model=hall.batcher.ready().model, input="hi", max_output_tokens=4)
    assert made.status in ("completed", "incomplete")
    assert slept == [2.346]


def test_a_websocket_is_told_by_an_error_event(hall: Hall) -> None:
    hall.hold()
    with hall.wire("ana") as flood, hall.sdk("ana").responses.connect() as connection:
        enter(flood)
        flood.create(input="hi", stream_id="late")
        refused = flood.receive()
        assert (refused["type"], refused["status"], refused["stream_id"]) == ("error", 429, "late")
        assert (refused["error"]["code"], refused["error"]["retry_after"]) == ("rate_limit_exceeded", HINT)
        connection.response.create(model=hall.batcher.ready().model, input="hi")
        event = connection.recv()
        assert isinstance(event, ResponseWsError)
        assert event.error.model_extra == {"retry_after": HINT}
        hall.let_go()
        finish(flood)
        assert flood.respond(input="hi", stream_id="late", **SHORT)[-1]["type"] == "response.incomplete"


def test_a_flood_shuts_nobody_else_out(hall: Hall) -> None:
    hall.hold()
    with hall.wire("ana") as flood, hall.wire("ben") as other, hall.http("ana") as http:
        enter(flood)
        enter(other, ROOM // 2)
        assert http.post("/v1/responses", json={"input": "hi"}).status_code == 429
        other.create(input="hi", stream_id="beyond")
        assert other.receive()["status"] == 429
        hall.let_go()
        assert {event["type"] for event in finish(flood) + finish(other, ROOM // 2)} == {"response.incomplete"}


def test_a_burst_is_refused_before_it_is_written(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the log is slow nothing is live yet, and the room is full all the same: no accepted response fails for want of a place."""
    real, written = MemoryStore.accept, threading.Event()

    async def slow(self: MemoryStore, *records: Any) -> Any:
        await asyncio.to_thread(written.wait, 60)
        return await real(self, *records)

    monkeypatch.setattr(MemoryStore, "accept", slow)
    with hall.wire("ana") as burst:
        for lane in range(ROOM + 1):
            burst.create(input="hi", stream_id=f"lane-{lane}", **SHORT)
        refused = burst.receive()
        assert (refused["type"], refused["status"]) == ("error", 429)
        written.set()
        assert {event["type"] for event in finish(burst)} == {"response.incomplete"}


def test_what_could_not_be_written_gives_its_place_back(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise StoreError("no room on the disk")

    with hall.http("ana") as http, monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "accept", broken)
        for _ in range(ROOM):
            assert http.post("/v1/responses", json={"input": "hi"}).status_code == 503
    hall.hold()
    with hall.wire("ana") as flood:
        enter(flood)
        hall.let_go()
        finish(flood)


def test_the_hint_follows_what_happens(hall: Hall) -> None:
    """Four have ended in no time: the next end cannot be far."""
    with hall.wire("ana") as flood, hall.http("ana") as http:
        for _ in range(ROOM):
            flood.respond(input="hi", **SHORT)
        hall.hold()
        enter(flood)
        assert http.post("/v1/chat/completions", json=CHAT).headers["retry-after-ms"] == "1000"
        hall.let_go()
        finish(flood)


@pytest.mark.parametrize(
    ("refusal", "headers", "hint"),
    [
        (Refusal(429, "too many", retry_after=0.5), ("1", "500"), 0.5),
        (Refusal(429, "too many"), ("2", "2000"), 2.0),
        (Refusal(503, "loading"), ("2", "2000"), 2.0),
        (Refusal(503, "no such model", "model_failed"), (None, None), None),
        (Refusal(400, "wrong"), (None, None), None),
        (Refusal(500, "broken"), (None, None), None),
    ],
)
def test_only_what_may_pass_has_a_hint(refusal: Refusal, headers: tuple[str | None, str | None], hint: float | None) -> None:
    answer = refusal.response()
    assert (answer.headers.get("retry-after"), answer.headers.get("retry-after-ms")) == headers
    assert refusal.event["error"].get("retry_after") == hint
    assert "retry_after" not in json.loads(bytes(answer.body))["error"]


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, "default"),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default"}, 0, "default"),
        ({"service_tier": "priority"}, 0, "default"),
        ({"service_tier": "flex"}, 1, "flex"),
        ({"background": True}, 1, "default"),
    ],
)
def test_what_is_background_work(hall: Hall, fields: dict[str, Any], priority: int, tier: str) -> None:
    with hall.http("ana") as http, hall.wire("ana") as wire:
        made = http.post("/v1/responses", json={"input": "hi", **SHORT, **fields}).json()
        with http.stream("GET", f"/v1/responses/{made['id']}?stream=true") as events:
            events.read()
        assert hall.sequences[-1].priority == priority
        if "background" not in fields:
            completion = http.post("/v1/chat/completions", json=CHAT | fields).json()
            assert (hall.sequences[-1].priority, completion["service_tier"]) == (priority, tier)
            chunk = next(http.post("/v1/chat/completions", json=CHAT | {"stream": True} | fields).iter_lines())
            assert (hall.sequences[-1].priority, json.loads(chunk.removeprefix("data: "))["service_tier"]) == (priority, tier)
        assert made["service_tier"] == tier
        shown = wire.respond(input="hi", **SHORT, **fields)[-1]["response"]
        assert shown["service_tier"] == tier
        assert hall.sequences[-1].priority == (priority if "background" not in fields else 0), "on a WebSocket someone waits"
        assert shown["background"] is False


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"input": "hi"}), ("/v1/chat/completions", CHAT)])
def test_a_tier_that_is_not_served_is_refused(hall: Hall, path: str, body: dict[str, Any]) -> None:
    with hall.http("ana") as http:
        answer = http.post(path, json=body | {"service_tier": "scale"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")
    assert 'expected a service_tier of auto, default, priority, flex, got "scale"' in answer.json()["error"]["message"]
