"""Decode steps at several lengths of context, on a tiny model: what is measured and how it is told, not how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_context, machine
from benchmarks.long_context import Spent
from engine.engine import Engine
from tests.engine import tiny

CONTEXTS = (50, 100, 200, 400)
A_TOKEN = 2 * 2 * 2 * 32 * 2  # bytes of KV: layers, keys and values, heads, numbers of a head, bytes


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "CONTEXTS", CONTEXTS)


def test_decodes_alone_are_timed_at_the_context_they_are_told_for(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Any = cpu_engine.runner.decoder
    choose, run = decoder.choose, []

    def seen(batch: Any, sequences: Any) -> Any:
        run.append((len(batch.tokens), batch.spans[0].context))
        return choose(batch, sequences)

    monkeypatch.setattr(decoder, "choose", seen)
    spent = long_context.median_step(cpu_engine, 200, 3)
    assert run == [(1, context) for context in range(201, 205)], "one to warm up, then three; none of the prompt"
    assert 0 < spent.compiled < spent.step
    assert 0 < spent.batch + spent.blocks < spent.python


def test_times_are_told_for_each_byte_of_kv_and_against_the_second_context(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every byte takes a nanosecond, and those beyond 200 tokens two."""

    def step(engine: Engine, context: int, steps: int) -> Spent:
        return Spent(1e-3 + 1e-9 * A_TOKEN * (context + max(0, context - 200)), 0.5e-3, 2e-5, 1e-5)

    monkeypatch.setattr(long_context, "median_step", step)
    rows = [line.split(" | ") for line in long_context.report(cpu_engine, 2e9, 3, 2).splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| 50", "| 100", "| 200", "| 400"]
    assert [row[2] for row in rows] == [f"{context * A_TOKEN / 1e6:,.1f}" for context in CONTEXTS]
    assert rows[1][3] == "0.50 (0.50 to 0.50)", "of the memory's bandwidth"
    assert [row[4] for row in rows] == ["", "", "1.00 (1.00 to 1.00)", f"{550 / 350:.2f} (1.57 to 1.57)"]


def test_contexts_that_the_model_does_not_take_are_left_out(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "CONTEXTS", (50, 100, 1_000))
    assert long_context.report(cpu_engine, 1e9, 3, 1).splitlines()[-1].startswith("| 100 |")


def test_the_default_is_stood_in_for(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Engine] = []
    new_engine = long_context.new_engine

    def make(*arguments: Any) -> Engine:
        made.append(new_engine(*arguments))
        return made[-1]

    monkeypatch.setattr(machine, "measure", lambda: machine.Machine("a processor", 1, 1e9))
    monkeypatch.setattr(long_context, "new_engine", make)
    long_context.main(["--quick", "--cache-dir", str(tiny_folder.parent / "cache")], config=tiny.config(layers=4, context_length=65_536))
    decoder: Any = made[0].runner.decoder
    decoder.close()
    assert decoder.config.layers == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 400 |")
