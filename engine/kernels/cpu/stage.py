"""Stages: the compiled functions a step is made of, and the loop that runs them on several threads without the GIL.

Owns how work is shared. A program is a list of stages, each with a table of parameters and a number of items; `run` takes every
thread through it. In a stage, each thread has a lane of items of its own, so that it mostly reads what it wrote itself; when these are
taken it helps in the others' lanes, so a thread that the system held up delays nobody; all go on when all items are done. Which thread does
an item changes nothing in its result. Knows nothing of what stages compute.

A stage is a C function of its own, compiled and cached by itself (`build.py` says where), so that a model brings in only what it needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numba
import numpy as np
from numba import njit, prange, types
from numba.np.ufunc import threading_layer

from engine.core import EngineError
from engine.kernels.cpu.simd import ld_i64
from engine.kernels.cpu.sync import call_stage, fetch_add, load_acquire, relax, yield_core

FUNCTION, TABLE, ITEMS, CHUNK, COLUMNS = range(5)  # a program's columns: int64 [stages, COLUMNS]
LINE = 64  # bytes of a cache line. A stage has one counter on each of 1 + threads: items done, and items taken of each lane

_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)
_RUN_SIGNATURE = types.void(*[types.int64] * 5)
_SPINS = 100  # looks at the counter before the core is offered to others

_config: Any = numba.config  # its names are set as it is read

STAGES: dict[str, Stage] = {}


class Stage:
    """A function (table, step, first, last, thread) -> None over items first .. last - 1; both tables are addresses of int64."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.name = function.__name__
        STAGES[self.name] = self

    @cached_property
    def _compiled(self) -> Any:
        return numba.cfunc(_SIGNATURE, cache=True, nogil=True, error_model="numpy")(self.function)

    @property
    def address(self) -> int:
        """Where its machine code is: compiled, or loaded from the cache, when first asked for."""
        return int(self._compiled.address)

    @property
    def from_cache(self) -> bool:
        return bool(self._compiled.cache_hits)


def stage(function: Callable[..., None]) -> Stage:
    """Declare a stage. It must live in a file and refer to other compiled functions as globals, or it could not be cached."""
    return Stage(function)


@njit(nogil=True, error_model="numpy")
def _lane(items, chunk, lane, threads):
    """Where a lane begins: after whole chunks."""
    return min(items, (items + chunk - 1) // chunk * lane // threads * chunk)


@njit(nogil=True, error_model="numpy")
def _work(program, stages, step, counters, thread, threads):
    for index in range(stages):
        row = program + index * 8 * COLUMNS
        function, table, items, chunk = ld_i64(row), ld_i64(row + 8), ld_i64(row + 16), ld_i64(row + 24)
        done = counters + index * LINE * (1 + threads)
        for turn in range(threads):
            lane = (thread + turn) % threads
            start, end = _lane(items, chunk, lane, threads), _lane(items, chunk, lane + 1, threads)
            taken = done + LINE * (1 + lane)
            while start + load_acquire(taken) < end:
                first = start + fetch_add(taken, chunk)
                if first < end:
                    last = min(end, first + chunk)
                    call_stage(function, table, step, first, last, thread)
                    fetch_add(done, last - first)
        spins = 0
        while load_acquire(done) < items:
            spins += 1
            if spins < _SPINS:
                relax()
            else:
                yield_core()


def _run(program, stages, step, counters, threads):
    for thread in prange(threads):
        _work(program, stages, step, counters, thread, threads)


@cache
def _compiled_run() -> Any:
    # Not `fusion`: Numba cannot see dependencies through addresses.
    options: dict[str, Any] = {"parallel": {"fusion": False}, "nogil": True, "cache": True, "error_model": "numpy"}
    return njit(_RUN_SIGNATURE, **options)(_run)


def thread_count(threads: int) -> int:
    """`threads`, or one for each core if 0; never more than this process has cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(int(_config.NUMBA_NUM_THREADS), cores)
    return min(threads or most, most)


class Team:
    """The threads that run programs, started from one thread of the process only.

    Every thread that enters OpenMP gets a team of its own, and with more members than cores they stop waiting for each other actively: a
    step then takes four times as long. So a second live thread is refused, and so are Numba's other ways to have threads, which are
    slower still.
    """

    def __init__(self, threads: int = 0) -> None:
        """`threads`: 0 for one per core. Raises: EngineError"""
        if _config.THREADING_LAYER not in ("default", "omp"):
            raise EngineError(f"expected Numba's threading layer omp, got NUMBA_THREADING_LAYER={_config.THREADING_LAYER}")
        _config.THREADING_LAYER = "omp"
        self.threads = thread_count(threads)
        self._claim()
        self._counters = np.zeros(0, np.int64)
        try:
            numba.set_num_threads(self.threads)  # which starts them
            self.run(np.zeros((0, COLUMNS), np.int64), np.zeros(1, np.int64))
        except ValueError as fault:
            raise EngineError(f"OpenMP's library is missing: install libgomp1 (Debian's name) and start again ({fault})") from fault
        if (layer := threading_layer()) != "omp":
            raise EngineError(f"expected Numba's threading layer omp, got {layer}: is another part of this process using Numba?")

    def run(self, program: np.ndarray, step: np.ndarray) -> None:
        """Run `program` int64 [stages, COLUMNS] with the step's table; the GIL is free meanwhile."""
        self._claim()
        counters = program.shape[0] * (1 + self.threads) * LINE // 8
        if self._counters.size < counters:
            self._counters = np.zeros(counters, np.int64)
        self._counters.fill(0)
        _compiled_run()(program.ctypes.data, program.shape[0], step.ctypes.data, self._counters.ctypes.data, self.threads)

    def close(self) -> None:
        """Let another thread compute."""
        Team._owner = None

    _owner: threading.Thread | None = None  # of every team in the process

    @classmethod
    def _claim(cls) -> None:
        here, owner = threading.current_thread(), Team._owner
        if owner is not None and owner is not here and owner.is_alive():
            raise EngineError(f"expected one thread of the process to compute, {owner.name!r}; {here.name!r} came too")
        Team._owner = here
