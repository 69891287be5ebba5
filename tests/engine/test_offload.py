"""Stores of blocks as bytes; `test_offload_engine.py` has a model's own blocks."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from engine import offload
from engine.core import CacheNode, EngineError, EngineOptions
from engine.offload import FileStore, MemoryStore, open_store
from engine.prefix_cache import PrefixCache
from engine.tier import Record, Tier

SLOTS, BYTES, SIZE = 5, 5000, 16  # a block's bytes fill no whole number of pages
ROOT = bytes(range(16))
PATTERNS = [bytes(random.Random(at).randbytes(BYTES)) for at in range(SLOTS)]


def nodes(count: int = SLOTS) -> list[CacheNode]:
    """One after another, named."""
    made = [CacheNode(None, (), salt=ROOT)]
    for at in range(count):
        made.append(CacheNode(made[-1], tuple(range(at, at + SIZE)), slot=at, id=at + 1))
    return made[1:]


def file_store(folder: Path, identity: str = "model", slots: int = SLOTS) -> FileStore:
    return FileStore(folder, identity, slots, BYTES, SIZE)


def read(store: MemoryStore | FileStore, node: CacheNode) -> bytes | None:
    block = bytearray(BYTES)
    return bytes(block) if store.read(node.slot, node, memoryview(block)) else None


def fill(store: MemoryStore | FileStore) -> list[CacheNode]:
    made = nodes()
    for node, pattern in zip(made, PATTERNS, strict=True):
        assert store.write(node.slot, node, memoryview(pattern))
    return made


def path_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_block_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    store = file_store(tmp_path) if kind == "file" else MemoryStore(SLOTS, BYTES)
    made = fill(store)
    assert [read(store, node) for node in made] == PATTERNS
    made[1].tokens = tuple(range(90, 90 + SIZE))
    assert store.write(1, made[1], memoryview(PATTERNS[4]))
    assert [read(store, node) for node in made] == [PATTERNS[0], PATTERNS[4], *PATTERNS[2:]]
    assert min(store.measure()) >= 0
    assert [read(store, node) for node in made] == [PATTERNS[0], PATTERNS[4], *PATTERNS[2:]]
    store.close()


def test_what_a_file_holds_is_told(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    made = fill(store)
    made[2].tokens = (7, 7, 2**32 - 1)  # a partly filled last block
    store.write(2, made[2], memoryview(PATTERNS[2]))
    store.close()
    store = file_store(tmp_path)
    assert list(store.records()) == [Record(node.slot, node.id, node.parent.id, ROOT, node.tokens) for node in made if node.parent]
    assert [read(store, node) for node in made] == PATTERNS
    store.close()


@pytest.mark.parametrize("fault", ["an error", "an early end"])
def test_what_could_not_be_read_once_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """E3: names are given out anew after it, and must not meet what had them before."""
    store = file_store(tmp_path)
    fill(store)
    store.close()

    def pread(file: int, size: int, at: int) -> bytes:
        if fault == "an error":
            raise OSError(errno.EIO, "Input/output error")
        return b"" if at else bytes(RECORD)

    store = file_store(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(os, "pread", pread)
        assert list(store.records()) == []
    assert "cannot be read, and is removed" in caplog.text
    (fresh,) = nodes(1)
    store.write(3, fresh, memoryview(PATTERNS[0]))
    store.close()
    store = file_store(tmp_path)
    assert [record.slot for record in store.records()] == [3]
    store.close()


def test_a_file_that_can_neither_be_read_nor_emptied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = file_store(tmp_path)

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(os, "pread", fail)
        context.setattr(os, "truncate", fail)
        with pytest.raises(EngineError, match=r"can be read or emptied, got .*Input/output error"):
            list(store.records())
    store.close()


def test_a_slot_is_read_only_as_what_it_was_written_as(tmp_path: Path) -> None:
    """E2: neither a name nor the tokens alone make a hit."""
    store = file_store(tmp_path)
    node = fill(store)[2]
    right = node.id, node.tokens
    for wrong in ((right[0] + 1, right[1]), (right[0], (*right[1][:-1], 9)), (right[0], right[1][:-1])):
        node.id, node.tokens = wrong
        assert read(store, node) is None
    node.id, node.tokens = right
    assert read(store, node) == PATTERNS[2]
    store.close()


def test_what_was_forgotten_before_it_was_written_is_not_kept(tmp_path: Path) -> None:
    """A tier of one slot: saved, and given up for another in the same step."""
    store = file_store(tmp_path)
    forgotten, other = nodes(2)
    forgotten.parent = None
    assert not store.write(0, forgotten, memoryview(PATTERNS[0]))
    assert store.write(0, other, memoryview(PATTERNS[1]))
    assert [record.id for record in store.records()] == [other.id]
    store.close()


# Damage. A slot's record is at slot * 128: magic 4, checksum 4, block's checksum 4, id 8, parent 8, root 16, tokens 4, then they.

RECORD, DATA, STRIDE = 128, 4096, 8192


def flip(file: Any, at: int) -> None:
    file.seek(at)
    (byte,) = file.read(1)
    file.seek(at)
    file.write(bytes([byte ^ 0x10]))


def over(file: Any, at: int, data: bytes) -> None:
    file.seek(at)
    file.write(data)


def swap_records(file: Any) -> None:
    file.seek(RECORD)
    record = file.read(2 * RECORD)
    over(file, RECORD, record[RECORD:] + record[:RECORD])


DAMAGES: dict[str, Callable[[Any], object]] = {
    **{f"record's byte {at}": lambda file, at=at: flip(file, 2 * RECORD + at) for at in (0, 3, 4, 8, 12, 19, 20, 28, 43, 44, 47)},
    "first token": lambda file: flip(file, 2 * RECORD + 48),
    "last token": lambda file: flip(file, 2 * RECORD + 48 + 4 * SIZE - 1),
    "first byte": lambda file: flip(file, DATA + 2 * STRIDE),
    "a byte": lambda file: flip(file, DATA + 2 * STRIDE + 2345),
    "last byte": lambda file: flip(file, DATA + 2 * STRIDE + BYTES - 1),
    "zeroed record": lambda file: over(file, 2 * RECORD, bytes(RECORD)),
    "zeroed data": lambda file: over(file, DATA + 2 * STRIDE, bytes(BYTES)),
    "another slot's data": lambda file: over(file, DATA + 2 * STRIDE, PATTERNS[3]),
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_slot_is_a_miss_and_its_neighbours_are_none(
    tmp_path: Path, damage: str, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = file_store(tmp_path)
    made = fill(store)
    with path_of(tmp_path).open("r+b") as file:
        DAMAGES[damage](file)
    if restarted:
        store.close()
        store = file_store(tmp_path)
    assert read(store, made[2]) is None
    assert "damaged" in caplog.text
    for at in (0, 1, 3, 4):
        assert read(store, made[at]) == PATTERNS[at]
    found = {record.slot: record for record in store.records()}
    assert found.keys() >= {0, 1, 3, 4}
    assert 2 not in found or found[2].tokens == made[2].tokens
    assert store.write(2, made[2], memoryview(PATTERNS[2])), "the slot is of use again"
    assert read(store, made[2]) == PATTERNS[2]
    store.close()


def test_a_record_in_another_slot_is_not_that_slots(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    made = fill(store)
    with path_of(tmp_path).open("r+b") as file:
        swap_records(file)
    assert [read(store, node) for node in made] == [PATTERNS[0], None, None, *PATTERNS[3:]]
    store.close()


@pytest.mark.parametrize("size", [0, 1, RECORD, 3 * RECORD - 1, DATA, DATA + STRIDE + 1, DATA + 4 * STRIDE + BYTES - 1])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_file_that_was_cut_short_still_has_is_found(tmp_path: Path, size: int, restarted: bool) -> None:
    """Under a running server too: nothing but misses, and then it is written again."""
    store = file_store(tmp_path)
    made = fill(store)
    os.truncate(path_of(tmp_path), size)
    if restarted:
        store.close()
        store = file_store(tmp_path)
    whole = [(at + 1) * RECORD <= size and DATA + at * STRIDE + BYTES <= size for at in range(SLOTS)]
    assert [read(store, node) for node in made] == [pattern if there else None for pattern, there in zip(PATTERNS, whole, strict=True)]
    list(store.records())
    made = fill(store)
    assert [read(store, node) for node in made] == PATTERNS
    store.close()


# Whose it is


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_only_its_owner_may_read_it(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        store = file_store(tmp_path / "new" / "folder")
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "folder"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path_of(folder).stat().st_mode & 0o777 == 0o600
    store.close()
    path_of(folder).chmod(0o644)
    file_store(folder).close()
    assert path_of(folder).stat().st_mode & 0o777 == 0o600


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    made = fill(store)
    with pytest.raises(EngineError, match=f"expected an offload folder that no other server uses, got {tmp_path}"):
        file_store(tmp_path)
    assert [read(store, node) for node in made] == PATTERNS
    store.close()
    file_store(tmp_path).close()


def test_another_identity_finds_nothing_and_takes_the_others_room(tmp_path: Path) -> None:
    """But for a file that a running server has."""
    fill(store := file_store(tmp_path))
    other = file_store(tmp_path, "another model")
    assert list(other.records()) == []
    assert len(list(tmp_path.iterdir())) == 2
    store.close()
    other.close()
    (tmp_path / "kv-folder.cache").mkdir()
    (tmp_path / "mine.txt").touch()
    store = file_store(tmp_path)
    assert len(list(store.records())) == SLOTS
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 2, "it, and what is not a cache"
    store.close()


@pytest.mark.parametrize("change", [{"slots": SLOTS + 1}, {"block_bytes": BYTES + 1}, {"block_size": SIZE + 1}, {"identity": "model "}])
def test_whatever_decides_what_bytes_mean_is_in_the_name(tmp_path: Path, change: dict[str, Any]) -> None:
    arguments = {"identity": "model", "slots": SLOTS, "block_bytes": BYTES, "block_size": SIZE}
    fill(store := FileStore(tmp_path, **arguments))  # type: ignore[arg-type]
    store.close()
    other = FileStore(tmp_path, **(arguments | change))  # type: ignore[arg-type]
    assert list(other.records()) == []
    other.close()


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"expected an offload folder that can be written, got .*file"):
        file_store(tmp_path / "file")
    store = file_store(tmp_path / "folder")
    store.close()
    path = path_of(tmp_path / "folder")
    path.unlink()
    path.symlink_to(tmp_path / "file")
    with pytest.raises(EngineError, match="can be written"):
        file_store(tmp_path / "folder")
    assert (tmp_path / "file").stat().st_size == 0, "nothing is written where a link leads"


def test_the_options_say_where_and_how_much(tmp_path: Path) -> None:
    def opened(**options: Any) -> offload.Store | None:
        return open_store(EngineOptions(model="m", cache_dir=tmp_path, **options), "model", 1 << 20)

    assert opened() is None
    assert opened(offload_dir=tmp_path / "a") is None
    with pytest.raises(EngineError, match=r"expected a swap_space of at least a block, 0\.000977 GiB, got 0\.0005"):
        opened(swap_space=0.0005)
    memory, file = opened(swap_space=0.0999), opened(swap_space=0.0999, offload_dir=tmp_path / "a")
    assert isinstance(memory, MemoryStore)
    assert isinstance(file, FileStore)
    assert memory.slots == file.slots == 102
    file.close()
    with pytest.raises(EngineError, match=r"expected swap space that memory can hold, got 1e\+09 GiB"):
        opened(swap_space=1e9)


# A disk that is full


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether there is room. As on a disk, some bytes may still have fit."""
    real, room = os.pwrite, True

    def pwrite(file: int, data: memoryview, at: int) -> int:
        if room:
            return real(file, data, at)
        if len(data) > 999:
            return real(file, data[:999], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def say(there_is: bool) -> None:
        nonlocal room
        room = there_is

    monkeypatch.setattr(os, "pwrite", pwrite)
    yield say


def test_a_full_disk_loses_blocks_and_is_told_once(
    tmp_path: Path, full_disk: Callable[[bool], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(offload.time, "monotonic", lambda: now)
    store = file_store(tmp_path)
    made = fill(store)
    full_disk(False)
    load, save = store.measure()
    assert load == 0, "what there is may be worth reading"
    assert save > 0, "it is not known, but saves are still to be bounded"
    for node in made[:3]:
        node.id += 100
        assert not store.write(node.slot, node, memoryview(PATTERNS[4]))
        assert read(store, node) is None
    assert [read(store, node) for node in made[3:]] == PATTERNS[3:]
    full_disk(True)
    assert store.write(0, made[0], memoryview(PATTERNS[0]))
    assert read(store, made[0]) == PATTERNS[0]
    full_disk(False)
    assert not store.write(1, made[1], memoryview(PATTERNS[1]))
    assert [record.levelno for record in caplog.records if "No space left" in record.message] == [logging.WARNING]
    now = 3600.0
    assert not store.write(1, made[1], memoryview(PATTERNS[1]))
    assert sum("No space left" in record.message for record in caplog.records) == 2, "and again after an hour of it"
    store.close()


def test_what_did_not_fit_over_another_block_is_not_looked_for_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is damaged: there is nothing."""
    store = file_store(tmp_path)
    made, real = fill(store), os.pwrite

    def pwrite(file: int, data: memoryview, at: int) -> int:
        if len(data) == BYTES:
            return real(file, data[:999], at)
        if len(data) > 999:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, at)  # where something is already, there is room

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not store.write(2, made[4], memoryview(PATTERNS[4]))
    store.close()
    store = file_store(tmp_path)
    assert [record.slot for record in store.records()] == [0, 1, 3, 4]
    store.close()


def test_a_tier_is_restored_from_a_file_that_holds_what_was_given_up(tmp_path: Path) -> None:
    """Records of blocks that are nowhere any more stay in free slots until these are taken: they are as true as the others."""
    store, tier, cache = file_store(tmp_path, slots=2), Tier(2), PrefixCache(SIZE)
    first = cache.add(cache.root(b"a", (), 0, 0), tuple(range(SIZE)))[0]
    assert first
    tier.take(first)
    assert store.write(first.slot, first, memoryview(PATTERNS[0]))
    tier.release(cache.remove(first)[0])
    again, found = Tier(2), PrefixCache(SIZE)
    assert again.restore(store.records(), found) == 1
    (node,) = found.nodes()
    assert read(store, node) == PATTERNS[0]
    store.close()
