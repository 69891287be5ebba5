"""What the table makes of samples."""

from __future__ import annotations

import pytest

from benchmarks.load import Result, Turn
from benchmarks.table import best, table
from benchmarks.works import Figure, Sample, Work, detail, works

RATE = Figure("rate, tokens/s", lambda sample: sample.results[0].tokens_per_second, "{:.0f}".format)
WAIT = Figure("wait", lambda sample: sample.results[0].seconds, "{:.1f} s".format, more_is_better=False)
MEMORY = Figure("memory", lambda sample: None if sample.memory is None else sample.memory / 1e6, "{:.0f} MB".format, more_is_better=False)
WORK = Work("work", 1, 1, 60, 100, 1, (RATE, WAIT, MEMORY))


def sample(seconds: float, memory: int | None = None) -> Sample:
    """One reply of 100 tokens in that time."""
    return Sample([Result(seconds, 0.05, [Turn(0, 0.0, seconds, [seconds / 2, seconds], ["a", "b"], 100, 60)])], memory)


def test_hocket_is_held_against_the_best_peer_of_each_line_round_by_round() -> None:
    samples = {
        ("work", "Hocket"): [sample(1.0, 300_000_000), sample(2.0, 300_000_000)],
        ("work", "slow"): [sample(8.0), sample(8.0)],
        ("work", "quick"): [sample(3.0, 600_000_000), sample(4.0, 600_000_000)],
    }
    lines = table(samples, [WORK], ["Hocket", "slow", "quick"]).splitlines()
    assert lines[0] == "| work | Hocket | slow | quick | best peer | Hocket against it |"
    assert lines[2] == "| rate, tokens/s | 75 (50 to 100) | 12 | 29 (25 to 33) | quick | 2.50x (2.00 to 3.00) |"
    assert lines[3] == "| wait | 1.5 s (1.0 s to 2.0 s) | 8.0 s | 3.5 s (3.0 s to 4.0 s) | quick | 0.42x (0.33 to 0.50) |"
    assert lines[4] == "| memory | 300 MB |  | 600 MB | quick | 0.50x (0.50 to 0.50) |"


def test_who_took_no_part_has_an_empty_cell_and_is_no_rival() -> None:
    samples = {("work", "Hocket"): [sample(1.0)], ("work", "peer"): [sample(2.0)]}
    assert (
        table(samples, [WORK], ["Hocket", "absent", "peer"]).splitlines()[2]
        == "| rate, tokens/s | 100 |  | 50 | peer | 2.00x (2.00 to 2.00) |"
    )


def test_alone_there_is_no_ratio() -> None:
    assert table({("work", "Hocket"): [sample(1.0)]}, [WORK], ["Hocket"]).splitlines()[2] == "| rate, tokens/s | 100 |"
    assert best(MEMORY, {"Hocket": [], "peer": [1.0]}, ["Hocket", "peer"]) is None
    assert best(MEMORY, {"Hocket": [1.0], "peer": []}, ["Hocket", "peer"]) is None


def test_works_cover_the_rows_of_the_table_with_new_prompts_each_round() -> None:
    titles = [figure.title for work in works() for figure in work.figures]
    assert titles == [
        "16 conversations x 4 turns, tokens/s",
        "turns 2 to 4, TTFT p50, 16 conversations",
        "resident memory, 16 conversations",
        "32 conversations x 4 turns, tokens/s",
        "one stream, short context, tokens/s",
        "one stream, 1500 tokens of context, tokens/s",
        "prefill of 1024 tokens, tokens/s",
    ]
    for work in [*works(), *works(quick=True)]:
        loads = [load for round in range(3) for load in work.loads(round)]
        assert len({load.question(0, 0) for load in loads}) == len(loads)
        assert work.loads(1) == work.loads(1)


def test_figures_are_read_from_what_clients_saw() -> None:
    first = Turn(0, 0.0, 4.0, [1.0, 2.0, 4.0], ["a", "b", "c"], 64, 60)
    later = Turn(1, 4.0, 8.0, [5.5, 6.0, 8.0], ["a", "b", "c"], 64, 200, 150)
    seen = Sample([Result(8.0, 0.03, [first, later])], 440_000_000)
    crowd, *_, single, _, prefill = works()
    throughput, ttft, memory = crowd.figures
    assert throughput.read(seen) == 16.0
    assert ttft.read(seen) == 1.5
    assert memory.of(seen) == "440 MB"
    assert memory.of(Sample(seen.results, None)) == "?"
    assert single.figures[0].read(Sample([Result(4.0, 0.0, [first])], None)) == pytest.approx(63 / 3)
    assert prefill.figures[0].read(Sample([Result(4.0, 0.0, [first])], None)) == 60.0
    assert detail(seen) == (
        "TTFT first turns p50 1000 / p95 1000 ms, later turns p50 1500 / p95 1500 ms, gaps p50 1500 / p99 2000 ms, "
        "75% of later prompts cached, 440 MB resident, client 3% of a core"
    )
