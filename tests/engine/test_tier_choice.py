"""What the engine does about its tier: whether it has one, what it tells of it, and how saves go on beside a stream."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine import calibrate, memory
from engine.core import EngineError, Load, Save
from engine.cost import StepCost
from engine.engine import Engine
from engine.offload import FileStore, MemoryStore
from engine.weights.checkpoint import Checkpoint
from tests.engine.test_engine import ask, run
from tests.engine.test_offload_engine import OTHER, PROMPT, RUN, first, gib, hit, kill, second

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["memory", "file"])
def new_tiered(request: pytest.FixtureRequest, quantised: Checkpoint, new_engine: NewEngine, tmp_path: Path) -> NewEngine:
    place = {"offload_dir": tmp_path} if request.param == "file" else {}
    return partial(new_engine, quantised, swap_space=gib(400), max_total_tokens=512, **place)


@pytest.fixture
def new_in_file(quantised: Checkpoint, new_engine: NewEngine, tmp_path: Path) -> NewEngine:
    return partial(new_engine, quantised, swap_space=gib(400), offload_dir=tmp_path)


def takes(monkeypatch: pytest.MonkeyPatch, load: float, save: float = 0.0, row: float = 1.0) -> None:
    """What is measured: milliseconds of a block that comes back, or goes there, and of a row."""
    for store in (MemoryStore, FileStore):
        monkeypatch.setattr(store, "measure", lambda self: (load, save))
    measured: Callable[..., StepCost] = lambda *args: StepCost(((1, row), (2, 2 * row)), 0, 0, *args[5:])  # noqa: E731
    monkeypatch.setattr(calibrate, "measure", measured)


# The choice, at the start


def test_a_tier_that_is_quicker_than_computing_is_used_and_the_log_says_so(
    new_tiered: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    takes(monkeypatch, load=15.0, save=2.5)
    engine = new_tiered()
    where = engine.runner.store.where if engine.runner.store else "nowhere"
    told = f"a block of 16 tokens takes 15.0 ms to come from {where} (2.5 to go there) and 16.0 ms to compute: it is brought back"
    assert told in caplog.messages
    assert engine.scheduler.pool.tier
    assert engine.scheduler.cost
    assert (engine.scheduler.cost.load, engine.scheduler.cost.save) == (15.0, 2.5)
    kill(engine)


@pytest.mark.parametrize("load", [15.01, 16.0, 1e6])
def test_a_tier_that_is_no_quicker_is_left_alone_and_the_log_says_so(
    new_tiered: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, load: float
) -> None:
    """Nothing is kept there, and another server may have its folder. Rows are whole: a block has to save one at least."""
    caplog.set_level(logging.INFO)
    takes(monkeypatch, load)
    engine = new_tiered()
    assert f"a block of 16 tokens takes {load:.1f} ms to come from" in caplog.text
    assert caplog.messages[-1].endswith("16.0 ms to compute: it is computed anew, and nothing is kept there")
    assert engine.runner.store is None
    assert engine.scheduler.pool.tier is None
    run(engine, {0: [first()]})
    for id in range(1, 9):
        run(engine, {0: [ask(id, [id] * 200, 2)]})
    assert not engine.rest()
    assert hit(engine, second(engine)) == 0
    new_tiered()


def test_a_tier_of_no_size_is_not_measured(quantised: Checkpoint, new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert new_engine(quantised, max_step_ms=0).scheduler.cost is None
    assert "to compute" not in caplog.text


# Saves beside a stream


def streaming(engine: Engine) -> Engine:
    engine.step([ask(1000, [7] * 4, 400, b"stream")])
    engine.step()
    return engine


@pytest.mark.parametrize("most", [0, 100])
def test_a_chat_that_ends_beside_a_stream_survives_a_kill(new_in_file: NewEngine, monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    """E12 on a server that is never idle: after as many steps as it has blocks, at most."""
    takes(monkeypatch, load=0.1, save=0.1)
    engine = streaming(new_in_file(max_step_ms=most))
    chat = first()
    engine.step([chat])
    while chat in engine.scheduler.running:
        engine.step()
    for _ in range(-(-RUN // 16)):
        engine.step()
    assert not engine.idle
    kill(engine)
    cold = second(engine := new_in_file(max_step_ms=most))
    assert cold.prompt[:150] == PROMPT
    assert hit(engine, cold) == RUN
    kill(engine)


def test_what_saves_take_is_no_surprise_to_the_prediction(new_tiered: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a machine that saves would be taken for a slow one."""
    takes(monkeypatch, load=3.0, save=7.0)
    engine = new_tiered(max_step_ms=1000)
    predicted: list[float] = []
    monkeypatch.setattr(engine.scheduler.drift, "observe", lambda expected, took: predicted.append(expected))
    wanted: list[float] = []
    planned = engine.scheduler.plan

    def plan(*args: Any) -> Any:
        made = planned(*args)
        if made.tokens > len(made.chunks):
            moved = sum({Load: 3.0, Save: 7.0}.get(type(move), 0.0) for move in made.moves)
            wanted.append(made.tokens + moved)
        return made

    monkeypatch.setattr(engine.scheduler, "plan", plan)
    for prompt in (PROMPT, OTHER, PROMPT[::-1], OTHER[::-1], PROMPT):
        run(engine, {0: [ask(len(wanted), prompt, 4)]})
    assert predicted == wanted
    assert max(wanted) > 160


def test_a_full_disk_damages_nothing_and_the_log_does_not_say_so(
    new_in_file: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was given up for one prompt is what the next one of the same step wants back: it was not kept, so it is computed."""
    takes(monkeypatch, load=0.1, save=0.1)
    engine = new_in_file(max_total_tokens=512)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    asked = first()
    for sequence in (asked, ask(4, OTHER, 40, b"newer")):
        run(engine, {0: [sequence]})
    tried: list[Any] = []
    real = engine.runner.move
    monkeypatch.setattr(engine.runner, "move", lambda moves: (tried.extend(moves), real(moves))[1])
    large, wants = ask(5, OTHER[::-1] + OTHER[:90], 2, b"large"), ask(6, [*PROMPT, *asked.output, 5, 6], 2, b"mine")
    run(engine, {0: [large, wants]})
    saved = {move.node for move in tried if isinstance(move, Save)}
    assert any(move.node in saved for move in tried if isinstance(move, Load)), "they are not planned in one step any more"
    assert "cannot be kept" in caplog.text
    assert "damaged" not in caplog.text
    kill(engine)


# What can never fit


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_pool_that_memory_cannot_hold_is_refused_in_words(
    quantised: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setattr(memory, "total", lambda: 8 << 30)
    options = {} if kernels == "auto" else {"kernels": kernels}
    said = r"expected max_total_tokens that memory can hold, got 1073741824, whose KV takes \d+\.\d GiB of 8\.0 GiB"
    with pytest.raises(EngineError, match=said):
        new_engine(quantised, max_total_tokens=1 << 30, **options)


def test_memory_is_what_the_machine_has_or_a_container_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_LIMIT", limit)
    whole = memory.total()
    assert whole > 1 << 28
    for text, most in (("max\n", whole), (f"{1 << 27}\n", 1 << 27), (f"{1 << 60}\n", whole)):
        limit.write_text(text)
        assert memory.total() == most
