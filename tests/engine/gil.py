"""How long a piece of work keeps other threads from running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Ticker:
    """A thread that wakes every half millisecond, and how long it ever had to wait."""

    def __init__(self) -> None:
        self.longest = 0.0  # seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._done.wait(0.0005):
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def longest_wait(work: Callable[[], object], attempts: int = 5) -> tuple[float, float]:
    """(longest wait of another thread, duration) in seconds, of the attempt that other processes disturbed least."""
    results = []
    for _ in range(attempts):
        with Ticker() as ticker:
            begin = time.perf_counter()
            work()
            results.append((ticker.longest, time.perf_counter() - begin))
    return min(results)
