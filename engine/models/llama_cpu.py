"""The Llama-architecture decoder as a program of compiled stages.

Owns the order of a forward pass, the buffers between stages and the KV cache. Knows no scheduler and no file format, and imports no torch.
(Llama: Touvron et al., 2023)
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine import memory
from engine.core import EngineError, ModelError, Sequence
from engine.kernels.batch import Batch
from engine.kernels.cpu import attention as at
from engine.kernels.cpu import build, kv
from engine.kernels.cpu import linear as li
from engine.kernels.cpu import rows as ro
from engine.kernels.cpu import tiles as ti
from engine.kernels.cpu.choices import Choices
from engine.kernels.cpu.choose import choose
from engine.kernels.cpu.linear import linear_stage
from engine.kernels.cpu.sampling import scratch_bytes
from engine.kernels.cpu.stage import CHUNK, COLUMNS, FUNCTION, ITEMS, TABLE, Stage, Team, thread_count
from engine.kernels.cpu.strips import SPAN
from engine.kernels.cpu.tiles import BLOCK
from engine.models import rope
from engine.weights.cache import Progress, quiet
from engine.weights.packed import PackedLinear, PackedModel

Array = np.ndarray

OFFSETS = {"q4_1": 0, "q4_0": -8, "q8_0": -128}  # what a format's integers have too much
# Activations that enter with 12 bits: those whose rounding costs the most truth for the time they take (docs/cpu.md has the figures).
FINE_INPUTS = frozenset({"qkv", "down"})
PARTS = 512  # tiles of lone rows that can wait to be merged: at least so many, and as many as the KV pool has

PER_ROW, PER_BLOCK, PER_SAMPLE, PER_SHARE, FIXED = range(5)  # what a stage's items are
SHARE = 32  # rows that make a thread's share worth having: fewer, and weights cost more than what threads hand each other


@dataclass(slots=True)
class _Program:
    """Stages in order, and everything they point to."""

    rows: list[tuple[Stage, int, int, int]] = field(default_factory=list)  # stage, table, items of one of its kind, kind of items
    kept: list[Array] = field(default_factory=list)

    def table(self, *fields: int) -> int:
        """An int64 table; its address."""
        return self.keep(np.array(fields, np.int64))

    def keep(self, array: Array) -> int:
        self.kept.append(array)
        return array.ctypes.data

    def buffer(self, size: int) -> int:
        """`size` bytes at a cache line's start, all zero: rows that make a block full are computed too, and must not be subnormal, which
        is slow."""
        array = np.zeros(size + 64, np.uint8)
        return self.keep(array) + -array.ctypes.data % 64

    def add(self, stage: Stage, table: int, kind: int, items: int = 1) -> None:
        self.rows.append((stage, table, items, kind))


class CpuLlama:
    """One model with its buffers and its KV cache. Every call comes from the thread that made it."""

    def __init__(
        self,
        packed: PackedModel,
        *,
        cache_dir: Path,
        threads: int = 0,
        blocks: int,
        block_size: int,
        kv_dtype: str = "bfloat16",
        exact: bool = False,
        max_rows: int = 512,
        max_samples: int = 32,
        progress: Progress = quiet,
    ) -> None:
        """Lay out the program, and have its kernels compiled if the cache has them not.

        cache_dir: where compiled kernels are kept. threads: 0 for one per core. kv_dtype: "float32", "bfloat16" or "int8". exact:
        activations stay float32. max_rows, max_samples: the most rows of a step, and the most of which logits are wanted.

        Raises: ModelError when the model's shape or the block size is not one these kernels take; EngineError when they cannot run, or
        memory cannot hold the KV of so many blocks.
        """
        config = self.config = packed.config
        _check(packed, block_size)
        self.packed = packed
        self._threads = thread_count(threads)
        self.block_size = block_size
        self.exact = exact
        self._kv_dtype = kv_dtype
        self._group = config.heads // config.kv_heads
        self._block_rows = max(1, at.QUERIES // self._group)
        layer_bytes = kv.page_bytes(kv.KV_TYPES[kv_dtype], config.kv_heads, config.head_dim)
        self._max_rows, self._max_samples = max_rows, max_samples
        self._vocab_stride = packed.head.padded_outputs
        self._choices = Choices(config.vocab_size)
        self._step = np.zeros(ro.STEP_FIELDS, np.int64)
        self._made = program = _Program()
        # Zeros: memory is taken as pages are first written, and no lane of a page ever holds a NaN that nobody wrote.
        pages = blocks * block_size // kv.PAGE
        memory.check_pool(blocks * block_size, pages * config.layers * layer_bytes)
        self._cache = np.zeros((pages, config.layers, layer_bytes), np.uint8)
        self._logits = np.empty((max_samples, self._vocab_stride), np.float32)
        self._longest = min(config.context_length, blocks * block_size)  # positions
        self._parts = max(PARTS, -(-blocks * block_size // SPAN) + 8 * self._threads)  # each lone row's last tile may be a part of one
        self._build(program, max_rows)
        self._program = np.zeros((len(program.rows), COLUMNS), np.int64)
        stages, tables, items, kinds = zip(*program.rows, strict=True)
        build.prepare(cache_dir, {stage.name for stage in stages}, progress)
        self._team = Team(self._threads)
        self._program[:, FUNCTION], self._program[:, TABLE] = [stage.address for stage in stages], tables
        self._fixed = np.array(items, np.int64)
        self._chunks = np.array([_quarter(number) for number in items], np.int64)
        self._kinds = np.array(kinds, np.int64)

    @property
    def identity(self) -> str:
        """How the kernels are told to compute. Every CPU has the same bits, so it says nothing of this one."""
        return f"cpu {self._kv_dtype} {'exact' if self.exact else 'rounded'}"

    @property
    def block_bytes(self) -> int:
        return self._block(0).nbytes

    def copy_block(self, source: int, target: int) -> None:
        self._block(target)[:] = self._block(source)

    def touch_block(self, block: int) -> None:
        pages = self._block(block)[:: mmap.PAGESIZE]
        pages |= 0

    def save_block(self, block: int, into: Array) -> None:
        into[:] = self._block(block)

    def load_block(self, block: int, data: Array) -> None:
        self._block(block)[:] = data

    def _block(self, block: int) -> Array:
        pages = self.block_size // kv.PAGE
        return self._cache[block * pages : (block + 1) * pages].reshape(-1)

    @property
    def kv_bytes(self) -> int:
        return self._cache.nbytes

    def close(self) -> None:
        """Let another thread of the process compute."""
        self._team.close()

    def forward(self, batch: Batch) -> Array:
        """Run a step's rows, writing their K and V into the cache.

        Returns logits float32 [len(batch.sample_rows), vocab], overwritten by the next step; they may be changed before `pick`.
        """
        self._run(batch)
        return self._logits[: len(batch.sample_rows), : self.config.vocab_size]

    def choose(self, batch: Batch, sequences: list[Sequence]) -> list[int]:
        """Run a step's rows and choose a token for each sampled one, in order; -1 where the logits hold a NaN."""
        records = self._choices.prepare(sequences)
        chosen = np.empty(len(sequences), np.int64)
        self._step[ro.CHOICES], self._step[ro.CHOSEN] = records.ctypes.data, chosen.ctypes.data
        try:
            self._run(batch)
        finally:
            self._step[ro.CHOICES] = 0
        return chosen.tolist()

    def pick(self, sequences: list[Sequence]) -> list[int]:
        """Choose from the first rows of the logits that `forward` gave, as they now are: the program's last stage alone."""
        records = self._choices.prepare(sequences)
        chosen = np.empty(len(sequences), np.int64)
        program = self._program[-1:].copy()
        program[:, ITEMS], program[:, CHUNK] = len(sequences), 1
        self._step[ro.CHOICES], self._step[ro.CHOSEN] = records.ctypes.data, chosen.ctypes.data
        try:
            self._team.run(program, self._step)
        finally:
            self._step[ro.CHOICES] = 0
        return chosen.tolist()

    def _run(self, batch: Batch) -> None:
        rows, samples = len(batch.tokens), len(batch.sample_rows)
        if rows > self._max_rows or samples > self._max_samples:  # kernels do not look where they write
            raise EngineError(f"expected a step of at most {self._max_rows} rows and {self._max_samples} samples, got {rows} and {samples}")
        blocks, part_rows, kept = self._blocks(batch)
        step = self._step
        step[ro.ROWS], step[ro.SAMPLES] = rows, samples
        for at_field, array in (
            (ro.TOKENS, batch.tokens),
            (ro.POSITIONS, batch.positions),
            (ro.SLOTS, batch.slots),
            (ro.BLOCKS, blocks),
            (ro.PART_ROWS, part_rows),
            (ro.SAMPLE_ROWS, batch.sample_rows),
        ):
            step[at_field] = array.ctypes.data
        shares = self._threads if rows >= SHARE * self._threads else 1
        step[ro.SHARES] = shares
        counts = np.array([rows, len(blocks) * self.config.kv_heads, samples, shares, 1], np.int64)
        items = counts[self._kinds] * self._fixed
        if not samples:
            items[self._head] = 0
        if not step[ro.CHOICES]:
            items[-1] = 0
        self._program[:, ITEMS] = items
        # Rows go by eights: neighbours in a block share cache lines. A share is a lane's, so its items go by whole chunks.
        # One head of one block of attention can be half of all there is, so these go one by one.
        self._program[:, CHUNK] = np.select(
            [self._kinds == PER_ROW, self._kinds == PER_BLOCK, (self._kinds == PER_SHARE) & (shares > 1)],
            [8, 1, self._chunks],
            np.maximum(1, items // (4 * self._threads)),
        )
        self._team.run(self._program, step)
        del kept

    def _blocks(self, batch: Batch) -> tuple[Array, Array, list[Array]]:
        """Attention's blocks int64 [blocks, BLOCK_FIELDS], each row's parts int64 [rows, 2], and the arrays they point to.

        A sequence's rows go together as far as a block has room. When there are few rows in all, each tile of a lone row is a block of
        its own, so that no thread waits for one that has a long context to itself.
        """
        part_rows = np.zeros((len(batch.tokens), 2), np.int64)
        few = len(batch.tokens) * self.config.kv_heads < 8 * self._threads
        blocks: list[tuple[int, ...]] = []
        kept: list[Array] = []
        parts = 0
        for span in batch.spans:
            pages = self._pages(span.table)
            kept.append(pages)
            address = pages.ctypes.data
            for row in range(0, span.rows, self._block_rows):
                rows = min(self._block_rows, span.rows - row)
                tiles = -(-(span.context - span.rows + row + rows) // SPAN)
                if few and rows == 1 and 1 < tiles <= self._parts - parts:
                    part_rows[span.first + row] = parts, tiles
                    blocks += [(span.first + row, 1, address, tile, 1, parts + tile) for tile in range(tiles)]
                    parts += tiles
                else:
                    blocks.append((span.first + row, rows, address, 0, tiles, -1))
        # A thread begins with its own lane, which is a stretch of the blocks: each has its share of the large ones, and these first.
        blocks.sort(key=_work, reverse=True)
        dealt = [block for lane in range(self._threads) for block in blocks[lane :: self._threads]]
        return np.array(dealt, np.int64), part_rows, kept

    def _pages(self, table: Array) -> Array:
        pages = self.block_size // kv.PAGE
        if pages == 1:
            return table
        return (table[:, None] * pages + np.arange(pages)).ravel()

    def _build(self, program: _Program, rows: int) -> None:
        """Lay out the buffers and write the program."""
        config, packed = self.config, self.packed
        width, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        x = program.buffer(4 * rows * width)
        qkv = program.buffer(4 * rows * (queries + 2 * keys))
        mixed = program.buffer(4 * rows * queries)
        eps = program.keep(np.array([config.rms_eps], np.float32))
        cos, sin = (program.keep(np.ascontiguousarray(table)) for table in rope.tables(config, self._longest))
        parts = program.buffer(self._parts * config.heads * (at.STATE_HEAD + 4 * config.head_dim))
        scratch_stride = -(-max(at.scratch_bytes(config.head_dim, self._group), li.SCRATCH_BYTES) // 64) * 64
        scratch = program.buffer(self._threads * scratch_stride)
        embedding = program.table(packed.embedding.data.ctypes.data, ti.FORMATS[packed.embedding.format], packed.embedding.inputs // 32, x)
        program.add(ro.embed, embedding, PER_ROW)

        def norm(weight: Array, target: int, sampled: bool = False) -> None:
            table = program.table(x, program.keep(weight), width, eps, target, int(sampled))
            program.add(ro.rms_norm, table, PER_SAMPLE if sampled else PER_ROW)

        def linear(
            layer: PackedLinear, source: int, form: int, out: int, epilogue: int, bias: Array | None, target: int = 0, sampled: bool = False
        ) -> None:
            tiles = layer.padded_outputs // ti.TILE
            items = tiles // li.UNIT if epilogue == li.SWIGLU else tiles
            table = program.table(
                layer.data.ctypes.data,
                ti.FORMATS[layer.format],
                layer.inputs // 32,
                items,
                source,
                out,
                4 * layer.padded_outputs,
                epilogue,
                0 if bias is None else program.keep(bias),
                int(sampled),
                target,
                scratch,
                scratch_stride,
            )
            program.add(linear_stage(layer.format, form), table, FIXED if sampled else PER_SHARE, items)

        inputs: dict[tuple[str, int, bool, bool], tuple[int, int]] = {}

        def input_of(layer: PackedLinear, name: str) -> tuple[int, int]:
            """The table and the form of the activations that enter `layer`; layers of the same formats share them."""
            form = ro.PLAIN if self.exact or layer.format in ("float32", "bfloat16") else ro.FINE if name in FINE_INPUTS else ro.COARSE
            # Not that of `down`: it is written while another layer's is read.
            key = (layer.format, layer.inputs, form == ro.FINE, name == "down")
            if key not in inputs:
                inputs[key] = _input(program, layer, form, rows), form
            return inputs[key]

        for index, layer in enumerate(packed.layers):
            source, form = input_of(layer.qkv, "qkv")
            norm(layer.input_norm, source)
            linear(layer.qkv, source, form, qkv, li.KEEP, layer.qkv_bias)
            source, form = input_of(layer.out, "out")
            attention = program.table(
                qkv,
                4 * layer.qkv.padded_outputs,
                config.heads,
                config.kv_heads,
                config.head_dim,
                self._cache[:, index].ctypes.data,
                self._cache.strides[0],
                cos,
                sin,
                mixed,
                4 * queries,
                parts,
                scratch,
                scratch_stride,
                source,
            )
            program.add(kv.store_stage(self._kv_dtype), attention, PER_ROW)
            program.add(at.attend_stage(self._kv_dtype), attention, PER_BLOCK)
            program.add(at.merge, attention, PER_ROW)
            linear(layer.out, source, form, x, li.ADD, layer.out_bias)
            source, form = input_of(layer.gate_up, "gate_up")
            norm(layer.mlp_norm, source)
            target, target_form = input_of(layer.down, "down")
            linear(layer.gate_up, source, form, 0, li.SWIGLU, layer.gate_up_bias, target)
            linear(layer.down, target, target_form, x, li.ADD, layer.down_bias)
        source, form = input_of(packed.head, "head")
        norm(packed.norm, source, sampled=True)
        self._head = len(program.rows)
        linear(packed.head, source, form, self._logits.ctypes.data, li.KEEP, None, sampled=True)
        choosing = -(-scratch_bytes(config.vocab_size) // 64) * 64
        table = program.table(
            self._logits.ctypes.data, 4 * self._vocab_stride, config.vocab_size, program.buffer(self._threads * choosing), choosing
        )
        program.add(choose, table, PER_SAMPLE)


def _work(block: tuple[int, ...]) -> int:
    """Of a block of attention: its rows times its tiles."""
    return block[1] * block[4]


def _input(program: _Program, layer: PackedLinear, form: int, rows: int) -> int:
    """Room for `rows` rows of activations on their way into a layer; the address of the table that describes it."""
    groups = layer.inputs // 32
    rows = -(-rows // BLOCK) * BLOCK
    if form == ro.PLAIN:
        return program.table(form, program.buffer(4 * rows * layer.inputs), 0, 0, 0, groups)
    x = program.buffer(rows * layer.inputs * (2 if form == ro.FINE else 1))
    scale, total = program.buffer(4 * rows * groups), program.buffer(4 * rows * groups)
    return program.table(form, x, scale, total, OFFSETS[layer.format], groups)


def _quarter(items: int) -> int:
    """The largest divisor of at most a quarter, or 1."""
    return max((size for size in range(1, items // 4 + 1) if items % size == 0), default=1)


def _check(packed: PackedModel, block_size: int) -> None:
    config = packed.config
    for what, number, multiple in (
        ("block size", block_size, kv.PAGE),
        ("head size", config.head_dim, 16),
        ("hidden size", config.hidden_size, 32),
        ("size of all heads", config.heads * config.head_dim, 32),
    ):
        if number % multiple:
            raise ModelError(
                f"the CPU kernels expect a {what} that is a multiple of {multiple}, got {number}; --kernels reference takes any"
            )
