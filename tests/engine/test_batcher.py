"""The door between asyncio and the engine thread, on the tiny model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.batcher import STALL_SECONDS, Batcher, Failed, Generation, Loading, Ready
from engine.core import (
    BusyError,
    Delta,
    EngineOptions,
    FinishReason,
    Message,
    NotReadyError,
    Prompt,
    RequestError,
    SamplingParams,
    StepPlan,
    StepResult,
)
from engine.engine import Progress


async def until(condition: Callable[[], bool]) -> None:
    """For what the engine thread does and tells nobody."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


def options(folder: Path, **changes: int) -> EngineOptions:
    return EngineOptions(model=str(folder), cache_dir=folder.parent / "cache", kernels="reference", threads=1, **changes)


@pytest.fixture
async def batcher(tiny_folder: Path) -> AsyncIterator[Batcher]:
    made = Batcher(options(tiny_folder, max_batch_size=4, max_queue=2))
    made.start()
    await made.settled()
    yield made
    await made.close()


def greedy(max_tokens: int = 8, **sampling: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **sampling)  # type: ignore[arg-type]


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


async def test_loading_is_told_and_nothing_is_taken_before(tiny_folder: Path) -> None:
    batcher = Batcher(options(tiny_folder))
    assert isinstance(batcher.state, Loading)
    with pytest.raises(NotReadyError, match="loading"):
        batcher.session(b"a").generate([1], greedy())
    with pytest.raises(NotReadyError):
        await batcher.prompt([Message("user", "hi")])
    assert not batcher.responsive
    batcher.start()
    ready = await batcher.settled()
    assert ready == batcher.state == Ready("model", 256, 300, ready.fingerprint)
    assert batcher.responsive
    await batcher.close()


async def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    batcher = Batcher(options(tmp_path / "missing.gguf"))
    batcher.start()
    with pytest.raises(NotReadyError, match=r"missing\.gguf"):
        await batcher.settled()
    assert isinstance(batcher.state, Failed)
    await batcher.close()


async def test_prompts_stream_side_by_side(batcher: Batcher) -> None:
    prompt = await batcher.prompt([Message("user", "hello you")])
    session = batcher.session(b"a")
    replies = await asyncio.gather(*(collect(session.generate(prompt.ids, greedy())) for _ in range(4)))
    for deltas in replies:
        assert [bool(delta.finish) for delta in deltas] == [False] * 7 + [True]
        assert deltas[-1].reply == replies[0][-1].reply
    again = await collect(session.generate(prompt.ids, greedy()))
    assert again[-1].cached == (len(prompt.ids) - 1) // 16 * 16 > 0
    other = await collect(batcher.session(b"b").generate(prompt.ids, greedy()))
    assert other[-1].cached == 0, "another salt shares nothing (E3)"
    assert other[-1].reply == again[-1].reply


async def test_tokenising_leaves_the_loop_alone(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8."""
    assert batcher._engine
    threads = []
    real = batcher._engine.template.prompt

    def watched(messages: list[Message]) -> Prompt:
        threads.append(threading.current_thread().name)
        return real(messages)

    monkeypatch.setattr(batcher._engine.template, "prompt", watched)
    await batcher.prompt([Message("user", "hi")])
    assert threads
    assert threads[0].startswith("tokeniser")


async def test_a_thread_that_is_not_seen_is_not_ready(batcher: Batcher) -> None:
    """S9: loaded is not enough."""
    release = threading.Event()

    def stuck(plan: StepPlan) -> StepResult:
        release.wait(60)
        raise RuntimeError("let go")

    assert batcher._engine
    batcher._engine.runner.run = stuck  # type: ignore[method-assign]
    generation = batcher.session(b"a").generate([3, 4], greedy())
    assert batcher.responsive

    def unseen() -> bool:
        batcher._seen -= STALL_SECONDS  # the thread may have been on its way into the step
        return not batcher.responsive

    await until(unseen)
    release.set()
    assert (await collect(generation))[-1].finish is FinishReason.ERROR
    await until(lambda: batcher.responsive)


async def test_closing_while_the_model_loads_does_not_wait_for_it(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.engine

    reached = threading.Event()

    def endless(options: EngineOptions, progress: Progress) -> None:
        while True:
            reached.set()
            progress("converting", None)
            time.sleep(0.001)

    monkeypatch.setattr(engine.engine.Engine, "load", endless)
    batcher = Batcher(options(tiny_folder))
    batcher.start()
    await asyncio.to_thread(reached.wait)
    await batcher.close()
    assert batcher._thread
    assert not batcher._thread.is_alive()


async def test_one_call_into_the_loop_per_step(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    real = batcher._loop.call_soon_threadsafe
    monkeypatch.setattr(batcher._loop, "call_soon_threadsafe", lambda *args: (calls.append(args[0]), real(*args))[1])
    session = batcher.session(b"a")
    await asyncio.gather(*(collect(session.generate([3 + i] * 5, greedy(20))) for i in range(4)))
    monkeypatch.undo()
    assert batcher._engine
    assert calls.count(batcher._deliver) <= len(batcher._engine.steps) <= 24


async def test_cancelling(batcher: Batcher) -> None:
    session = batcher.session(b"a")
    doomed, other = session.generate([3, 4], greedy(200)), session.generate([5, 6], greedy(30))
    async for delta in doomed:
        if delta.finish:
            break
        doomed.cancel()
        doomed.cancel()
    assert delta.finish is FinishReason.CANCELLED
    assert (await collect(other))[-1].finish is FinishReason.LENGTH
    doomed.cancel()
    assert (await collect(session.generate([7], greedy())))[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("ids", "sampling", "param"),
    [
        ([], {}, "input"),
        ([1] * 256, {}, "input"),
        ([300], {}, "input"),
        ([-1], {}, "input"),
        ([1], {"max_tokens": 0}, "max_output_tokens"),
        ([1], {"max_tokens": 10**12}, "max_output_tokens"),
        ([1], {"stop_ids": (300,)}, "stop_token_ids"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
async def test_what_could_not_run_is_refused_at_once(batcher: Batcher, ids: list[int], sampling: dict[str, object], param: str) -> None:
    """E14, S3, S4."""
    neighbour = batcher.session(b"a").generate([3, 4], greedy(20))
    with pytest.raises(RequestError, match=r"expected .*got|got an empty") as refused:
        batcher.session(b"a").generate(ids, greedy(**sampling))
    assert refused.value.param == param
    assert (await collect(neighbour))[-1].finish is FinishReason.LENGTH


async def test_a_text_that_is_too_long_is_refused_without_being_tokenised(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    monkeypatch.setattr(batcher._engine.template, "prompt", lambda messages: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match="got at least") as refused:
        await batcher.prompt([Message("user", "x" * 1_000_000)])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="got at least"):
        await batcher.prompt([Message("user", "x")] * 300)


async def test_a_full_queue_refuses(batcher: Batcher) -> None:
    session = batcher.session(b"a")
    taken = [session.generate([3 + i], greedy(30)) for i in range(6)]
    with pytest.raises(BusyError, match="of at most 6"):
        session.generate([9], greedy())
    await asyncio.gather(*map(collect, taken))
    await collect(session.generate([9], greedy()))


async def test_a_dead_engine_thread_ends_every_reply_and_is_not_ready(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """S9, C11."""
    assert batcher._engine
    generation = batcher.session(b"a").generate([3, 4], greedy(200))
    await anext(aiter(generation))

    def die(*_: object) -> None:
        raise SystemError("gone")

    monkeypatch.setattr(batcher._engine, "step", die)
    last = [delta async for delta in generation][-1]
    assert last.finish is FinishReason.ERROR
    assert not batcher.responsive
    with pytest.raises(NotReadyError, match="SystemError"):
        batcher.session(b"a").generate([3], greedy())


async def test_closing_ends_what_is_live(tiny_folder: Path) -> None:
    batcher = Batcher(options(tiny_folder))
    batcher.start()
    await batcher.settled()
    generation = batcher.session(b"a").generate([3, 4], greedy(200))
    await batcher.close()
    assert (await collect(generation))[-1].finish is FinishReason.CANCELLED


def test_the_socket_side_imports_no_torch() -> None:
    code = "import sys, app.server, app.cli; sys.exit(bool({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
