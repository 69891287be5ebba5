"""Programs run by a team of threads: every item once, stages in order, the GIL free, and one thread of the process only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import types

from engine.core import EngineError
from engine.kernels.cpu import build
from engine.kernels.cpu.simd import get, ld_i64, st_i64
from engine.kernels.cpu.stage import Team, thread_count
from engine.kernels.cpu.sync import fetch_add
from engine.weights.cache import default_cache_dir, quiet
from tests.engine.gil import longest_wait
from tests.engine.kernels.cpu.workbench import FEW, Input, Linear, Memory, activations, program, team_run, weights

FIELDS = [types.int64] * 5


def machine_code(function: Callable[..., None]) -> Any:
    return numba.cfunc(types.void(*FIELDS), nogil=True, error_model="numpy")(function)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """The loop over stages from the user's cache; afterwards other tests' threads are let in."""
    build.prepare(default_cache_dir(), [], quiet)
    yield
    Team._owner = None


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def count_items() -> Any:
    """A stage: counts how often each item is done in its table, and all of them where the step says."""

    @machine_code
    def count(table, step, first, last, thread):
        fetch_add(get(step, 0), last - first)
        for item in range(first, last):
            fetch_add(table + 8 * item, 1)

    return count


@pytest.fixture(scope="module")
def see_all_before() -> Any:
    """A stage: each item notes how many items of counting stages were done before it."""

    @machine_code
    def see(table, step, first, last, thread):
        for item in range(first, last):
            st_i64(table + 8 * item, ld_i64(get(step, 0)))

    return see


@pytest.mark.parametrize("threads", [1, 2])
@FEW
@given(sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), min_size=1, max_size=12))
def test_every_item_is_done_once_and_stages_wait_for_each_other(
    kernels: None, count_items: Any, see_all_before: Any, threads: int, sizes: list[tuple[int, int]]
) -> None:
    """More items than chunks, fewer items than threads, none at all; stages of (items, chunk), each followed by one that looks back."""
    team, memory = Team(threads), Memory()
    done = memory.place([0], np.int64)
    step = np.array([done.ctypes.data], np.int64)
    counts = [memory.place(np.zeros(items), np.int64) for items, _ in sizes]
    seen = [memory.place(np.full(5, -1), np.int64) for _ in sizes]
    rows = []
    for (items, chunk), count, sight in zip(sizes, counts, seen, strict=True):
        rows += [(count_items.address, count.ctypes.data, items, chunk), (see_all_before.address, sight.ctypes.data, 5, 1)]
    for times in (1, 2):
        done[0] = 0
        team.run(program(*rows), step)
        for count in counts:
            assert (count == times).all()
        np.testing.assert_array_equal(np.array(seen), np.cumsum([items for items, _ in sizes])[:, None].repeat(5, 1))
    memory.check()
    team.close()


@pytest.mark.parametrize("slow", [0, 1])
def test_a_stage_waits_for_a_slow_item(team: Team, see_all_before: Any, slow: int) -> None:
    """The thread that has nothing left to do does not go ahead, whichever item it is."""

    @machine_code
    def dawdle(table, step, first, last, thread):
        for item in range(first, last):
            if item == slow:
                for _ in range(5_000_000):
                    fetch_add(table, 1)
            fetch_add(get(step, 0), 1)

    done, scratch, seen = (np.zeros(4, np.int64) for _ in range(3))
    rows = (dawdle.address, scratch.ctypes.data, 2, 1), (see_all_before.address, seen.ctypes.data, 4, 1)
    team.run(program(*rows), np.array([done.ctypes.data], np.int64))
    assert seen.tolist() == [2, 2, 2, 2]


def test_an_empty_program_ends(team: Team) -> None:
    team.run(program(), np.zeros(1, np.int64))


def test_threads_share_the_items(team: Team) -> None:
    """Both threads come, each under its own number: no item waits for a thread that has another."""

    @machine_code
    def meet(table, step, first, last, thread):
        fetch_add(table + 8 * thread, 1)
        while ld_i64(table) + ld_i64(table + 8) < 2 and fetch_add(table + 16, 1) < 1 << 29:
            pass

    if thread_count(2) < 2:
        pytest.skip("needs two cores")
    counts = np.zeros(3, np.int64)
    team.run(program((meet.address, counts.ctypes.data, 2, 1)), np.zeros(1, np.int64))
    assert counts[:2].tolist() == [1, 1]


@pytest.mark.parametrize(("kind", "form"), [("q4_1", 2), ("q8_0", 1), ("float32", 0)])
def test_one_thread_and_two_give_the_same_bits(kind: str, form: int) -> None:
    random = np.random.default_rng(0)
    layer, x = weights(kind, 500, 160, random), activations(random, 37, 160, "normal")
    outs = []
    for threads, chunk in ((1, 100), (2, 1), (2, 3), (2, 100)):
        memory, team = Memory(), Team(threads)
        linear = Linear(memory, layer, Input(memory, form, 37, 160, kind).fill(memory, x), threads=2)
        team_run(team, linear.stage, linear.table, linear.step, linear.items, chunk)
        memory.check()
        team.close()
        outs.append(linear.out)
    assert len({out.tobytes() for out in outs}) == 1
    assert np.isfinite(outs[0]).all()


def test_the_gil_is_free_while_a_program_runs() -> None:
    @machine_code
    def spin(table, step, first, last, thread):
        for _ in range(30_000_000):
            fetch_add(table, 1)

    team, word = Team(1), np.zeros(1, np.int64)
    waited, took = longest_wait(lambda: team.run(program((spin.address, word.ctypes.data, 1, 1)), np.zeros(1, np.int64)))
    team.close()
    assert took > 0.05
    assert waited < took / 2


def fault_in_a_thread(work: Callable[[], object]) -> BaseException | None:
    faults: list[BaseException] = []

    def main() -> None:
        try:
            work()
        except EngineError as fault:
            faults.append(fault)

    thread = threading.Thread(target=main, name="the other")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return faults[0] if faults else None


def test_a_second_live_thread_is_refused(team: Team) -> None:
    """To make a team as to run one; when the first has ended or closed, the second is let in, and the first is refused while it lives."""
    nothing = np.zeros(1, np.int64)
    fault = fault_in_a_thread(lambda: Team(1))
    assert str(fault) == "expected one thread of the process to compute, 'MainThread'; 'the other' came too"
    assert "'the other' came too" in str(fault_in_a_thread(lambda: team.run(program(), nothing)))
    team.run(program(), nothing)
    team.close()

    second, end = threading.Event(), threading.Event()

    def compute() -> None:
        Team(1)
        second.set()
        end.wait(60)

    thread = threading.Thread(target=compute, name="the second")
    thread.start()
    assert second.wait(60)
    with pytest.raises(EngineError, match=r"one thread of the process to compute, 'the second'; 'MainThread' came too"):
        team.run(program(), nothing)
    with pytest.raises(EngineError, match="'MainThread' came too"):
        Team(1)
    end.set()
    thread.join(60)
    team.run(program(), nothing)


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (0, None), (10_000, None)])
def test_threads_are_as_many_as_asked_for_but_no_more_than_cores(asked: int, given: int | None) -> None:
    assert thread_count(asked) == (given or min(numba.config.NUMBA_NUM_THREADS, len(os.sched_getaffinity(0))))
    team = Team(asked)
    assert team.threads == thread_count(asked)
    team.close()


def in_a_process(code: str, **environment: str) -> str:
    """What a fresh Python prints; it has the same kernels."""
    prefix = f"from engine.kernels.cpu import build; build.use(build.folder(build.Path({str(default_cache_dir())!r})))\n"
    done = subprocess.run(
        [sys.executable, "-c", prefix + code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
from engine.core import EngineError
from engine.kernels.cpu.stage import Team
try:
    Team()
except EngineError as fault:
    print(fault)
"""


@pytest.mark.parametrize("layer", ["workqueue", "tbb", "threadsafe"])
def test_other_threading_layers_are_refused(layer: str) -> None:
    said = in_a_process(REFUSED, NUMBA_THREADING_LAYER=layer)
    assert said == f"expected Numba's threading layer omp, got NUMBA_THREADING_LAYER={layer}"


def test_a_threading_layer_that_another_part_chose_is_refused() -> None:
    code = """
import numba
numba.config.THREADING_LAYER = "workqueue"
numba.set_num_threads(1)
numba.config.THREADING_LAYER = "omp"
"""
    assert in_a_process(code + REFUSED).startswith("expected Numba's threading layer omp, got workqueue")


def test_a_missing_openmp_is_named() -> None:
    """Numba's own error says what a developer should rebuild, not what a user should install."""
    code = "import sys\nsys.modules['numba.np.ufunc.omppool'] = None\n"
    assert in_a_process(code + REFUSED).startswith("OpenMP's library is missing: install libgomp1")
