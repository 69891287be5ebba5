"""The decoder of compiled stages against plain torch on the same weights, and against itself, bit for bit."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.core import ModelError, RopeScaling, SamplingParams, Sequence
from engine.kernels.cpu import build
from engine.models.llama_cpu import CpuLlama
from engine.weights import blocks
from engine.weights.cache import default_cache_dir
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import convert
from engine.weights.packed import PackedLinear, PackedModel, prepare_packed
from tests.engine import tiny
from tests.engine.stepping import SIZE, Array, Reference, Run, batch, logits

Kind = GGMLQuantizationType
ROOT = Path(__file__).resolve().parents[3]
UNHURRIED = settings(deadline=None, max_examples=20)

LENGTH = 280  # tokens of the longest sequence: three of attention's tiles, the last one not full
BLOCKS = 200

# What every model below is made of beyond the smallest.
WIDE = tiny.config(hidden_size=64, intermediate_size=96, context_length=512)


def gguf(kind: Kind, config: Any = WIDE, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: tiny.write_gguf(folder / "m.gguf", config, kind=kind, **options)


def folder(dtype: torch.dtype, config: Any = WIDE) -> Callable[[Path], Path]:
    def write(parent: Path) -> Path:
        made = tiny.write_folder(parent / "m", config)
        tensors = load_file(made / "model.safetensors")
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, made / "model.safetensors", {"format": "pt"})
        return made

    return write


changed = partial(dataclasses.replace, WIDE)
LONGROPE = RopeScaling("longrope", original_context=64, short_factor=(1.0,) * 16, long_factor=tuple(1 + i / 8 for i in range(16)))
BIASED = changed(head_dim=64, heads=4, kv_heads=1, attention_bias=True, mlp_bias=True, tied_head=False)
ODD = changed(intermediate_size=24, heads=6, kv_heads=6, layers=3, tied_head=False)  # 24: no multiple of 32
SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Q4_1": (gguf(Kind.Q4_1, changed(head_dim=64, heads=4, kv_heads=1)), "auto"),
    "Q4_0": (gguf(Kind.Q4_0, changed(head_dim=32), kinds={"embed_tokens": Kind.Q5_1, "down_proj": Kind.Q4_1}), "auto"),
    "Q8_0": (gguf(Kind.Q8_0, changed(tied_head=False, heads=2, kv_heads=2)), "auto"),
    "Q5_1": (gguf(Kind.Q5_1), "auto"),
    "several kinds": (gguf(Kind.Q4_1, kinds={"v_proj": Kind.Q8_0, "embed_tokens": Kind.F16, "down_proj": Kind.Q4_0}), "auto"),
    "float32": (folder(torch.float32, dataclasses.replace(BIASED, rope_scaling=RopeScaling("yarn", 4.0, 128))), "auto"),
    "bfloat16": (folder(torch.bfloat16, changed(head_dim=32, rope_scaling=LONGROPE)), "auto"),
    "float16": (folder(torch.float16, dataclasses.replace(ODD, rope_scaling=RopeScaling("llama3", 8.0, 128))), "auto"),
    "square": (folder(torch.float32, changed(intermediate_size=32)), "auto"),  # as many inputs of down as of gate and up
    "square, padded": (folder(torch.float32, changed(intermediate_size=20)), "auto"),
    "square Q4_1": (gguf(Kind.Q4_1, changed(intermediate_size=32)), "auto"),
    "float32 as int8": (folder(torch.float32, BIASED), "int8"),
    "odd, as int8": (folder(torch.float32, ODD), "int8"),
    "float32 as bfloat16": (folder(torch.float32), "bfloat16"),
    "Q4_0 as float32": (gguf(Kind.Q4_0), "float32"),
}


def make(source: Callable[[Path], Path], weights: str, parent: Path) -> PackedModel:
    target = parent / "converted" / "m"
    target.mkdir(parents=True)
    convert(source(parent), target, "tiny", lambda done: None)
    return prepare_packed(Checkpoint(target), weights)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PackedModel]:
    made: dict[str, PackedModel] = {}

    def get(name: str) -> PackedModel:
        if name not in made:
            made[name] = make(*SOURCES[name], tmp_path_factory.mktemp("packed"))
        return made[name]

    return get


@pytest.fixture(autouse=True, scope="module")
def _others_may_compute() -> Iterator[None]:
    """The engine threads of other tests are let in when these are done."""
    yield
    from engine.kernels.cpu.stage import Team

    Team(1).close()


def new(model: PackedModel, **options: Any) -> CpuLlama:
    defaults = {"cache_dir": default_cache_dir(), "blocks": BLOCKS, "block_size": SIZE, "max_rows": 512, "max_samples": 512}
    return CpuLlama(model, **(defaults | options))


def some_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(300), k=count)


def some_tables(lengths: list[int], seed: int = 0) -> list[Array]:
    """Block tables for sequences of these lengths, in no order at all."""
    free = list(range(BLOCKS))
    random.Random(seed).shuffle(free)
    return [np.array([free.pop() for _ in range(-(-length // SIZE))], np.int64) for length in lengths]


def errors(got: Array, wanted: Array) -> Array:
    """Each row's largest error, as part of what lies between its largest and its smallest logit."""
    return np.abs(got - wanted).max(1) / (wanted.max(1) - wanted.min(1))


# Against the reference

# The largest error that is let through: for exact activations, by what the KV cache holds (a key on the edge between two int8 values may go
# to either; with bfloat16, queries and softmax weights are rounded too), and for int8 activations (a 4-bit model's own arithmetic).
EXACT, COARSE = {"float32": 1e-4, "bfloat16": 0.03, "int8": 5e-3}, 0.1


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", SOURCES)
def test_logits_are_those_of_the_reference(packed: Callable[[str], PackedModel], name: str, kv_dtype: str) -> None:
    """Every format, head size and grouping; in chunks, then token by token, across attention's tiles."""
    model = packed(name)
    ids = some_ids(170)
    (table,) = some_tables([len(ids)])
    cuts = [30, 31, 130, *range(160, 170)]
    wanted = logits(Reference(model, BLOCKS, kv_dtype), ids, table)
    exact = logits(new(model, kv_dtype=kv_dtype, exact=True), ids, table, cuts)
    off = errors(exact, wanted)
    assert off.max() < EXACT[kv_dtype]
    assert np.median(off) < EXACT[kv_dtype] / 5
    default = logits(new(model, kv_dtype=kv_dtype), ids, table, cuts)
    assert errors(default, wanted).max() < COARSE
    if kv_dtype == "float32":
        assert (exact.argmax(1) == wanted.argmax(1)).all(), "the same greedy tokens"


def test_scores_below_minus_50000(packed: Callable[[str], PackedModel]) -> None:
    """E13: no finite stand-in for minus infinity gets in their way."""
    model = with_larger_queries(packed("float32 as bfloat16"), 3000.0)
    ids = some_ids(140)
    (table,) = some_tables([len(ids)])
    wanted = logits(Reference(model, BLOCKS), ids, table)
    got = logits(new(model, kv_dtype="float32"), ids, table, [7, 100, 139])
    # Attention as hard as this takes one position or another by a hair: most rows see none that close.
    assert np.median(errors(got, wanted)) < 1e-3
    assert np.isfinite(got).all()


def with_larger_queries(model: PackedModel, factor: float) -> PackedModel:
    def larger(linear: PackedLinear) -> PackedLinear:
        rows = blocks.untiled(linear.format, linear.data, linear.inputs).copy()
        rows[: model.config.heads * model.config.head_dim] *= factor
        return as_float32(linear, rows)

    return dataclasses.replace(model, layers=[dataclasses.replace(layer, qkv=larger(layer.qkv)) for layer in model.layers])


def as_float32(linear: PackedLinear, rows: Array) -> PackedLinear:
    tiles = blocks.tiles(rows).ravel()
    data = np.empty(tiles.size + 64, np.uint8)
    data = data[-data.ctypes.data % 64 :][: tiles.size]
    data[:] = tiles
    return dataclasses.replace(linear, format="float32", data=data)


# Bit for bit


INVARIANT: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("Q4_1", {}),
    "exact": ("Q4_1", {"kv_dtype": "float32", "exact": True}),
    "int8 throughout": ("float32 as int8", {"kv_dtype": "int8"}),
    "Q4_0": ("Q4_0", {"kv_dtype": "int8"}),
    "float32": ("float32", {"kv_dtype": "float32"}),
    "bfloat16": ("bfloat16", {}),
}
IDS = some_ids(LENGTH, 1)


@dataclasses.dataclass(slots=True)
class Case:
    """A decoder, what makes another of its kind, and what IDS give when nothing else was ever run."""

    decoder: CpuLlama
    another_of: Callable[..., CpuLlama]
    alone: Array


@pytest.fixture(scope="module", params=INVARIANT)
def case(request: pytest.FixtureRequest, packed: Callable[[str], PackedModel]) -> Case:
    name, options = INVARIANT[request.param]
    model, another_of = packed(name), partial(new, **options)
    return Case(another_of(model), another_of, logits(another_of(model), IDS, np.arange(BLOCKS)))


@UNHURRIED
@given(cuts=st.sets(st.integers(1, LENGTH - 1)) | st.integers(1, 130).map(lambda size: set(range(size, LENGTH, size))), seed=st.integers())
def test_any_chunking_gives_the_same_bits(case: Case, cuts: set[int], seed: int) -> None:
    """E12: whole, by ones, or by pieces of any sizes, in blocks anywhere; whatever the blocks held before."""
    (table,) = some_tables([LENGTH], seed)
    np.testing.assert_array_equal(logits(case.decoder, IDS, table, cuts), case.alone)


def test_every_hit_length_gives_the_same_bits(case: Case) -> None:
    """E18: what runs on KV that was there before, at every length of it, not only at block edges."""
    for hit in range(1, LENGTH):
        first, table = some_tables([LENGTH, LENGTH], hit)
        shared = hit // SIZE  # full blocks, which two sequences may have in common; the rest is the second one's own
        case.decoder.forward(batch([Run(IDS[:hit], 0, first)], every=False))
        table = np.concatenate([first[:shared], table[shared:]])
        if hit % SIZE:
            case.decoder.forward(batch([Run(IDS[shared * SIZE : hit], shared * SIZE, table)], every=False))
        got = case.decoder.forward(batch([Run(IDS[hit:], hit, table)]))
        np.testing.assert_array_equal(got, case.alone[hit:])


@UNHURRIED
@given(seed=st.integers(0, 2**32))
def test_company_changes_no_bits(case: Case, seed: int) -> None:
    """E12: among eight others of any length, each at its own pace, in the same steps or in others."""
    chance = random.Random(seed)
    lengths = [LENGTH, *(chance.randrange(1, LENGTH) for _ in range(8))]
    tables = some_tables(lengths, seed)
    ids = [IDS[:length] if chance.random() < 0.5 else some_ids(length, chance.randrange(99)) for length in lengths]
    ids[0] = IDS
    done = [0] * len(lengths)
    pace = [chance.choice((1, 3, 30, LENGTH)) if at else chance.choice((10, 30, LENGTH)) for at in range(len(lengths))]
    parts = []
    while done[0] < LENGTH:
        runs, mine, room = [], None, 512
        for at in chance.sample(range(len(lengths)), chance.randrange(1, len(lengths) + 1)):
            count = min(room, lengths[at] - done[at], chance.randint(1, pace[at]))
            if count:
                if at == 0:
                    mine = sum(len(run.tokens) for run in runs), count
                runs.append(Run(ids[at][done[at] : done[at] + count], done[at], tables[at]))
                done[at] += count
                room -= count
        if runs:
            got = case.decoder.forward(batch(runs))
            if mine:
                parts.append(got[mine[0] : sum(mine)].copy())
    np.testing.assert_array_equal(np.concatenate(parts), case.alone)


def test_another_start_and_another_number_of_threads_give_the_same_bits(case: Case) -> None:
    """E12: after a restart, alone and in a crowd of lone rows, where the threads share the work in other ways."""
    tables = some_tables([LENGTH] * 9, 3)
    for threads in (1, 2):
        decoder = case.another_of(case.decoder.packed, threads=threads)
        np.testing.assert_array_equal(logits(decoder, IDS, tables[0], [5, 271]), case.alone)
        for table in tables[1:]:
            decoder.forward(batch([Run(IDS[:-1], 0, table)], every=False))
        got = decoder.forward(batch([Run(IDS[-1:], LENGTH - 1, table) for table in tables]))
        np.testing.assert_array_equal(got, np.repeat(case.alone[-1:], 9, axis=0))


POISON = 299  # a token whose embedding is no number


@pytest.fixture
def poisonable(case: Case) -> CpuLlama:
    return case.another_of(poisoned(case.decoder.packed, POISON))


CLEAN = [7 if id == POISON else id for id in IDS]
BAD = [*CLEAN[:41], POISON, *CLEAN[42:]]


def test_what_is_not_a_number_stays_in_its_sequence(poisonable: CpuLlama) -> None:
    """E13: beside others in a step, in blocks that others get later, and in the choice of a token."""
    mine, theirs = some_tables([LENGTH, LENGTH])
    alone = logits(poisonable, CLEAN, mine)
    assert np.isfinite(alone).all()
    greedy = SamplingParams(max_tokens=1, temperature=0)
    for start, stop in pairwise([0, 30, 41, 42, 200, LENGTH]):
        step = batch([Run(BAD[start:stop], start, theirs), Run(CLEAN[start:stop], start, mine)])
        got = poisonable.forward(step)
        np.testing.assert_array_equal(got[stop - start :], alone[start:stop])
        if stop <= 41:
            np.testing.assert_array_equal(got[: stop - start], alone[start:stop])
        if start == 41:
            assert np.isnan(got[0]).any(), "a broken row is seen in its logits"
            sequences = [Sequence(0, b"", BAD[:42], greedy), Sequence(1, b"", CLEAN[:42], greedy)]
            assert poisonable.choose(step, sequences) == [-1, int(alone[41].argmax())]
    np.testing.assert_array_equal(logits(poisonable, CLEAN, theirs, [20, 21, 139]), alone, "blocks that held NaN")


def test_rows_after_what_is_not_a_number_are_none_either(poisonable: CpuLlama) -> None:
    """E13: no finite stand-in for it is attended to."""
    (table,) = some_tables([LENGTH])
    assert np.isnan(logits(poisonable, BAD, table, [41, 42, 200])[41:]).any(1).all()


def test_rows_before_what_is_not_a_number_have_the_same_bits(poisonable: CpuLlama) -> None:
    """E13 in one step: their KV is cached, for other prompts that begin as this one does."""
    (table,) = some_tables([LENGTH])
    alone = logits(poisonable, CLEAN, table)
    np.testing.assert_array_equal(logits(poisonable, BAD, table)[:41], alone[:41])


def poisoned(model: PackedModel, token: int) -> PackedModel:
    """The same with an embedding that is no number; the head keeps the one it was."""
    rows = blocks.untiled(model.embedding.format, model.embedding.data, model.embedding.inputs).copy()
    rows[token] = np.nan
    return dataclasses.replace(model, embedding=as_float32(model.embedding, rows))


# What it refuses


def test_shapes_that_the_kernels_do_not_take(packed: Callable[[str], PackedModel], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="block size that is a multiple of 16, got 8"):
        new(packed("Q4_1"), block_size=8)
    three_heads = make(folder(torch.float32, tiny.config(heads=3, kv_heads=3)), "auto", tmp_path)
    with pytest.raises(ModelError, match="size of all heads that is a multiple of 32, got 48"):
        new(three_heads)


# Compiled code from several times


COMPARE = """
import sys
from pathlib import Path
import numpy as np
from engine.weights.checkpoint import Checkpoint
from engine.weights.packed import prepare_packed
from tests.engine.models.test_llama_cpu import BLOCKS, Reference, errors, logits, new, some_ids

ids = some_ids(20)
for folder in sys.argv[2:]:
    model = prepare_packed(Checkpoint(Path(folder)))
    decoder = new(model, cache_dir=Path(sys.argv[1]), exact=True, kv_dtype="float32")
    wanted = logits(Reference(model, BLOCKS), ids, np.arange(BLOCKS))
    print(errors(logits(decoder, ids, np.arange(BLOCKS)), wanted).max())
"""


@pytest.mark.slow
def test_stages_that_were_compiled_apart_work_together(tmp_path: Path) -> None:
    """A second model that needs one more stage, in the same cache: each decoder runs its own code."""
    models = {name: make(*SOURCES[name], tmp_path / name) for name in ("Q4_1", "Q8_0")}
    for model in models.values():
        new(model, exact=True, kv_dtype="float32")
    home = build.folder(default_cache_dir())
    copy = shutil.copytree(home, tmp_path / "cache" / "kernels" / home.name)
    for stage in ("linear_q4_1_plain", "linear_q8_0_plain"):
        for file in (copy / f"{stage}.done", *copy.rglob(f"linear.{stage}-*")):
            file.unlink()
    folders = [str(tmp_path / name / "converted" / "m") for name in models]
    command = [sys.executable, "-c", COMPARE, str(tmp_path / "cache"), *folders]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert [float(line) < EXACT["float32"] for line in said.stdout.split()] == [True, True], said
