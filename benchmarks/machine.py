"""The machine, and what it allows at most.

Owns the measured memory bandwidth and the floor it puts under a step. Knows no engine: who measures a step gives its time.
"""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BYTES = 1 << 29  # read in each pass by each core; far above any cache's share
PASSES = 5


@dataclass(slots=True, frozen=True)
class Machine:
    processor: str
    cores: int  # that this process may run on
    bandwidth: float  # bytes per second, reading with all cores

    def __str__(self) -> str:
        return f"{self.processor}, {self.cores} cores, memory read at {self.bandwidth / 1e9:.1f} GB/s by all of them"


def measure() -> Machine:
    cores = len(os.sched_getaffinity(0))
    return Machine(_processor(), cores, bandwidth(cores))


def bandwidth(cores: int, size: int = BYTES, passes: int = PASSES) -> float:
    """Bytes per second that `cores` threads read together: the best of several passes over `size` bytes each.

    The largest of 64-bit words is taken, which is one load and one compare for 64 bytes where there is AVX-512, and lets go of the GIL.
    """
    blocks = [np.ones(size // 8, dtype=np.int64) for _ in range(cores)]
    rates = []
    for _ in range(passes):
        threads = [threading.Thread(target=block.max) for block in blocks]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(cores * blocks[0].nbytes / (time.perf_counter() - begin))
    return max(rates)


def floor_line(machine: Machine, step_seconds: list[float], bytes_read: int) -> str:
    """How near a one-row step comes to reading its bytes (the weights; a short context's KV is little beside them) once."""
    floor = bytes_read / machine.bandwidth
    ratios = [seconds / floor for seconds in step_seconds]
    return (
        f"one-row step: {statistics.median(step_seconds) * 1e3:.2f} ms, {statistics.median(ratios):.2f}x "
        f"({min(ratios):.2f} to {max(ratios):.2f}) the {floor * 1e3:.2f} ms that reading its {bytes_read / 1e6:.0f} MB takes"
    )


def python_line(step_seconds: list[float], kernel_seconds: list[float], rows: int = 16) -> str:
    """Which share of whole steps passes outside compiled code. The two lists are of the same steps."""
    shares = [1 - kernel / step for step, kernel in zip(step_seconds, kernel_seconds, strict=True)]
    return (
        f"Python's share of a {rows}-row step: {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%} of "
        f"{statistics.median(step_seconds) * 1e3:.2f} ms)"
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    print(measure())
