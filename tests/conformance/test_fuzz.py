"""Ten thousand wrong requests, on a real server with the tiny model: each is answered or closed with a reason, and harms nobody. (slow)

`HOCKET_FUZZ_SEED` sets another seed; a failure shows the seed and the request's bytes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.app.wire import Wire
from tests.conformance.mutations import TEXTS, requests
from tests.conformance.targets import TARGETS, Body, Target
from tests.engine import tiny
from tests.serving import Server

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("HOCKET_FUZZ_SEED", "5"))
ANSWER_SECONDS = 20.0
FRAMES_PER_SOCKET = 150
REASONED = {1000, 1001, 1003, 1007, 1008, 1009}  # close codes that say whose fault it was, and that it was not the server's
CASES = sum(target.cases for target in TARGETS)
PATHS = 500  # cases of addresses, beside those of bodies

Answers = Callable[[dict[str, Any]], bool]


@pytest.fixture(scope="module")
def fuzzed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("fuzzed") / "model", tiny.config(context_length=512))
    flags = ("--model", str(folder), "--cache-dir", str(tiny_folder.parent / "cache"), "--threads", "1")
    running = Server(tmp_path_factory.mktemp("server"), *flags).start()
    yield running
    running.stop()


@pytest.fixture
def neighbour(fuzzed: Server) -> Iterator[Server]:
    """The server, with somebody at it whose streams must go on; and what must be true of it afterwards."""
    streams: list[int] = []
    stop = threading.Event()
    faults: list[BaseException] = []

    def chat() -> None:
        try:
            with Wire(fuzzed.url) as wire:
                while not stop.is_set() or not streams:
                    events = wire.respond(input="hello", ignore_eos=True, max_output_tokens=100)
                    assert events[-1]["response"]["usage"]["output_tokens"] == 100, events[-1]
                    streams.append(len(events))
                    stop.wait(0.5)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=chat)
    thread.start()
    yield fuzzed
    stop.set()
    thread.join(60)
    assert not faults, faults
    assert streams
    assert httpx.get(f"{fuzzed.url}/healthz").status_code == 200
    fuzzed.wait_until_idle()
    assert "Traceback" not in fuzzed.log
    assert " ERROR " not in fuzzed.log


def fuzz(cases: int, strategy: st.SearchStrategy[Any], attempt: Callable[[Any], None]) -> None:
    """Try so many of them. The same seed gives the same ones."""
    tried = 0

    @seed(SEED)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(strategy)
    def each(request: Any) -> None:
        nonlocal tried
        tried += 1
        note(f"HOCKET_FUZZ_SEED={SEED}, case {tried}")
        attempt(request)

    each()
    assert tried >= cases


# What counts as an answer


def check_answer(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:]
    elif answer.status_code >= 400:
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]


def ends_a_response(event: dict[str, Any]) -> bool:
    return event["type"] in ("error", "response.completed", "response.incomplete", "response.failed", "response.steer.failed")


def ends_a_realtime_event(event: dict[str, Any]) -> bool:
    kinds = ("session.updated", "conversation.item.added", "conversation.item.deleted", "conversation.item.retrieved")
    return event["type"] in ("error", "response.done", "conversation.item.truncated", *kinds)


class Frames:
    """Sockets, one after the other, on which frames are sent and must be answered."""

    def __init__(self, server: Server, path: str, answers: Answers) -> None:
        self._url = server.url.replace("http", "ws", 1) + path
        self._answers = answers
        self._socket: ClientConnection | None = None
        self._left = 0

    def send(self, frame: bytes, text: bool) -> None:
        socket = self._opened()
        try:
            socket.send(frame, text=text)
            if b"cancel" in frame:  # that may have no answer of its own: what is asked next is answered
                socket.send(json.dumps({"type": "fuzz.probe"}))
                self._wait(socket, _is_probe_s)
            else:
                self._wait(socket, self._answers)
        except ConnectionClosed as closed:
            assert closed.rcvd, "the connection broke off"
            assert closed.rcvd.code in REASONED, closed
            self._socket = None

    def close(self) -> None:
        if self._socket:
            self._socket.close()
        self._socket = None

    def _opened(self) -> ClientConnection:
        if self._left == 0:
            self.close()
        if self._socket is None:
            self._socket, self._left = connect(self._url, open_timeout=10, max_size=None), FRAMES_PER_SOCKET
        self._left -= 1
        return self._socket

    @staticmethod
    def _wait(socket: ClientConnection, answers: Answers) -> None:
        while not answers(json.loads(socket.recv(ANSWER_SECONDS))):
            pass


def _is_probe_s(event: dict[str, Any]) -> bool:
    return event["type"] == "error" and "fuzz.probe" in event["error"]["message"]


@pytest.fixture(scope="module")
def http(fuzzed: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fuzzed.url, timeout=ANSWER_SECONDS) as client:
        yield client


def path_of(target: Target, http: httpx.Client) -> str:
    if "{conversation}" not in target.path:
        return target.path
    return target.path.format(conversation=http.post("/v1/conversations").json()["id"])


# The tests


@pytest.mark.parametrize("target", [target for target in TARGETS if target.kind == "http"], ids=lambda target: target.name)
def test_what_is_to_be_mutated_is_accepted(fuzzed: Server, http: httpx.Client, target: Target) -> None:
    """Else the mutations of it would all be refused at the same door."""
    for body in target.valid:
        answer = http.post(path_of(target, http), json=body)
        assert answer.status_code == 200, (body, answer.text)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_wrong_requests(neighbour: Server, http: httpx.Client, target: Target) -> None:
    strategy = requests(target.valid, target.fields)
    if target.kind == "http":
        path = path_of(target, http)
        headers = {"content-type": "application/json"}
        fuzz(target.cases, strategy, lambda body: check_answer(http.post(path, content=body, headers=headers)))
        return
    frames = Frames(neighbour, target.path, ends_a_response if target.kind == "responses" else ends_a_realtime_event)
    try:
        fuzz(target.cases, st.tuples(strategy, st.booleans()), lambda case: frames.send(case[0], text=case[1]))
    finally:
        frames.close()


def test_wrong_addresses(neighbour: Server, http: httpx.Client) -> None:
    made: Body = http.post("/v1/conversations", json={"items": [{"type": "message", "role": "user", "content": "hi"}]}).json()
    response: Body = http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1}).json()
    ids = st.one_of(st.sampled_from([made["id"], response["id"]]), TEXTS.map(lambda text: text.encode("utf-8", "replace").decode()[:500]))
    places = st.sampled_from(
        [
            "/v1/responses/{}",
            "/v1/responses/{}/input_items",
            "/v1/responses/{}/cancel",
            "/v1/conversations/{}",
            "/v1/conversations/{}/items/{}",
        ]
    )
    names = st.sampled_from(["stream", "starting_after", "limit", "after", "order", "include"])
    queries = st.dictionaries(names, st.one_of(ids, st.integers().map(str), st.sampled_from(["true", "desc", "1"])), max_size=3)

    def attempt(case: tuple[str, str, str, str, dict[str, str]]) -> None:
        method, place, first, second, query = case
        for part in (first, second):
            place = place.replace("{}", quote(part, safe=""), 1)
        check_answer(http.request(method, place, params=query))

    fuzz(PATHS, st.tuples(st.sampled_from(["GET", "POST", "PUT"]), places, ids, ids, queries), attempt)


def test_there_are_ten_thousand() -> None:
    assert CASES >= 10_000
