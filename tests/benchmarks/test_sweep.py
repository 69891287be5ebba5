"""Sweeps, gaps and histories: what is measured and how it is told, not how fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gaps, history, plots, sweep
from benchmarks.history import Conversation, Told
from benchmarks.sweep import KNOBS, Figures
from engine.engine import Engine
from tests.serving import Server


def test_the_table_has_medians_ranges_and_the_defaults() -> None:
    knob = next(knob for knob in KNOBS if knob.flag == "schedule-policy")
    samples = {
        (knob, "fcfs"): [Figures(100, 0.1, 0.5, 0.010), Figures(300, 0.3, 0.7, 0.030), Figures(200, 0.2, 0.6, 0.020)],
        (knob, "lpm"): [Figures(50, 1, 2, 0.5)],
    }
    flag = "| `--schedule-policy` (--max-batch-size 4) |"
    assert sweep.table(samples).splitlines()[2:] == [
        f"{flag} **fcfs** | 200 (100 to 300) | 0.20 s (0.10 to 0.30) | 0.60 s (0.50 to 0.70) | 20 ms (10 to 30) |",
        f"{flag} lpm | 50 (50 to 50) | 1.00 s (1.00 to 1.00) | 2.00 s (2.00 to 2.00) | 500 ms (500 to 500) |",
    ]


def test_every_parameter_is_swept_around_its_default() -> None:
    from app.settings import load

    settings = load([], "hocket serve")
    for knob in KNOBS:
        assert knob.default in knob.values
        assert type(getattr(settings, knob.flag.replace("-", "_")))(knob.default) == getattr(settings, knob.flag.replace("-", "_"))
        for value in knob.values:
            load([f"--{knob.flag}", value, *knob.beside], "hocket serve")


def test_the_same_figures_draw_the_same_file(tmp_path: Path) -> None:
    samples = {(knob, value): [Figures(100, 0.1, 0.5, 0.01)] * 2 for knob in KNOBS[:2] for value in knob.values}
    one, two = tmp_path / "new" / "one.svg", tmp_path / "two.svg"
    plots.sweep(samples, one)
    plots.sweep(samples, two)
    assert one.read_bytes() == two.read_bytes()
    for knob in KNOBS[:2]:
        assert f"--{knob.flag}" in one.read_text()


def test_a_ratio_is_told_with_its_limit() -> None:
    assert str(Told("turn 15", [1.0, 1.2, 1.1], 1.15)) == "turn 15: 1.10x (1.00 to 1.20 over 3; limit 1.15x)"
    assert str(Told("turn 15", [1.2], 1.15)).endswith("limit 1.15x: over the limit)")


def test_a_turn_in_the_engine_is_held_against_its_new_tokens_alone(cpu_engine: Engine) -> None:
    chunk, whole = history._chunk(cpu_engine, 7, 100, 20)
    assert 0 < chunk < whole
    assert cpu_engine.idle
    assert cpu_engine.steps[-1].prefills[0][1] == 20, "nothing of the history was run again"


@pytest.mark.slow
async def test_a_conversation_goes_on_where_its_client_left_it(server: Server) -> None:
    conversation = Conversation(server, "here")
    first = await conversation.ask(30, 5)
    second = await conversation.ask(10, 5)
    assert second.prompt_tokens > first.prompt_tokens + 4
    assert second.cached_tokens == first.prompt_tokens + 4


@pytest.mark.slow
async def test_gaps_are_taken_before_the_long_prompt_beside_it_and_after_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STREAMS", 2), ("PROMPT", 300), ("REPLY", 400), ("QUIET", 30)):
        monkeypatch.setattr(gaps, name, value)
    taken, long = await gaps.measure(server, 0)
    assert len(taken.before) > 10
    assert len(taken.after) > 10
    assert taken.beside
    assert long.prompt_tokens > 300
    assert max(taken.beside) >= min(taken.before)
    assert min(taken.before + taken.after) < taken.quiet < max(taken.before + taken.after)


@pytest.mark.slow
async def test_gaps_may_be_taken_once_others_have_filled_the_pool(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STREAMS", 2), ("PROMPT", 300), ("REPLY", 600), ("QUIET", 30)):
        monkeypatch.setattr(gaps, name, value)
    taken, long = await gaps.measure(server, 7, fills=2)
    assert taken.beside
    assert len(taken.before) > 10
    assert long.prompt_tokens > 300
    assert not long.cached_tokens or long.cached_tokens < 100, "each prompt is another"


@pytest.mark.slow
async def test_a_sweep_s_load_is_played_to_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPLY", 5), ("QUESTIONS", (20, 40))):
        monkeypatch.setattr(sweep, name, value)
    figures = await sweep.play(server, "small", 3)
    assert figures.throughput > 0
    assert 0 < figures.first <= figures.late
