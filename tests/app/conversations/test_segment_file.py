"""What replies were run as, kept in a file: found again by the next process, whatever became of the last one."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.conversations import ledger
from app.conversations.segment_file import SegmentFile
from app.conversations.segments import ENTRY_TOKENS, MOST_TOKENS, Segments
from tests.app.conversations.test_segments import HELLO, Said, items, known, reply, say

EACH = ENTRY_TOKENS + 2  # tokens that a reply of one, after one, takes up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "made" / "kv"


@contextmanager
def opened(folder: Path, most: int = MOST_TOKENS) -> Iterator[Segments]:
    """As a process has them. It leaves without a word."""
    file = SegmentFile(folder)
    try:
        yield Segments(most, file)
    finally:
        file.close()


def chat(name: str) -> list[Said]:
    return [("user", name), ("assistant", "yes")]


def kept(folder: Path, names: str, most: int = MOST_TOKENS) -> str:
    """Of the chats with these names, those that a new process knows."""
    with opened(folder, most) as segments:
        return "".join(name for name in names if known(segments, chat(name))[1] == [ord(name)])


def fill(segments: Segments, names: str) -> None:
    for name in names:
        say(segments, [("user", name)], reply("yes", ord(name)))


def test_it_is_found_as_it_was_by_the_next_process(folder: Path) -> None:
    with opened(folder) as segments:
        say(segments, HELLO, reply("hi", 1, 1 << 31, lead=(7, 8)))
        say(segments, [*HELLO, ("assistant", "hi"), ("user", "more")], reply("yes", 5))
    for _ in range(2):
        with opened(folder) as segments:
            new = items([*HELLO, ("assistant", "hi"), ("user", "more"), ("assistant", "yes")])
            segments.recall("ana", "f", None, [], new)
            found = ledger.messages(None, new, "f")[1]
            assert (found.lead_ids, found.lead_digest, found.ids) == ((7, 8), b"digest", (1, 1 << 31))
            assert new[-1].ids == [5]
            assert known(segments, [*HELLO, ("assistant", "hi")], owner="ben")[1] is None


def test_a_reply_that_followed_text_still_does(folder: Path) -> None:
    with opened(folder) as segments:
        opening: list[Said] = [*HELLO, ("assistant", "hi"), ("user", "more")]
        say(segments, opening, reply("yes", 5))
        say(segments, HELLO, reply("hi", 1, 2))
    with opened(folder) as segments:
        assert known(segments, [*opening, ("assistant", "yes"), ("user", "?")]) == [None, None, None, [5], None]


@pytest.mark.parametrize(
    ("after", "known_first"), [(1 << 62, True), (5, True), (4, True), (3, True), (2, True), (0, False), (-2, False), (-(1 << 62), False)]
)
def test_a_reply_that_is_said_to_follow_what_it_cannot_is_found_still(folder: Path, after: int, known_first: bool) -> None:
    """By whole records that nobody here has written. What it follows is looked for before it, if anywhere; and the search ends."""
    said: list[Said] = [*HELLO, ("assistant", "hi"), ("user", "more")]
    with opened(folder) as segments:
        say(segments, HELLO, reply("hi", 1, 2))
        say(segments, said, reply("yes", 5))
    file = SegmentFile(folder)
    file.rewrite([(key, replace(segment, after=after)) for key, segment in file.read()])
    file.close()
    with opened(folder) as segments:
        found = known(segments, [*said, ("assistant", "yes"), ("user", "?")])
        assert found == [None, [1, 2] if known_first else None, None, [5], None]
        assert known(segments, [*HELLO, ("assistant", "hi")]) == [None, [1, 2]]


def test_nobody_else_may_read_it(folder: Path) -> None:
    old = os.umask(0)
    try:
        with opened(folder, 2 * EACH) as segments:
            assert (folder / "segments").stat().st_mode & 0o777 == 0o600
            fill(segments, "abcde")  # written anew
    finally:
        os.umask(old)
    assert (folder.stat().st_mode & 0o777, (folder / "segments").stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("cut", [1, 7, 60, 99])
def test_what_a_cut_took_is_all_that_is_lost(folder: Path, cut: int) -> None:
    with opened(folder) as segments:
        fill(segments, "ab")
        size = (folder / "segments").stat().st_size
        fill(segments, "c")
    file = folder / "segments"
    os.truncate(file, max(size + 1, file.stat().st_size - cut))
    with opened(folder) as segments:
        assert known(segments, chat("c"))[1] is None
        fill(segments, "d")
    assert kept(folder, "abcd") == "abd"


@pytest.mark.parametrize("damage", [b"\xff" * 20, b"\0" * 20])
def test_what_follows_damage_is_dropped(folder: Path, damage: bytes) -> None:
    with opened(folder) as segments:
        fill(segments, "a")
        size = (folder / "segments").stat().st_size
        fill(segments, "bc")
    with (folder / "segments").open("r+b") as file:
        file.seek(size)
        file.write(damage)
    assert kept(folder, "abc") == "a"
    with opened(folder) as segments:
        fill(segments, "d")
    assert kept(folder, "abcd") == "ad"


def test_any_byte_may_be_wrong(folder: Path) -> None:
    with opened(folder) as segments:
        fill(segments, "ab")
    whole = (folder / "segments").read_bytes()
    for at in range(len(whole)):
        (folder / "segments").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert kept(folder, "ab") == ("a" if at >= len(whole) // 2 else "")


def test_the_oldest_is_dropped_beyond_the_bound_and_the_file_shrinks(folder: Path) -> None:
    with opened(folder) as segments:
        fill(segments, "abcdefg")
    size = (folder / "segments").stat().st_size
    assert kept(folder, "abcdefg", 4 * EACH) == "defg"
    assert (folder / "segments").stat().st_size == size, "it holds less than twice as much"
    assert kept(folder, "abcdefg", 3 * EACH) == "efg"
    assert (folder / "segments").stat().st_size == size // 7 * 3
    assert kept(folder, "abcdefg") == "efg"


def test_it_does_not_grow_without_end(folder: Path) -> None:
    names = "".join(chr(ord("A") + number) for number in range(26))
    with opened(folder, 3 * EACH) as segments:
        sizes = []
        for name in names:
            fill(segments, name)
            sizes.append((folder / "segments").stat().st_size)
    assert max(sizes) == 6 * sizes[0] < 4 * 6 * EACH
    assert kept(folder, names, 3 * EACH) == "XYZ"
    assert [path.name for path in folder.iterdir()] == ["segments"]


def test_what_was_used_last_is_kept_when_it_is_written_anew(folder: Path) -> None:
    with opened(folder, 3 * EACH) as segments:
        for name in "abcdef":
            fill(segments, name)
            known(segments, chat("a"))
        fill(segments, "g")
    assert kept(folder, "abcdefg") == "afg"


@pytest.mark.parametrize("partly", [True, False])
def test_a_full_disk_costs_what_was_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, partly: bool
) -> None:
    write = os.write

    def full(file: int, data: bytes) -> int:
        if partly:
            return write(file, data[:30])
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(folder) as segments, caplog.at_level(logging.WARNING):
        fill(segments, "a")
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            fill(segments, "bc")
        fill(segments, "d")
        assert [known(segments, chat(name))[1] for name in "abcd"] == [[97], [98], [99], [100]]
    assert len(caplog.records) == 1
    assert kept(folder, "abcd") == "ad"


def test_a_file_that_cannot_be_written_anew_stays(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(folder, 2 * EACH) as segments, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", full)
            fill(segments, "abcdef")
        assert [path.name for path in folder.iterdir()] == ["segments"]
    assert len(caplog.records) == 1
    assert kept(folder, "abcdef") == "abcdef"


def test_it_is_written_anew_in_one_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the system has all of it or says that it has not."""
    written: list[bytes] = []
    write = os.write

    def overhear(file: int, data: bytes) -> int:
        written.append(data)
        return write(file, data)

    with opened(folder) as segments:
        fill(segments, "abcdef")
    whole = (folder / "segments").read_bytes()
    monkeypatch.setattr(os, "write", overhear)
    with opened(folder, 2 * EACH):
        assert written == [(folder / "segments").read_bytes()] == [whole[len(whole) // 6 * 4 :]]


@pytest.mark.parametrize("room", [0, 1, 70, -1])
def test_a_disk_that_is_full_before_it_is_written_anew_leaves_it_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """Whether the system takes none, some, or all but a byte; and what comes when there is room again follows what there was."""
    write = os.write

    def full(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:room])

    with opened(folder) as segments:
        fill(segments, "abcdef")
    whole = (folder / "segments").read_bytes()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "write", full)
        with opened(folder, 2 * EACH) as segments:
            assert [path.name for path in folder.iterdir()] == ["segments"]
            assert (folder / "segments").read_bytes() == whole
            patched.setattr(os, "write", write)
            fill(segments, "g")
    assert len(caplog.records) == 1
    assert kept(folder, "abcdefg") == "abcdefg"


def test_of_two_servers_the_second_keeps_its_hands_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(folder) as first:
        fill(first, "a")
        with caplog.at_level(logging.WARNING), opened(folder, EACH) as second:
            fill(second, "bcdef")
            assert known(second, chat("f"))[1] == [102]
        fill(first, "g")
    assert len(caplog.records) == 1
    assert kept(folder, "abcdefg") == "ag"


def test_a_folder_that_cannot_be_is_no_hindrance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING), opened(tmp_path / "file") as segments:
        fill(segments, "a")
        assert known(segments, chat("a"))[1] == [97]
    assert len(caplog.records) == 1
