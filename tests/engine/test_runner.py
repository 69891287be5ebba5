"""The runner's moves: between blocks, to a store and back."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from engine.core import Copy, Load, Move, Save
from engine.offload import FileStore, MemoryStore
from engine.runner import Runner
from tests.engine.fakes import Content, FakeRunner
from tests.engine.test_offload import SIZE, flip, nodes, path_of
from tests.engine.test_storms import Workload


class Bytes:
    """A decoder's blocks, and nothing else of it, for a runner whose blocks are `content`."""

    def __init__(self, content: dict[int, Content], size: int) -> None:
        self.content = content
        self.block_bytes = 8 * size
        self.touched: list[int] = []

    def touch_block(self, block: int) -> None:
        self.touched.append(block)

    def copy_block(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])

    def save_block(self, block: int, into: np.ndarray) -> None:
        into[:] = np.array(self.content[block], np.int64).view(np.uint8)

    def load_block(self, block: int, data: np.ndarray) -> None:
        self.content[block] = data.copy().view(np.int64).tolist()


def test_memory_is_had_for_each_block_once() -> None:
    decoder = Bytes({}, 1)
    runner = Runner(decoder, 1)  # type: ignore[arg-type]
    assert runner.touch([3, 1])
    assert runner.touch([3, 1])
    assert not runner.touch([3, 1])
    assert not runner.touch([])
    assert decoder.touched == [3, 1]


def test_moves_are_made_in_order() -> None:
    """A slot and a block are each used twice in one step."""
    content = {0: [10], 1: [11], 2: [12]}
    runner = Runner(Bytes(content, 1), 1, MemoryStore(1, 8))  # type: ignore[arg-type]
    one, two = nodes(2)
    moves: list[Move] = [Save(0, 0, one), Copy(1, 0), Load(0, 1, one), Save(2, 0, two), Copy(0, 2), Load(0, 0, two)]
    assert runner.move(moves) == []
    assert content == {0: [12], 1: [10], 2: [11]}


def test_what_should_have_come_from_a_slot_that_cannot_be_read_fails_too(tmp_path: Path) -> None:
    content = {at: [at] for at in range(6)}
    store = FileStore(tmp_path, "model", 2, 8, SIZE)
    runner = Runner(Bytes(content, 1), 1, store)  # type: ignore[arg-type]
    good, bad = nodes(2)
    assert runner.move([Save(5, 0, good)]) == []
    moves: list[Move] = [Load(1, 0, bad), Copy(0, 1), Copy(1, 2), Load(0, 0, good), Copy(0, 3), Load(0, 1, good), Copy(2, 4)]
    assert runner.move(moves) == [moves[0], moves[1], moves[2], moves[6]]
    assert [content[at] for at in (0, 1, 3)] == [[5], [5], [5]], "what comes after is good again"
    store.close()


def test_what_could_not_be_read_is_lost_to_all_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wants a part of it, the other all: it is forgotten, so neither may go on with it."""
    store = MemoryStore(1, 8)
    runner = Runner(Bytes({}, 1), 1, store)  # type: ignore[arg-type]
    answers = iter([False, True])
    monkeypatch.setattr(store, "read", lambda *_: next(answers))
    (node,) = nodes(1)
    moves: list[Move] = [Load(0, 0, node), Load(0, 1, node)]
    assert runner.move(moves) == moves


# Storms whose tier is a file, and which restart


class Filed(FakeRunner):
    """What a workload's runner keeps in its tier is in a file, and so is what it moves."""

    def __init__(self, plain: FakeRunner, store: FileStore) -> None:
        super().__init__(plain.block_size, vocab=plain.vocab)
        self.random = plain.random
        self.real = Runner(Bytes(self.blocks, plain.block_size), plain.block_size, store)  # type: ignore[arg-type]

    def move(self, moves: Iterable[Move]) -> list[Move]:
        moves = list(moves)
        failed = self.real.move(moves)
        self.loads += sum(isinstance(move, Load) and move not in failed for move in moves)
        return failed


def test_storms_with_a_file_through_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the disk refuses or damages, nobody reads another's KV, nor what was kept for other tokens (E2, E17)."""
    chance, real, trouble = random.Random(0), os.pwrite, 0.0

    def pwrite(file: int, data: memoryview, at: int) -> int:
        if chance.random() < trouble:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: chance.randrange(1, len(data) + 1)] if chance.random() < trouble else data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    restored = loads = 0
    for seed in range(60):
        for generation in range(4):
            workload = Workload(seed)
            pool = workload.scheduler.pool
            if pool.tier is None:
                break
            trouble = chance.choice((0.0, 0.2))
            store = FileStore(tmp_path / str(seed), "model", pool.tier.slots, 8 * pool.block_size, pool.block_size)
            restored += pool.tier.restore(store.records(), pool.cache)
            workload.check()
            workload.runner = Filed(workload.runner, store)
            workload.chance.seed(seed + generation // 2)  # others come, or the same again
            workload.run()
            loads += workload.runner.loads
            for _ in range(pool.blocks):
                pool.write_behind(1)
                for move in workload.runner.move(pool.take_moves()):
                    pool.unsaved(move)  # type: ignore[arg-type]
            workload.check()
            store.close()
            with path_of(tmp_path / str(seed)).open("r+b") as file:
                for _ in range(chance.choice((0, 0, 3))):
                    flip(file, chance.randrange(file.seek(0, os.SEEK_END)))
    assert restored > 500
    assert loads > 500
