"""Plain HTTP clients that go away, on the tiny model: the engine's steps are counted."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.api import sse
from engine.batcher import Batcher, Session
from engine.core import BusyError, Grammar
from tests.app.api.in_process import InProcess, gated
from tests.engine.batching import options, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEP = 8  # tokens in one step
PROMPT = "0 " * 60
IDS = list(range(10, 130))
NUMBERS = itertools.count(150)  # a prompt that begins with a new one is in no cache
KEPT_GOING = {"ignore_eos": True, "max_tokens": 100, "stop_token_ids": [], "logit_bias": {"0": -100, "1": -100, "2": -100}}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})
ASKED: list[tuple[str, dict[str, Any]]] = [
    CHAT,
    (CHAT[0], {**CHAT[1], "n": 3}),
    ("/v1/completions", {"prompt": [IDS, IDS[::-1]], "n": 2, "echo": True, "logprobs": 1}),
    ("/generate", {"prompt": PROMPT}),
]


def fresh(body: dict[str, Any]) -> dict[str, Any]:
    number = next(NUMBERS)
    if "messages" in body:
        return {**body, "messages": [{"role": "user", "content": f"{number} {PROMPT}"}]}
    prompt = body["prompt"]
    return {**body, "prompt": f"{number} {prompt}" if isinstance(prompt, str) else [[number, *ids] for ids in prompt]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_folder: Path) -> AsyncIterator[InProcess]:
    batcher = Batcher(options(tiny_folder, max_batch_size=8, max_step_tokens=STEP))
    batcher.start()
    await batcher.settled()
    served = InProcess(batcher)
    async with served.serving():
        yield served
    await batcher.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("silent", [True, False], ids=["prefill", "reply"])
@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_the_work_stops_within_two_steps(running: InProcess, path: str, body: dict[str, Any], silent: bool, stream: bool) -> None:
    """C7. The engine is held meanwhile: that the client has gone is noticed although there is nothing to send."""
    engine, batcher = running.engine, running.batcher
    aborted: set[int] = set()
    abort = batcher._abort

    def watched(sequence: Any) -> None:
        aborted.add(sequence.id)
        abort(sequence)

    batcher._abort = watched  # type: ignore[method-assign]
    taken = engine.steps[-1].index if engine.steps else -1
    with gated(engine) as gate:
        allowed = 3 if silent else 80
        gate.allow(allowed)
        _, writer = await running.ask(path, {**KEPT_GOING, **fresh(body), "stream": stream})
        await until(lambda: bool(engine.steps) and engine.steps[-1].index == taken + allowed)
        await until(lambda: batcher.live > 0)
        generations = list(batcher._live.values())
        if not silent:
            assert any(generation.sequence.output for generation in generations), "it speaks already"
            assert len(generations) == body.get("n", 1) * (2 if path == "/v1/completions" else 1)
        writer.transport.abort()
        await until(lambda: aborted >= set(batcher._live))
        gate.open()
        await until(lambda: batcher.live == 0 and not running.conversations._runs)
    assert engine.steps[-1].index - taken - allowed <= 2
    await until(lambda: engine.idle)
    assert engine.scheduler.pool.owned == 0
    engine.scheduler.pool.check([])
    batcher._abort = abort  # type: ignore[method-assign]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_nothing_begins_for_a_client_that_goes_while_its_grammar_is_compiled(
    running: InProcess, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def compile(session: Session, grammar: Grammar) -> None:
        begun.set()
        try:
            await release.wait()
        finally:
            begun.clear()

    monkeypatch.setattr(Session, "compile", compile)
    form = {"regex": "a+"} if path == "/generate" else {"response_format": {"type": "regex", "regex": "a+"}}
    body = CHAT[1] if path == CHAT[0] else {"prompt": PROMPT}
    steps = running.engine.steps[-1].index if running.engine.steps else -1
    _, writer = await running.ask(path, {**fresh(body), **form})
    await begun.wait()
    writer.transport.abort()
    await until(lambda: not begun.is_set())
    await until(lambda: not running.batcher._room._live)
    assert not running.conversations._runs
    assert running.batcher.live == 0
    assert (running.engine.steps[-1].index if running.engine.steps else -1) == steps


async def test_a_client_that_reads_on_gets_everything(running: InProcess) -> None:
    """The watch for its going takes nothing away."""
    reader, _ = await running.ask("/v1/chat/completions", {**KEPT_GOING, **CHAT[1], "stream": True, "max_tokens": 5})
    body = await reader.readuntil(b"data: [DONE]\n\n")
    assert body.count(b'"finish_reason":"length"') == 1


@pytest.mark.parametrize("blocked", ["sending", "waiting"])
async def test_events_are_closed_when_the_client_goes(running: InProcess, blocked: str) -> None:
    """Also while nothing more can be sent to it, and whoever else holds them."""
    sent, closed, never = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def events() -> AsyncIterator[dict[str, Any]]:
        try:
            yield {"n": 1}
            await never.wait()
        finally:
            closed.set()

    async def receive() -> Any:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.set()
            if blocked == "sending":
                await never.wait()

    held = events()
    response = sse.stream(held, named=False)
    await response({"type": "http"}, receive, send)
    assert closed.is_set()


async def test_a_stream_that_breaks_off_says_so(running: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(running.engine) as gate:
        reader, _ = await running.ask("/v1/chat/completions", {**KEPT_GOING, **CHAT[1], "stream": True})
        gate.allow(2)
        await reader.readuntil(b'"role":"assistant"')

        def fail(plan: object) -> None:
            raise RuntimeError("a step failed")

        monkeypatch.setattr(running.engine.runner, "run", fail)
        gate.open()
        rest = await reader.readuntil(b"data: [DONE]\n\n")
    assert b'data: {"error":{"message":"the engine failed in a step: RuntimeError","type":"server_error","param":null' in rest


async def test_a_grammar_that_fails_in_a_reply_is_told_by_name(running: InProcess) -> None:
    """One that was accepted, and of which there is ever more to know."""
    grows = 'start: s\ns: s s | s s s | "a" | ""'
    held = {"response_format": {"type": "grammar", "grammar": grows}, "max_tokens": 200, "logit_bias": {"0": -100, "1": -100, "2": -100}}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=60) as client:
        asked = {"messages": [{"role": "user", "content": "hello"}], **held}
        whole = await client.post(CHAT[0], json=asked)
        error = whole.json()["error"]
        assert (whole.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_grammar"), "no retry helps"
        assert "held to its grammar" in error["message"]
        streamed = await client.post(CHAT[0], json={**asked, "stream": True})
        assert (streamed.status_code, error) == (200, json.loads(streamed.text.split("data: ")[-2])["error"])


async def test_a_choice_that_cannot_begin_ends_the_others(running: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be full by the time that the first choice has read the prompt."""
    submit, count, begun = running.conversations.submit, 0, []

    async def second_is_refused(turn: Any, scratch: Any = None) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise BusyError("too many wait")
        begun.append(await submit(turn, scratch))
        return begun[-1]

    monkeypatch.setattr(running.conversations, "submit", second_is_refused)
    reader, _ = await running.ask("/v1/chat/completions", {**KEPT_GOING, **CHAT[1], "n": 3})
    assert b" 429 " in await reader.readline()
    await until(lambda: len(begun) == 1 and begun[0].finished)
    count = 0
    again, _ = await running.ask("/v1/chat/completions", {**KEPT_GOING, **CHAT[1], "n": 3, "stream": True})
    rest = await again.readuntil(b"data: [DONE]\n\n")
    assert b'data: {"error":{"message":"too many wait","type":"rate_limit_error"' in rest
    await until(lambda: len(begun) == 2 and begun[1].finished)
    assert [run.response.reason for run in begun] == ["cancelled"] * 2


async def test_a_choice_that_is_just_beginning_ends_too(running: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, entered, release, begun = running.conversations.submit, asyncio.Event(), asyncio.Event(), []

    async def second_takes_long(turn: Any, scratch: Any = None) -> Any:
        if begun:
            entered.set()
            await release.wait()
        begun.append(await submit(turn, scratch))
        return begun[-1]

    monkeypatch.setattr(running.conversations, "submit", second_takes_long)
    _, writer = await running.ask("/v1/chat/completions", {**KEPT_GOING, **CHAT[1], "n": 2})
    await entered.wait()
    writer.transport.abort()
    await until(lambda: begun[0].stopped_because is not None)
    release.set()
    await until(lambda: len(begun) == 2 and all(run.finished for run in begun))
    assert [run.response.reason for run in begun] == ["cancelled"] * 2


async def test_a_prompt_is_read_once_for_all_its_choices(running: InProcess) -> None:
    engine = running.engine
    taken = engine.steps[-1].index
    ids = [20, 30, 40, 50] * 20
    reader, _ = await running.ask("/v1/completions", {"prompt": ids, "n": 8, "max_tokens": 4, "ignore_eos": True})
    await reader.readuntil(b"\r\n\r\n")
    read = sum(tokens for step in engine.steps if step.index > taken for _, tokens in step.prefills)
    assert read <= len(ids) + 7 * 1, "the last token of each choice after the first"
