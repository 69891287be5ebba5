"""The door between asyncio and the engine thread, on the tiny model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.admission import DEFAULT_SECONDS, LEAST_SECONDS
from engine.batcher import STALL_SECONDS, Batcher, Failed, Loading, Ready
from engine.core import (
    BusyError,
    EngineOptions,
    FinishReason,
    Message,
    NotReadyError,
    Prompt,
    RequestError,
    StepPlan,
    StepResult,
)
from engine.engine import Progress
from tests.engine.batching import batcher, collect, greedy, options, until

__all__ = ["batcher"]


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
    assert again[-1].cached == len(prompt.ids) - 1
    other = await collect(batcher.session(b"b").generate(prompt.ids, greedy()))
    assert other[-1].cached == 0, "another salt shares nothing (E3)"
    assert other[-1].reply == again[-1].reply


async def test_tokenising_leaves_the_loop_alone(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8."""
    assert batcher._engine
    threads = []
    real = batcher._engine.template.prompt

    def watched(*arguments: Any) -> Prompt:
        threads.append(threading.current_thread().name)
        return real(*arguments)

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


async def test_a_full_queue_says_when_to_try_again(batcher: Batcher) -> None:
    session = batcher.session(b"a")
    taken = [session.generate([3 + i], greedy(30)) for i in range(6)]
    with pytest.raises(BusyError, match="try again in 2 s") as busy:
        session.generate([9], greedy())
    assert busy.value.retry_after == DEFAULT_SECONDS
    await asyncio.gather(*map(collect, taken))
    taken = [session.generate([3 + i], greedy(30)) for i in range(6)]
    with pytest.raises(BusyError) as busy:
        session.generate([9], greedy())
    assert busy.value.retry_after == LEAST_SECONDS, "six have ended in no time"


async def test_a_flood_shuts_no_other_owner_out(batcher: Batcher) -> None:
    flood = [batcher.session(b"a").generate([3 + i], greedy(100)) for i in range(6)]
    with pytest.raises(BusyError):
        batcher.session(b"a").generate([9], greedy())
    others = [batcher.session(b"b").generate([9 + i], greedy(4)) for i in range(3)]
    with pytest.raises(BusyError):
        batcher.session(b"b").generate([9], greedy())
    assert batcher.live == 9
    ends = await asyncio.gather(*map(collect, flood + others))
    assert {deltas[-1].finish for deltas in ends} == {FinishReason.LENGTH}
    assert batcher.live == 0


async def test_what_is_admitted_keeps_its_place_until_it_comes_or_leaves(batcher: Batcher) -> None:
    """However many are admitted before the first of them has come: none is refused later."""
    sessions = [batcher.session(b"a") for _ in range(7)]
    for session in sessions[:6]:
        session.admit([3], greedy())
    with pytest.raises(BusyError):
        sessions[6].admit([3], greedy())
    sessions[0].leave()
    sessions[0].leave()
    sessions[6].admit([3], greedy())
    with pytest.raises(BusyError):
        sessions[0].admit([3], greedy())
    for deltas in await asyncio.gather(*(collect(session.generate([3], greedy())) for session in sessions[1:])):
        assert deltas[-1].finish is FinishReason.LENGTH
    sessions[0].admit([3], greedy())


async def test_a_place_is_given_back_when_the_engine_ended_meanwhile(batcher: Batcher) -> None:
    ready, session = batcher.ready(), batcher.session(b"a")
    for _ in range(6):
        session.admit([3], greedy())
        batcher.state = Failed("gone")
        with pytest.raises(NotReadyError):
            session.generate([3], greedy())
        batcher.state = ready
    taken = [batcher.session(b"a").generate([3], greedy()) for _ in range(6)]
    await asyncio.gather(*map(collect, taken))


async def test_background_work_is_marked_as_such(batcher: Batcher) -> None:
    session = batcher.session(b"a")
    plain, background = session.generate([3], greedy()), session.generate([3], greedy(), background=True)
    assert (plain.sequence.priority, background.sequence.priority) == (0, 1)
    await asyncio.gather(collect(plain), collect(background))


async def test_what_the_pool_could_never_hold_is_refused_at_once(tiny_folder: Path) -> None:
    batcher = Batcher(options(tiny_folder, max_total_tokens=64))
    batcher.start()
    assert (await batcher.settled()).context_length == 64
    session = batcher.session(b"a")
    with pytest.raises(RequestError, match=r"fewer than 64 tokens \(all that the KV pool holds\), got 64") as refused:
        session.generate([3] * 64, greedy())
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"1 to 64 tokens to generate \(all that the KV pool holds\), got 65") as refused:
        session.generate([3], greedy(65))
    assert refused.value.param == "max_output_tokens"
    last = (await collect(session.generate([3] * 63, greedy(64))))[-1]
    assert (last.finish, len(last.reply)) == (FinishReason.LENGTH, 1)
    await batcher.close()


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
