"""Who may come in, and the retry hints, from given times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.admission import DEFAULT_SECONDS, KEPT_ENDS, LEAST_SECONDS, MOST_SECONDS, Room
from engine.core import BusyError

ROOM = 6


def filled(owner: bytes = b"a", now: float = 0.0) -> Room:
    room = Room(ROOM)
    for _ in range(ROOM):
        room.enter(owner, now)
    return room


def turn_over(room: Room, *times: float, owner: bytes = b"a") -> None:
    """At each time one request ends and the next comes in."""
    for now in times:
        room.leave(owner, now)
        room.enter(owner, now)


def hint(room: Room, now: float, owner: bytes = b"a") -> float:
    with pytest.raises(BusyError) as busy:
        room.enter(owner, now)
    return busy.value.retry_after


def entered(room: Room, owner: bytes, now: float = 0.0) -> int:
    """How many more of an owner come in."""
    for count in range(3 * ROOM):
        try:
            room.enter(owner, now)
        except BusyError:
            return count
    raise AssertionError("the room has no end")


def test_a_flood_leaves_the_others_their_share() -> None:
    room = Room(ROOM)
    assert entered(room, b"flood") == ROOM
    assert entered(room, b"b") == ROOM // 2
    assert entered(room, b"flood") == 0
    assert entered(room, b"c") == ROOM // 3
    for _ in range(ROOM - 1):
        room.leave(b"flood", 1.0)
    assert entered(room, b"c") == 0, "full still, and c has its share"
    assert entered(room, b"flood") == 1, "but the flood's owner has less than one now"


def test_a_place_that_is_left_beyond_the_room_goes_to_those_under_their_share() -> None:
    room = Room(ROOM)
    for owner in (b"flood", b"b", b"c", b"d"):
        entered(room, owner)
    assert entered(room, b"late") == 0, "twice the room is all there is"
    room.leave(b"flood", 1.0)
    assert entered(room, b"flood") == entered(room, b"b") == entered(room, b"c") == 0
    assert entered(room, b"late") == 1


@given(size=st.integers(1, 12), moves=st.lists(st.tuples(st.integers(0, 7), st.booleans())))
def test_the_room_is_bounded_and_fair_whatever_comes(size: int, moves: list[tuple[int, bool]]) -> None:
    room, live = Room(size), [0] * 8
    for owner, comes in moves:
        name, total = bytes([owner]), sum(live)
        if not comes:
            if live[owner]:
                room.leave(name, 0.0)
                live[owner] -= 1
            continue
        owners = sum(map(bool, live)) + (not live[owner])
        try:
            room.enter(name, 0.0)
        except BusyError:
            assert total == 2 * size or (total >= size and live[owner] >= size / owners)
        else:
            live[owner] += 1
            assert total < size or (total < 2 * size and live[owner] - 1 < size / owners)


def test_where_nothing_has_ended_the_hint_is_a_default() -> None:
    assert hint(filled(now=50.0), 58.0) == DEFAULT_SECONDS


def test_the_hint_is_what_the_last_ends_took() -> None:
    room = filled(now=100.0)
    turn_over(room, 105.0, 110.0, 115.0)
    assert hint(room, 115.0) == pytest.approx(5.0)
    assert hint(room, 130.0) == pytest.approx(10.0), "nothing has ended since then: it is slower than it was"


def test_the_hint_grows_with_those_ahead() -> None:
    room = filled()
    assert entered(room, b"b") == 3
    turn_over(room, 4.0, 8.0, owner=b"b")
    assert hint(room, 8.0) == pytest.approx(4 * 4.0), "three beyond the room must end, and one in it"
    assert entered(room, b"c", 8.0) == 2
    assert entered(room, b"d", 8.0) == 1
    assert hint(room, 8.0, b"e") == pytest.approx(4.0), "e is under its share: one end is enough"


def test_times_without_requests_do_not_count() -> None:
    room = Room(1)
    room.enter(b"a", 10.0)
    room.leave(b"a", 14.0)
    room.enter(b"a", 1000.0)
    room.leave(b"a", 1002.0)
    room.enter(b"a", 5000.0)
    assert hint(room, 5000.0) == pytest.approx(3.0)


def test_only_the_last_ends_count() -> None:
    room = filled()
    turn_over(room, *(30.0 * (1 + i) for i in range(KEPT_ENDS)))
    assert hint(room, 30.0 * KEPT_ENDS) == pytest.approx(30.0)
    turn_over(room, *(30.0 * KEPT_ENDS + 2.5 * (1 + i) for i in range(KEPT_ENDS)))
    assert hint(room, 32.5 * KEPT_ENDS) == pytest.approx(2.5)


@pytest.mark.parametrize(("took", "said"), [(0.001, LEAST_SECONDS), (0.0, LEAST_SECONDS), (1.5, 1.5), (59.0, 59.0), (500.0, MOST_SECONDS)])
def test_the_hint_is_kept_within_bounds(took: float, said: float) -> None:
    room = filled()
    turn_over(room, took)
    assert hint(room, took) == said


def test_the_message_says_what_there_is_and_when_to_try_again() -> None:
    room = filled()
    turn_over(room, 6.2)
    room.enter(b"b", 6.2)
    with pytest.raises(BusyError, match="7 requests are running or waiting, for a room of at most 6; try again in 13 s"):
        room.enter(b"a", 6.2)
