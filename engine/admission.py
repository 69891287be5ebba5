"""Who may come in, and when it is worth trying again.

Owns the count of live requests, in all and by owner, and how quickly they ended lately. Pure: whoever calls says what time it is, in
seconds of any clock that never goes back; no sequences, no threads, no I/O.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from engine.core import BusyError

LEAST_SECONDS, MOST_SECONDS = 1.0, 60.0  # of a retry hint
DEFAULT_SECONDS = 2.0  # while nothing has ended yet
KEPT_ENDS = 64


class Pace:
    """How quickly requests end, judged by the last ones. Times when there was none count for nothing."""

    def __init__(self) -> None:
        # In seconds during which there were requests: from when it is counted, then each end.
        self._marks: deque[float] = deque([0.0], KEPT_ENDS + 1)
        self._idle = 0.0  # seconds during which there was none
        self._idle_since = 0.0

    def resume(self, now: float) -> None:
        """The first request has come."""
        self._idle += now - self._idle_since

    def pause(self, now: float) -> None:
        """The last request has gone."""
        self._idle_since = now

    def ended(self, now: float) -> None:
        self._marks.append(now - self._idle)

    def seconds(self, count: int, now: float) -> float:
        """How long `count` more ends are going to take, at the pace of the last ones, the time since then included."""
        ends = len(self._marks) - 1
        if not ends:
            return DEFAULT_SECONDS
        return count * (now - self._idle - self._marks[0]) / ends


class Room:
    """Places for live requests, shared fairly among owners.

    Whoever comes is let in while there are places. When the room is full, an owner is still let in whose live requests are fewer than the
    room divided by the owners (those with live requests, this one counted): a flood of one shuts nobody else out. The total is at most
    twice the room, because beyond that nobody is let in. Shares alone would not see to it: they shrink as owners come, so that owners who
    fill theirs one after the other have a room, half of one, a third of one and so on. Between the room and twice the room only those under
    their share come in, so the next place that is left there goes to one of them, never back to the flood.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._live: Counter[bytes] = Counter()  # by owner; only those with live requests
        self._pace = Pace()

    def enter(self, owner: bytes, now: float) -> None:
        """Take a place. Raises: BusyError"""
        total, own = self._live.total(), self._live[owner]
        below = own * len(self._live) < self._size  # of its share; whoever has no request is not counted yet, and below any share
        places = 2 * self._size if below else self._size
        if total >= places:
            raise self._full(total - places + 1, now)
        if not total:
            self._pace.resume(now)
        self._live[owner] += 1

    def leave(self, owner: bytes, now: float) -> None:
        """Give a place back."""
        self._live[owner] -= 1
        if not self._live[owner]:
            del self._live[owner]
        self._pace.ended(now)
        if not self._live:
            self._pace.pause(now)

    def _full(self, ahead: int, now: float) -> BusyError:
        """`ahead`: how many requests must end before there is a place."""
        seconds = min(max(LEAST_SECONDS, self._pace.seconds(ahead, now)), MOST_SECONDS)
        live = f"{self._live.total()} requests are running or waiting, for a room of at most {self._size}"
        return BusyError(f"{live}; try again in {math.ceil(seconds)} s", seconds)
