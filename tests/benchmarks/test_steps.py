"""What a step costs inside, on a tiny model: what is measured and how it is told, not how fast."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numba
import pytest

from benchmarks import machine, steps
from benchmarks.machine import Machine
from benchmarks.steps import Told
from engine.core import EngineError, EngineOptions
from engine.engine import Engine
from engine.kernels.cpu import build
from engine.weights.cache import Progress

COMPILED: Any = numba.config


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEPS", 3)
    monkeypatch.setattr(steps, "ROUNDS", 2)


def test_each_number_is_told_with_its_limit() -> None:
    assert str(Told("lag p99 9.00 ms", 0.009, 0.010, "limit 10 ms")) == "lag p99 9.00 ms (limit 10 ms)"
    assert str(Told("lag p99 11.00 ms", 0.011, 0.010, "limit 10 ms")) == "lag p99 11.00 ms (limit 10 ms: over the limit)"


@pytest.mark.parametrize(("bandwidth", "over"), [(1.0, False), (1e15, True)])
def test_a_lone_row_is_held_against_the_machine_s_memory(cpu_engine: Engine, bandwidth: float, over: bool) -> None:
    told = steps._alone(cpu_engine, Machine("a processor", 1, bandwidth))
    assert str(told).endswith("(limit 1.6x: over the limit)" if over else "(limit 1.6x)")
    assert f"{told.value:.2f}x (" in told.line, "the number judged is the one that is printed"


def test_python_s_share_is_what_the_compiled_part_leaves(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told = steps._together(cpu_engine, 16)
    assert 0 < told.value < 1
    assert f"share of a 16-row step: {told.value:.1%} (" in told.line
    monkeypatch.setattr(steps, "_timed", lambda engine, rows, seed: (1.0, 0.85))
    assert str(steps._together(cpu_engine, 16)).endswith("(limit 10%: over the limit)")


def test_rows_of_a_timed_step_decode_together(cpu_engine: Engine) -> None:
    steps._timed(cpu_engine, 5, 7)
    assert cpu_engine.idle
    timed = [record for record in cpu_engine.steps if len(record.decodes) == 5 and not record.prefills]
    assert len(timed) >= steps.STEPS


@pytest.mark.parametrize("fault", [None, EngineError("no room")])
def test_all_kernels_are_compiled_into_an_empty_folder_and_this_process_keeps_its_own(
    cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    kept, asked = COMPILED.CACHE_DIR, []

    def prepare(cache_dir: Path, names: Iterable[str], progress: Progress) -> None:
        asked.append((sorted(names), list(cache_dir.iterdir())))
        build.use(cache_dir / "kernels")
        if fault:
            raise fault

    monkeypatch.setattr(build, "prepare", prepare)
    monkeypatch.setattr(steps, "COMPILE_LIMIT", 0.0)
    if fault:
        with pytest.raises(EngineError):
            steps._compile()
    else:
        assert str(steps._compile()).endswith(" kernels compiled in 0 s (limit 0 s: over the limit)")
    ((names, files),) = asked
    assert files == []
    assert {"embed", "rms_norm", "linear_q4_0_coarse", "linear_bfloat16_plain", "attend_int8", "choose"} <= set(names)
    assert kept == COMPILED.CACHE_DIR != ""


@pytest.mark.parametrize("quick", [False, True])
def test_compiling_comes_last_and_not_when_in_a_hurry(
    cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: bool
) -> None:
    def told(line: str) -> Told:
        return Told(line, 1, 2, "limit 2")

    async def lag(options: EngineOptions) -> Told:
        return told("lag")

    monkeypatch.setattr(machine, "measure", lambda: None)
    monkeypatch.setattr(Engine, "load", lambda options, progress: cpu_engine)
    monkeypatch.setattr(steps, "_alone", lambda *_: told("alone"))
    monkeypatch.setattr(steps, "_together", lambda *_: told("together"))
    monkeypatch.setattr(steps, "_lag", lag)
    monkeypatch.setattr(steps, "_start", lambda flags: told(f"start {flags}"))
    monkeypatch.setattr(steps, "_compile", lambda: told("compiled"))
    steps.main([*["--quick"] * quick, "--threads", "1"])
    lines = [line.removesuffix(" (limit 2)") for line in capsys.readouterr().out.splitlines()]
    assert lines == ["alone", "together", "lag", "start ['--threads', '1']", *["compiled"] * (not quick)]
