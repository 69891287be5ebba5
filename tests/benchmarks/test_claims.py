"""The claims, on a tiny model: what they run, not how fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import claims
from benchmarks.claims import Bench, Timing
from engine.core import EngineOptions


@pytest.fixture(scope="module")
def bench(tiny_folder: Path) -> Bench:
    cache = tiny_folder.parent / "cache"
    return Bench(EngineOptions(model=str(tiny_folder), cache_dir=cache, kernels="reference", block_size=4, max_total_tokens=2048))


def test_requests_get_all_their_tokens_together_and_one_by_one(bench: Bench) -> None:
    prompts = [bench.prompt(9) for _ in range(3)]
    for run in (bench.together, bench.one_by_one):
        timings = run([bench.request(prompt, 5) for prompt in prompts])
        assert [len(timing.tokens) for timing in timings] == [5] * 3
        assert all(timing.tokens == sorted(timing.tokens) for timing in timings)
    assert timings[0].last <= timings[1].first
    assert timings[1].last <= timings[2].first, "one by one, the next begins when the last has ended"


def test_a_request_is_its_own_stranger_unless_told_otherwise(bench: Bench) -> None:
    prompt = bench.prompt(40)
    bench.together([bench.request(prompt, 1)])
    again, shared, known = bench.request(prompt, 1), bench.request(prompt, 1, b"s"), bench.request([*prompt, 5], 1, b"s")
    for request in (again, shared, known):
        bench.together([request])
    assert (again.cached, shared.cached, known.cached) == (0, 0, 40)


def test_a_failing_engine_is_no_result(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(bench.engine.runner, "run", fails)
    with pytest.raises(RuntimeError, match="OSError"):
        bench.together([bench.request([5, 6, 7], 2)])


def test_every_claim_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "STEPS", 4)
    assert "as fast as running all again" in claims.kv_cache(bench, 8, 3)
    assert "64 tokens" in claims.step_time(bench)
    assert "rows 16: " in claims.batch_sizes(bench, 8)
    assert "throughput: " in claims.batching(bench, 4, 8, 6)
    assert "100 tokens seen before" in claims.prefix_cache(bench, 100)


def test_ratios_are_of_pairs_in_turn() -> None:
    slow, fast = iter([6.0, 8.0, 3.0]), iter([2.0, 2.0, 3.0])
    ratios = claims.in_turn(lambda: next(slow), lambda: next(fast))
    assert claims.spread(ratios) == "3.00x (1.00 to 4.00 over 3 pairs)"
    assert Timing([1.0, 2.0, 5.0]).last == 5.0
