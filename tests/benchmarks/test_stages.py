"""The profile of a step: its names are those of the stages that a decoder's program has."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from benchmarks import stages
from engine.engine import Engine

KERNELS = {  # what each name's function is called, or begins with
    "embedding": "embed",
    "norm": "rms_norm",
    "q, k, v": "linear_",
    "rope and store": "store_",
    "attention": "attend_",
    "merge": "merge",
    "out": "linear_",
    "gate, up, silu": "linear_",
    "down": "linear_",
    "head": "linear_",
    "choice": "choose",
}


@pytest.fixture
def decoder(cpu_engine: Engine) -> Any:
    return cpu_engine.runner.decoder


def test_each_stage_of_the_program_has_its_name(decoder: Any) -> None:
    for at, (name, (kernel, *_)) in enumerate(zip(stages.names(decoder), decoder._made.rows, strict=True)):
        assert kernel.name.startswith(KERNELS[name]), f"stage {at}, called {name!r}"


def test_each_linear_stage_is_the_one_it_is_called(decoder: Any) -> None:
    """All are one function: their first field says which weights they read."""
    weights: dict[str, list[int]] = {name: [] for name in ("q, k, v", "out", "gate, up, silu", "down", "head")}
    for layer in decoder.packed.layers:
        for name, linear in (("q, k, v", layer.qkv), ("out", layer.out), ("gate, up, silu", layer.gate_up), ("down", layer.down)):
            weights[name].append(linear.data.ctypes.data)
    weights["head"].append(decoder.packed.head.data.ctypes.data)
    found: dict[str, list[int]] = {name: [] for name in weights}
    for name, (_, table, *_) in zip(stages.names(decoder), decoder._made.rows, strict=True):
        if name in found:
            found[name].append(ctypes.c_int64.from_address(table).value)
    assert found == weights


def test_a_program_of_other_stages_is_refused(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LAYER", stages.LAYER[:-1])
    with pytest.raises(ValueError, match=r"expected a program of 20 stages, 8 of them in each of 2 layers, got 22: the names"):
        stages.names(decoder)


def test_the_table_has_every_kind_of_stage_and_every_work_that_fits(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ROUNDS", 2)
    lines = [line.strip("| ").split(" | ") for line in stages.table(cpu_engine).splitlines()]
    assert lines[0] == ["milliseconds in", "64 rows of a prompt, at 64", "16 decodes at 300", "1 decode at 300"], "the context ends at 512"
    assert {len(line) for line in lines} == {4}
    assert [line[0] for line in lines[2:-2]] == list(KERNELS)
    together, whole = ([float(cell) for cell in line[1:]] for line in lines[-2:])
    assert all(number > 0 for number in together + whole)
    assert not cpu_engine.runner.decoder._team.__dict__.get("run"), "the decoder runs as before"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spans", "fits"),
    [
        ([(1, 512)], True),
        ([(1, 513)], False),  # the context
        ([(64, 63)], False),
        ([(1, 160)] * 32, True),
        ([(1, 161)] * 32, False),  # the pool
        ([(1, 16)] * 33, False),  # the batch
    ],
)
def test_a_work_must_fit(cpu_engine: Engine, spans: list[tuple[int, int]], fits: bool) -> None:
    assert stages._fits(stages.Work("a work", spans), cpu_engine) is fits
