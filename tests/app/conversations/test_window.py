"""What is left out of a chat that has outgrown the context."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.conversations.window import newest, room, windows
from app.store.records import Item, Role
from engine.core import Message

LETTERS = {"s": "system", "u": "user", "a": "assistant"}


def chat(roles: str, *sizes: int) -> tuple[list[Message], list[int]]:
    """A chat by the initials of its roles, each message named by its place; and where its messages end. No size: 10 tokens each."""
    messages = [Message(LETTERS[role], f"{role}{place}") for place, role in enumerate(roles)]
    return messages, list(itertools.accumulate(sizes or [10] * len(roles)))


def shown(roles: str, limit: int, newest: int = 1) -> list[str]:
    """The roles of each window."""
    messages, ends = chat(roles)
    made = [[message.text for message in window] for window in windows(messages, ends, limit, newest)]
    texts = [message.text for message in messages]
    for window in made:
        kept = [text for text in texts if text in window]
        assert window == kept, "in order"
        assert window[-newest:] == texts[-newest:] or window == texts
    return ["".join(text[0] for text in window) for window in made]


@pytest.mark.parametrize(
    ("roles", "limit", "expected"),
    [
        ("u", 100, "u"),
        ("suau", 40, "suau"),
        ("suau", 39, "su"),
        ("suauau", 60, "suauau"),
        ("suauauau", 70, "suau"),  # 80 tokens: two turns go, so that of 60 beside the system message at most 30 are left
        ("ssuauauau", 80, "ssuau"),
        ("auau", 30, "u"),  # a greeting goes with the first turns
        ("auauauau", 79, "uau"),
        ("suuauu", 100, "suuauu"),
        ("suuauu", 59, "suu"),  # a message whose reply had no text is a turn
        ("suasu", 49, "ssu"),  # a note for the newest message stays with it
        ("s", 5, "s"),
        ("ss", 100, "ss"),
        ("a", 5, "a"),
        ("aa", 15, "aa"),
    ],
)
def test_whole_turns_are_left_out_down_to_half_of_the_limit(roles: str, limit: int, expected: str) -> None:
    assert shown(roles, limit)[0] == expected


@pytest.mark.parametrize(
    ("new", "limit", "expected"), [(1, 0, "su"), (2, 0, "suu"), (3, 0, "suauu"), (5, 0, "suauu"), (9, 0, "suauu"), (1, 60, "suauu")]
)
def test_the_newest_input_stays_whatever_its_size(new: int, limit: int, expected: str) -> None:
    assert shown("suauu", limit, newest=new)[0] == expected


def test_smaller_windows_follow_should_one_not_fit() -> None:
    whole = "s" + "ua" * 9 + "u"
    assert shown(whole, 10_000) == [whole, "su"]
    assert shown(whole, 200) == [whole, "suau", "su"]


SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 80)), min_size=1, max_size=25)


@given(turns=SIZES, front=st.integers(0, 150), limit=st.integers(50, 400))
def test_a_conversation_goes_on_and_its_front_stays_put(turns: list[tuple[int, int]], front: int, limit: int) -> None:
    """As it is asked turn by turn: each time from the whole history, the reply to the last turn not yet known."""
    starts = []
    for last, (asked, _) in enumerate(turns):
        roles = "s" + "ua" * last + "u"
        sizes = [front, *(size for turn in turns[:last] for size in turn), asked]
        messages, ends = chat(roles, *sizes)
        window = next(windows(messages, ends, limit, 1))
        start = len(messages) - len(window)
        tokens = front + sum(sizes[1 + start :])
        assert window[0].role == "system" and window[1].role == "user"
        assert tokens <= limit or len(window) == 2
        if starts and start != starts[-1]:
            assert start > starts[-1], "what was left out does not come back"
            assert len(window) == 2 or tokens - front <= (limit - front) // 2
            before = front + sum(sizes[1 + starts[-1] :])
            assert before > limit, "it still fitted"
        starts.append(start)


@pytest.mark.parametrize(("asked", "left"), [(0, 250), (1, 125), (125, 125), (126, 250), (300, 375), (500, 500), (501, 500), (10**9, 500)])
def test_room_is_left_for_the_reply(asked: int, left: int) -> None:
    assert room(asked, 1000) == left


@pytest.mark.parametrize(("roles", "count"), [("u", 1), ("su", 2), ("uau", 1), ("uasu", 2), ("uauu", 2), ("ua", 1), ("ua_u", 1), ("u_", 1)])
def test_the_newest_input_is_what_follows_the_last_reply(roles: str, count: int) -> None:
    names: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant", "_": "assistant"}
    new = [Item(id="", parent=None, role=names[role], text=role.strip("_"), created_at=0, response="") for role in roles]
    assert newest(new) == count
