"""Attention's blocks: the large ones are dealt out first, and no bit hangs on their order. And KV blocks as memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest

from engine.kernels.batch import Batch
from engine.kernels.cpu import kv
from engine.kernels.cpu.strips import SPAN
from engine.models.llama_cpu import CpuLlama
from engine.weights.packed import PackedModel
from tests.engine import tiny
from tests.engine.models.test_llama_cpu import Kind, gguf, make, new, some_ids, some_tables
from tests.engine.stepping import Array, Run, batch

ROW, ROWS, _, TILE, TILES, PART = range(6)  # of a block's fields


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    config = tiny.config(hidden_size=64, intermediate_size=96, head_dim=32, context_length=1024)
    return make(gguf(Kind.Q4_1, config), "auto", tmp_path_factory.mktemp("packed"))


@pytest.fixture
def new_decoder(model: PackedModel) -> Iterator[Callable[[int], CpuLlama]]:
    made: list[CpuLlama] = []

    def make_one(threads: int) -> CpuLlama:
        made.append(new(model, threads=threads, kv_dtype="float32"))
        return made[-1]

    yield make_one
    for decoder in made:
        decoder.close()


def mixed(*sizes: tuple[int, int]) -> list[Run]:
    """A step's share of sequences, of (rows, context) each."""
    tables = some_tables([context for _, context in sizes])
    ids = [some_ids(rows, seed) for seed, (rows, _) in enumerate(sizes)]
    return [Run(given, context - len(given), table) for given, (_, context), table in zip(ids, sizes, tables, strict=True)]


STEPS: dict[str, list[tuple[int, int]]] = {
    "a prompt beside decodes": [(1, 40), (1, 700), (90, 500), (1, 129), (1, 20)],
    "prompts": [(3, 3), (150, 600), (20, 640), (65, 70)],
    "decodes": [(1, 10 + 97 * at) for at in range(8)],
    "lone rows, tile by tile": [(1, 900), (1, 130)],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_each_thread_has_its_share_of_the_large_blocks_and_begins_with_these(
    new_decoder: Callable[[int], CpuLlama], name: str, threads: int
) -> None:
    step = batch(mixed(*STEPS[name]))
    blocks, part_rows, _ = new_decoder(threads)._blocks(step)
    check_whole(step, blocks, part_rows)
    work = blocks[:, ROWS] * blocks[:, TILES]
    lanes = np.array_split(work, threads)  # each a stretch; the first ones have one more if they are not even
    for lane in lanes:
        assert (np.diff(lane) <= 0).all(), "the largest first"
    dealt = np.stack([lane[: len(work) // threads] for lane in lanes])
    assert (np.diff(dealt.T.ravel()) <= 0).all(), "one to each in turn, from the largest on"


def check_whole(step: Batch, blocks: Array, part_rows: Array) -> None:
    """Each row is in one block, with all tiles it sees; or in one for each of these, whose parts it is told."""
    tiles = -(-(step.positions + 1) // SPAN)
    for row, (first, parts) in enumerate(part_rows.tolist()):
        of_row = blocks[(blocks[:, ROW] <= row) & (row < blocks[:, ROW] + blocks[:, ROWS])]
        if parts:
            assert parts == tiles[row] == len(of_row)
            assert (of_row[:, PART] - of_row[:, TILE] == first).all()
            assert sorted(of_row[:, TILE]) == list(range(parts))
            assert (of_row[:, [ROWS, TILES]] == 1).all()
        else:
            ((_, _, _, tile, count, part),) = of_row.tolist()
            assert (tile, part) == (0, -1)
            assert count >= tiles[row]
    assert len({*blocks[blocks[:, PART] >= 0, PART].tolist()}) == (blocks[:, PART] >= 0).sum(), "no part is written twice"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_no_bit_hangs_on_the_order_of_blocks(new_decoder: Callable[[int], CpuLlama], name: str, threads: int) -> None:
    decoder = new_decoder(threads)
    numbers = decoder._cache.view(np.float32)
    numbers[:] = np.random.default_rng(1).standard_normal(numbers.shape, np.float32)  # what was said before
    step = batch(mixed(*STEPS[name]))
    wanted = decoder.forward(step).copy()
    real, chance = decoder._blocks, np.random.default_rng(2)

    def shuffled(given: Batch) -> tuple[Array, Array, list[Array]]:
        blocks, part_rows, kept = real(given)
        return chance.permutation(blocks), part_rows, kept

    with mock.patch.object(decoder, "_blocks", shuffled):
        for _ in range(5):
            np.testing.assert_array_equal(decoder.forward(step), wanted)


def test_a_block_that_was_touched_has_memory_and_keeps_what_it_holds(new_decoder: Callable[[int], CpuLlama]) -> None:
    decoder = new_decoder(1)
    decoder.copy_block(0, 1)  # what copying itself needs is there
    known = np.arange(decoder.block_bytes, dtype=np.uint8)
    decoder.load_block(0, known)
    last = len(decoder._cache) * kv.PAGE // decoder.block_size - 1
    for block in (0, last):
        decoder.touch_block(block)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    decoder.copy_block(0, last)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt == before
    for block in (0, last):
        decoder.touch_block(block)
        assert np.array_equal(decoder._block(block), known)
