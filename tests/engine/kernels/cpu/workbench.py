"""A workbench for one stage: memory it can point to, tables, and the forms that activations, weights and KV pages have in it.

Owns numpy's view of the kernels' layouts, written from their description and not with their code. Knows no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import settings

from engine.kernels.cpu import attention as at
from engine.kernels.cpu import build, kv, rows
from engine.kernels.cpu import linear as li
from engine.kernels.cpu.kv import KV_TYPES, PAGE
from engine.kernels.cpu.linear import linear_stage
from engine.kernels.cpu.rows import COARSE, FINE, PLAIN
from engine.kernels.cpu.stage import CHUNK, COLUMNS, FUNCTION, ITEMS, TABLE, Stage, Team
from engine.kernels.cpu.tiles import FORMATS
from engine.models.llama_cpu import OFFSETS
from engine.weights import blocks
from engine.weights.blocks import Groups
from engine.weights.cache import default_cache_dir, quiet
from engine.weights.packed import PackedLinear

Array = np.ndarray[Any, np.dtype[Any]]

UNHURRIED = settings(deadline=None, max_examples=25)  # the first example may compile
FEW = settings(UNHURRIED, max_examples=10)
INTEGER_FORMATS = ("q4_0", "q4_1", "q8_0")
FLOAT_FORMATS = ("float32", "bfloat16")
FORM_NAMES = {"plain": PLAIN, "coarse": COARSE, "fine": FINE}
STEPS = {COARSE: 127, FINE: 127 * 16 + 7}  # by which a group's largest number is divided
GUARD = 0xA5  # in every byte that no kernel may touch


def have(*stages: Stage) -> None:
    """Have stages in the user's cache of kernels. Those that are asked for together are compiled together, which is quicker."""
    build.prepare(default_cache_dir(), [stage.name for stage in stages], quiet)


@cache
def compiled(stage: Stage) -> Any:
    """The stage's machine code as a Python function of its five integers."""
    have(stage)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(stage.address)


@dataclass(slots=True)
class Memory:
    """Arrays that tables point to. What lies around each is checked: no kernel writes past its end."""

    kept: list[Array] = field(default_factory=list)
    guards: list[Array] = field(default_factory=list)

    def place(self, values: Any, dtype: Any = np.float32) -> Array:
        """A copy at a cache line's start, with guards before and after."""
        given = np.ascontiguousarray(values, dtype)
        room = np.full(given.nbytes + 256, GUARD, np.uint8)
        start = 64 + -room.ctypes.data % 64
        self.kept.append(room)
        self.guards += [room[:start], room[start + given.nbytes :]]
        placed = room[start : start + given.nbytes].view(given.dtype).reshape(given.shape)
        placed[...] = given
        return placed

    def table(self, *fields: int) -> int:
        """An int64 table's address."""
        return int(self.place(fields, np.int64).ctypes.data)

    def step(self, **fields: int | Array) -> int:
        """A step's table: fields by their names in `rows`, arrays by their address."""
        table = [0] * rows.STEP_FIELDS
        for name, value in fields.items():
            table[getattr(rows, name.upper())] = value if isinstance(value, int) else self.place(value, value.dtype).ctypes.data
        return self.table(*table)

    def check(self) -> None:
        assert all((guard == GUARD).all() for guard in self.guards), "something was written outside its array"


def run(stage: Stage, table: int, step: int, items: int, pieces: Sequence[int] = (), thread: int = 0) -> None:
    """Run items 0 .. items - 1 on this thread: in one call, or in calls that end at `pieces` too, the last one first."""
    ends = sorted({0, items, *(piece for piece in pieces if 0 < piece < items)})
    for first, last in reversed(list(pairwise(ends))):
        compiled(stage)(table, step, first, last, thread)


def program(*stages: tuple[int, int, int, int]) -> Array:
    """Rows of (function, table, items, chunk)."""
    made = np.zeros((len(stages), COLUMNS), np.int64)
    made[:, [FUNCTION, TABLE, ITEMS, CHUNK]] = np.array(stages, np.int64).reshape(-1, 4)
    return made


def team_run(team: Team, stage: Stage, table: int, step: int, items: int, chunk: int) -> None:
    """The same on a team's threads; `step` is an address that `Memory.step` gave."""
    compiled(stage)
    fields = np.ctypeslib.as_array(ctypes.cast(step, ctypes.POINTER(ctypes.c_int64)), (rows.STEP_FIELDS,))
    team.run(program((stage.address, table, items, chunk)), fields)


# Activations


class Input:
    """Room for rows on their way into a linear layer."""

    def __init__(self, memory: Memory, form: int, count: int, inputs: int, weights: str) -> None:
        self.form, self.count, self.groups = form, count, inputs // 32
        self.offset = OFFSETS[weights] if form != PLAIN else 0
        padded = -(-count // 16) * 16
        blocks = (padded // 16, self.groups, 16)
        self.scale = self.total = np.empty(0)
        if form == PLAIN:
            self.x = memory.place(np.full((*blocks, 32), np.nan, np.float32))
        else:
            self.x = memory.place(np.full((*blocks, 2, 32) if form == FINE else (*blocks, 32), 77), np.int8)
            eights = (padded // 8, self.groups, 8)
            self.scale = memory.place(np.full(eights, np.nan))
            self.total = memory.place(np.full(eights, 0x7FC00000), np.int32)
        addresses = (each.ctypes.data for each in (self.x, self.scale, self.total))
        self.table = memory.table(form, *addresses, self.offset, self.groups)

    def fill(self, memory: Memory, values: Array) -> Input:
        """Let the kernels put rows float32 [count, inputs] here, as the end of attention does."""
        count, inputs = values.shape
        out = memory.place(values)
        table = [0] * kv.ATTENTION_FIELDS
        table[kv.HEADS], table[kv.HEAD_DIM], table[kv.OUT], table[kv.OUT_STRIDE], table[kv.TARGET] = (
            1,
            inputs,
            out.ctypes.data,
            4 * inputs,
            self.table,
        )
        run(at.merge, memory.table(*table), memory.step(part_rows=np.zeros((count, 2), np.int64)), count)
        return self

    def integers(self) -> Array:
        """int64 [count, groups, 32]: what was quantised."""
        wide = self.x.astype(np.int64)
        made = 16 * wide[:, :, :, 0] + wide[:, :, :, 1] if self.form == FINE else wide
        return made.swapaxes(1, 2).reshape(-1, self.groups, 32)[: self.count]

    def scales(self) -> Array:
        """float64 [count, groups]."""
        return self._rows(self.scale).astype(np.float64)

    def totals(self) -> Array:
        """float32 or int32 [count, groups]."""
        return self._rows(self.total if self.offset else self.total.view(np.float32))

    def _rows(self, eights: Array) -> Array:
        return np.ascontiguousarray(eights.swapaxes(1, 2)).reshape(-1, self.groups)[: self.count]

    def values(self) -> Array:
        """float64 [count, inputs]: what the rows mean."""
        if self.form == PLAIN:
            return self.x.swapaxes(1, 2).reshape(-1, self.groups * 32)[: self.count].astype(np.float64)
        return (self.integers() * self.scales()[..., None]).reshape(self.count, -1)

    def rounding(self, values: Array) -> Array:
        """How far each of float64 [count, inputs] may be from what stands for it here."""
        if self.form == PLAIN:
            return np.abs(values) * 1e-7
        peaks = np.abs(values).reshape(self.count, self.groups, 32).max(-1, keepdims=True)
        return np.broadcast_to(peaks * (0.5 / STEPS[self.form] + 4e-7) + 1e-30, (self.count, self.groups, 32)).reshape(values.shape)


# Weights


def weights(kind: str, outputs: int, inputs: int, random: np.random.Generator, spread: float = 1.0) -> PackedLinear:
    """Random weights of one format, some of whose groups are all zero; `spread`: how many powers of two their scales span."""
    padded = -(-outputs // 16) * 16
    if kind in FLOAT_FORMATS:
        values = random.standard_normal((padded, inputs), np.float32) * np.exp2(random.uniform(-spread, 0, (padded, 1))).astype(np.float32)
        values[random.random(padded) < 0.1] = 0
        values[outputs:] = 0
        packed = blocks.tiles(blocks.to_bfloat16(values) if kind == "bfloat16" else values)
    else:
        groups = (padded, inputs // 32)
        size = 32 if kind == "q8_0" else 16
        quants = random.integers(0, 256, (*groups, size), np.uint8)
        scales = (random.choice([-1, 1], groups) * 0.01 * np.exp2(random.uniform(-spread, 0, groups))).astype(np.float16)
        scales[random.random(groups) < 0.1] = 0
        minima = (random.standard_normal(groups) * 0.05).astype(np.float16)
        minima[random.random(groups) < 0.1] = 0
        made = Groups(kind, quants[:outputs], scales[:outputs], minima[:outputs] if kind == "q4_1" else None)
        packed = blocks.tiles(made.padded(padded))
    return PackedLinear(kind, outputs, padded, inputs, packed.reshape(-1))


class Linear:
    """One linear layer over some rows."""

    def __init__(
        self,
        memory: Memory,
        layer: PackedLinear,
        source: Input,
        epilogue: int = li.KEEP,
        bias: Array | None = None,
        before: Array | None = None,
        target: Input | None = None,
        sampled: bool = False,
        shares: int = 1,
        threads: int = 1,
    ) -> None:
        """bias: float32 [padded outputs]; before: what the outputs hold already, float32 [rows, padded outputs]."""
        self.stage = linear_stage(layer.format, source.form)
        self.count = source.count
        shape = (self.count, layer.padded_outputs)
        self.out = memory.place(np.full(shape, np.nan) if before is None else before)
        stride = li.SCRATCH_BYTES
        scratch = memory.place(np.full(threads * stride // 4, np.nan))
        self.table = memory.table(
            memory.place(layer.data, np.uint8).ctypes.data,
            FORMATS[layer.format],
            layer.inputs // 32,
            layer.padded_outputs // (64 if epilogue == li.SWIGLU else 16),
            source.table,
            0 if epilogue == li.SWIGLU else self.out.ctypes.data,
            4 * layer.padded_outputs,
            epilogue,
            0 if bias is None else memory.place(bias).ctypes.data,
            int(sampled),
            target.table if target else 0,
            scratch.ctypes.data,
            stride,
        )
        self.items = layer.padded_outputs // (64 if epilogue == li.SWIGLU else 16) * shares
        self.step = memory.step(samples=self.count) if sampled else memory.step(rows=self.count, shares=shares)

    def run(self, pieces: Sequence[int] = (), thread: int = 0) -> Array:
        run(self.stage, self.table, self.step, self.items, pieces, thread)
        return self.out


def product(kind: str, form: int, layer: PackedLinear, x: Array, pieces: Sequence[int] = (), shares: int = 1) -> Array:
    """float32 [rows, padded outputs]: x float32 [rows, inputs] through a layer by the kernels."""
    memory = Memory()
    out = Linear(memory, layer, Input(memory, form, len(x), layer.inputs, kind).fill(memory, x), shares=shares).run(pieces)
    memory.check()
    return out


def activations(random: np.random.Generator, count: int, inputs: int, kind: str) -> Array:
    """float32 [count, inputs] of a kind: "normal", "peaked" (one number outshines its group), "large" (far beyond float16), "tiny",
    "mixed" (each group of its own size, some all zero)."""
    x = random.standard_normal((count, inputs))
    groups = (count, inputs // 32, 1)
    if kind == "peaked":
        x[:, :: 32 + 1] *= 1000
    elif kind == "large":
        x *= 1e12
    elif kind == "tiny":
        x *= 1e-20
    elif kind == "mixed":
        sizes = 10.0 ** random.integers(-10, 10, groups) * (random.random(groups) < 0.8)
        x = (x.reshape(count, -1, 32) * sizes).reshape(count, inputs)
    return x.astype(np.float32)


ACTIVATIONS = ("normal", "peaked", "large", "tiny", "mixed")


# Pages


def blank_pages(kind: str, pages: int, kv_heads: int, head_dim: int) -> Array:
    """uint8 [pages, kv_heads, bytes of a head]: NaN wherever a type has one."""
    size = kv.page_bytes(KV_TYPES[kind], kv_heads, head_dim) // kv_heads
    made = np.full((pages, kv_heads, size), 0xFF, np.uint8)
    if kind == "int8":
        made[..., : 2 * PAGE * head_dim] = 0x81  # scales are NaN still
    return made


def page_views(kind: str, pages: Array, head_dim: int) -> tuple[Array, Array, Array | None]:
    """Keys [pages, kv_heads, head_dim, 16], values [pages, kv_heads, 16, head_dim] as they lie, scales float32 [.., 2, 16] of int8."""
    dtype = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[kind]
    half = PAGE * head_dim * np.dtype(dtype).itemsize
    shape = pages.shape[:2]
    keys = pages[..., :half].view(dtype).reshape(*shape, head_dim, PAGE)
    values = pages[..., half : 2 * half].view(dtype).reshape(*shape, PAGE, head_dim)
    scales = pages[..., 2 * half :].view(np.float32).reshape(*shape, 2, PAGE) if kind == "int8" else None
    return keys, values, scales


def stored(kind: str, pages: Array, head_dim: int) -> tuple[Array, Array]:
    """float64 [pages * 16, kv_heads, head_dim] twice: the keys and values that pages hold, by slot."""
    keys, values, scales = page_views(kind, pages, head_dim)
    if kind == "bfloat16":
        keys, values = blocks.from_bfloat16(keys), blocks.from_bfloat16(values)
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    if scales is not None:
        keys = keys * scales[:, :, 0, None, :]
        values = values * scales[:, :, 1, :, None]
    by_slot = (keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3))
    heads = pages.shape[1]
    first, second = (np.ascontiguousarray(each).reshape(-1, heads, head_dim) for each in by_slot)
    return first, second
