"""A step's attention on made-up pages: what the kernels give for it, and what the reference gives in float64.

Owns the pages, shuffled, with NaN wherever no row may look. Knows no test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.kernels import reference
from engine.kernels.batch import Span
from engine.kernels.cpu import attention as at
from engine.kernels.cpu import kv
from engine.kernels.cpu.kv import PAGE
from engine.kernels.cpu.rows import PLAIN
from engine.kernels.cpu.strips import SPAN
from engine.weights import blocks
from tests.engine.kernels.cpu.workbench import Array, Input, Memory, blank_pages, page_views, run, stored

PARTS = 64


@dataclass(slots=True, frozen=True)
class Shape:
    kind: str
    head_dim: int
    group: int
    kv_heads: int = 2
    block_size: int = 16

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def block_rows(self) -> int:
        """The most rows that a block has room for."""
        return max(1, at.QUERIES // self.group)


# How a span's rows are cut: from (rows, the most rows of a block) to the blocks' sizes.
Cut = Callable[[int, int], Sequence[int]]


def whole(count: int, most: int) -> list[int]:
    """As few blocks as there can be."""
    return [min(most, count - start) for start in range(0, count, most)]


def lone(count: int, most: int) -> list[int]:
    """Each row by itself."""
    return [1] * count


@dataclass(slots=True)
class Case:
    """Sequences of `spans` (context, rows), each row's query, and the pages with keys and values of every context."""

    shape: Shape
    spans: list[Span]
    queries: Array  # float32 [rows, heads, head_dim]
    pages: Array  # uint8, as `blank_pages`

    @classmethod
    def make(cls, shape: Shape, sizes: Sequence[tuple[int, int]], seed: int = 0) -> Case:
        """sizes: (context, rows) of each sequence."""
        random = np.random.default_rng(seed)
        counts = [-(-context // shape.block_size) for context, _ in sizes]
        pool = sum(counts) + 3  # with blocks that are nobody's
        ids = random.permutation(pool)
        spans, row = [], 0
        for (context, rows), count in zip(sizes, counts, strict=True):
            table, ids = ids[:count], ids[count:]
            spans.append(Span(row, rows, context, np.ascontiguousarray(table, np.int64)))
            row += rows
        queries = random.standard_normal((row, shape.heads, shape.head_dim), np.float32)
        case = cls(shape, spans, queries, blank_pages(shape.kind, pool * shape.block_size // PAGE, shape.kv_heads, shape.head_dim))
        for span in spans:
            for part in (0, 1):
                case.put(part, span, random.standard_normal((span.context, shape.kv_heads, shape.head_dim), np.float32))
        return case

    def slots(self, span: Span) -> Array:
        size = self.shape.block_size
        positions = np.arange(span.context)
        return span.table[positions // size] * size + positions % size

    def put(self, part: int, span: Span, numbers: Array) -> None:
        """Store float32 [context, kv_heads, head_dim] as the keys (0) or values (1) of a span's sequence."""
        views = page_views(self.shape.kind, self.pages, self.shape.head_dim)
        slots = self.slots(span)
        if self.shape.kind == "bfloat16":
            numbers = np.where(np.isnan(numbers), 0x7FC0, blocks.to_bfloat16(np.nan_to_num(numbers)))
        elif self.shape.kind == "int8":
            scales = np.abs(numbers).max(-1) / np.float32(127)
            numbers = np.rint(numbers / np.where(scales == 0, 1, scales)[..., None])
            assert views[2] is not None
            views[2][slots // PAGE, :, part, slots % PAGE] = scales
        if part:
            views[1][slots // PAGE, :, slots % PAGE] = numbers
        else:
            views[0][slots // PAGE, :, :, slots % PAGE] = numbers

    def moved(self, block_size: int, seed: int, garbage: int | None = None) -> Case:
        """The same sequences in blocks of another size, shuffled anew. garbage: the byte that unread places hold, instead of NaN."""
        moved = Case.make(replace(self.shape, block_size=block_size), [(span.context, span.rows) for span in self.spans], seed)
        if garbage is None:
            moved.pages[...] = blank_pages(self.shape.kind, len(moved.pages), self.shape.kv_heads, self.shape.head_dim)
        else:
            moved.pages[...] = garbage
        moved.queries = self.queries
        mine, theirs = (page_views(case.shape.kind, case.pages, case.shape.head_dim) for case in (self, moved))
        for old, new in zip(self.spans, moved.spans, strict=True):
            (page, at_), (new_page, new_at) = (divmod(case.slots(span), PAGE) for case, span in ((self, old), (moved, new)))
            theirs[0][new_page, :, :, new_at] = mine[0][page, :, :, at_]
            theirs[1][new_page, :, new_at] = mine[1][page, :, at_]
            if mine[2] is not None and theirs[2] is not None:
                theirs[2][new_page, :, :, new_at] = mine[2][page, :, :, at_]
        return moved

    def only(self, index: int, first: int = 0, rows: int | None = None) -> Case:
        """Rows first .. first + rows - 1 of one span, as a step of their own: what a smaller chunk would have been."""
        span = self.spans[index]
        rows = span.rows - first if rows is None else rows
        start = span.first + first
        context = span.context - span.rows + first + rows
        return Case(self.shape, [Span(0, rows, context, span.table)], self.queries[start : start + rows], self.pages)

    def expected(self) -> Array:
        """float64 [rows, heads, head_dim]: the reference's, on the numbers as stored, and on queries as they are multiplied."""
        size = self.shape.block_size
        cache = [torch.from_numpy(each).unflatten(0, (-1, size)) for each in stored(self.shape.kind, self.pages, self.shape.head_dim)]
        queries = self.queries.astype(np.float64)
        if self.shape.kind == "bfloat16":
            factor = np.float32(1 / np.sqrt(np.float32(self.shape.head_dim)))
            scaled = np.nan_to_num(self.queries * factor)
            rounded = blocks.from_bfloat16(blocks.to_bfloat16(scaled)).astype(np.float64) / factor
            queries = np.where(np.isnan(self.queries), np.nan, rounded)
        return reference.paged_attention(torch.from_numpy(queries), torch.stack(cache), self.spans).numpy()

    def run(self, cut: Cut = whole, split: bool = False, pieces: Sequence[int] = (), thread: int = 0) -> Array:
        """float32 [rows, heads, head_dim]: the kernels'. split: lone rows go through their tiles in parts, to be merged."""
        memory, shape = Memory(), self.shape
        count, width = len(self.queries), shape.heads * shape.head_dim
        part_rows = np.zeros((count, 2), np.int64)
        listed: list[tuple[int, ...]] = []
        parts = 0
        for span in self.spans:
            pages = self._pages(memory, span)
            row = 0
            for rows in cut(span.rows, shape.block_rows):
                tiles = -(-(span.context - span.rows + row + rows) // SPAN)
                if split and rows == 1 and 1 < tiles <= PARTS - parts:
                    part_rows[span.first + row] = parts, tiles
                    listed += [(span.first + row, 1, pages, tile, 1, parts + tile) for tile in range(tiles)]
                    parts += tiles
                else:
                    listed.append((span.first + row, rows, pages, 0, tiles, -1))
                row += rows
        qkv = np.full((count, shape.heads + 2 * shape.kv_heads, shape.head_dim), np.nan, np.float32)
        qkv[:, : shape.heads] = self.queries
        stride = at.scratch_bytes(shape.head_dim, shape.group)
        target = Input(memory, PLAIN, count, width, "float32")
        table = [0] * kv.ATTENTION_FIELDS
        table[kv.QKV], table[kv.QKV_STRIDE] = memory.place(qkv).ctypes.data, 4 * (width + 2 * shape.kv_heads * shape.head_dim)
        table[kv.HEADS], table[kv.KV_HEADS], table[kv.HEAD_DIM] = shape.heads, shape.kv_heads, shape.head_dim
        table[kv.CACHE] = memory.place(self.pages, np.uint8).ctypes.data
        table[kv.PAGE_STRIDE] = kv.page_bytes(kv.KV_TYPES[shape.kind], shape.kv_heads, shape.head_dim)
        table[kv.OUT], table[kv.OUT_STRIDE] = memory.place(np.full((count, width), np.nan)).ctypes.data, 4 * width
        state = at.STATE_HEAD // 4 + shape.head_dim
        table[kv.PARTS] = memory.place(np.full((parts, shape.heads, state), np.nan)).ctypes.data
        table[kv.SCRATCH] = memory.place(np.full((thread + 1) * stride // 4, np.nan)).ctypes.data
        table[kv.SCRATCH_STRIDE], table[kv.TARGET] = stride, target.table
        starts = np.array([span.context - span.rows for span in self.spans])
        positions = np.concatenate([start + np.arange(span.rows) for start, span in zip(starts, self.spans, strict=True)])
        step = memory.step(rows=count, positions=positions, blocks=np.array(listed, np.int64), part_rows=part_rows)
        address = memory.table(*table)
        run(at.attend_stage(shape.kind), address, step, len(listed) * shape.kv_heads, pieces, thread)
        run(at.merge, address, step, count, pieces, thread)
        memory.check()
        return target.values().astype(np.float32).reshape(count, shape.heads, shape.head_dim)

    def _pages(self, memory: Memory, span: Span) -> int:
        per_block = self.shape.block_size // PAGE
        pages = (span.table[:, None] * per_block + np.arange(per_block)).ravel()
        return int(memory.place(pages, np.int64).ctypes.data)
