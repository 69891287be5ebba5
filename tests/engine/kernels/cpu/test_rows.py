"""What happens to rows one at a time: quantising, norms and embedding, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cpu import rows
from engine.kernels.cpu.rows import COARSE, FINE, PLAIN
from engine.kernels.cpu.tiles import FORMATS
from engine.weights.packed import PackedLinear
from tests.engine.kernels.cpu.workbench import (
    ACTIVATIONS,
    FEW,
    FLOAT_FORMATS,
    FORM_NAMES,
    INTEGER_FORMATS,
    STEPS,
    UNHURRIED,
    Array,
    Input,
    Memory,
    activations,
    run,
    weights,
)

each_form = pytest.mark.parametrize("form", FORM_NAMES.values(), ids=FORM_NAMES)
row_counts = st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33])
sizes = st.sampled_from([32, 64, 96, 160, 576, 1536])
seeds = st.integers(0, 2**32)


# Quantising


@pytest.mark.parametrize("kind", INTEGER_FORMATS)
@each_form
@UNHURRIED
@given(row_counts, sizes, st.sampled_from(ACTIVATIONS), seeds)
def test_rows_are_rounded_to_the_nearest_step_of_their_group(kind: str, form: int, count: int, inputs: int, what: str, seed: int) -> None:
    """With the integers' sum beside them as the weights' format wants it; bytes around the rows stay as they were."""
    memory, x = Memory(), activations(np.random.default_rng(seed), count, inputs, what)
    made = Input(memory, form, count, inputs, kind)
    padded = -(-count // 16) * 16
    untouched = made.x.swapaxes(1, 2).reshape(padded, -1)[count:].copy()
    made.fill(memory, x)
    memory.check()
    np.testing.assert_array_equal(made.x.swapaxes(1, 2).reshape(padded, -1)[count:], untouched)
    if form == PLAIN:
        np.testing.assert_array_equal(made.values(), x)
        return
    assert (np.abs(made.values() - x) <= made.rounding(x.astype(np.float64))).all()
    groups = made.integers()
    largest = np.abs(groups).max(-1)
    sized = np.abs(x).reshape(count, -1, 32).max(-1) > 1e-30
    assert (largest[sized] == STEPS[form]).all(), "the whole range is used"
    assert not groups[~sized].any()
    assert not made.scales()[~sized].any()
    if made.offset:
        np.testing.assert_array_equal(made.totals(), made.offset * groups.sum(-1))
    else:
        np.testing.assert_array_equal(made.totals(), made.scales().astype(np.float32) * groups.sum(-1).astype(np.float32))


@pytest.mark.parametrize("form", [COARSE, FINE])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 9e-31])
def test_a_group_of_next_to_nothing_is_zero(form: int, size: float) -> None:
    memory = Memory()
    made = Input(memory, form, 2, 64, "q4_1").fill(memory, np.full((2, 64), size, np.float32))
    assert not made.values().any()
    assert not made.totals().any()


@pytest.mark.parametrize("form", [COARSE, FINE])
@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf], ids=str)
def test_a_group_with_no_number_has_no_scale(form: int, broken: float) -> None:
    """At each of its places; the groups and rows beside it know nothing of it."""
    for at in (0, 15, 16, 31):
        memory, x = Memory(), activations(np.random.default_rng(at), 3, 96, "normal")
        sound = Input(memory, form, 3, 96, "q4_1").fill(memory, x)
        x[1, 32 + at] = broken
        made = Input(memory, form, 3, 96, "q4_1").fill(memory, x)
        assert not np.isfinite(made.scales()[1, 1])
        others = np.ones((3, 3), bool)
        others[1, 1] = False
        np.testing.assert_array_equal(made.integers()[others], sound.integers()[others])
        np.testing.assert_array_equal(made.scales()[others], sound.scales()[others])
        np.testing.assert_array_equal(made.totals()[others], sound.totals()[others])


# Norms


def normed(form: int, x: Array, weight: Array, eps: float, samples: Array | None = None, pieces: tuple[int, ...] = ()) -> Input:
    memory = Memory()
    count = len(x) if samples is None else len(samples)
    made = Input(memory, form, count, x.shape[1], "q4_1")
    table = memory.table(
        memory.place(x).ctypes.data,
        memory.place(weight).ctypes.data,
        x.shape[1],
        memory.place([eps]).ctypes.data,
        made.table,
        int(samples is not None),
    )
    run(rows.rms_norm, table, memory.step(sample_rows=np.zeros(0, np.int64) if samples is None else samples), count, pieces)
    memory.check()
    return made


@each_form
@UNHURRIED
@given(row_counts, sizes, st.sampled_from(["normal", "peaked", "large", "tiny", "zero"]), st.sampled_from([1e-6, 1e-5, 1e-3]), seeds)
def test_norms_are_those_of_float64(form: int, count: int, size: int, what: str, eps: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = np.zeros((count, size), np.float32) if what == "zero" else activations(random, count, size, what)
    weight = (1 + random.standard_normal(size)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + np.float64(np.float32(eps))) * weight
    made = normed(form, x, weight, eps)
    assert (np.abs(made.values() - expected) <= made.rounding(expected) + 3e-6 * np.abs(expected)).all()


@each_form
@FEW
@given(st.data(), st.integers(1, 20), seeds)
def test_the_norm_of_a_row_has_the_same_bits_anywhere(form: int, data: Any, count: int, seed: int) -> None:
    """Among other rows, as a sampled row, and however the rows are shared out."""
    random = np.random.default_rng(seed)
    x, weight = activations(random, count, 96, "normal"), random.standard_normal(96).astype(np.float32)
    whole = normed(form, x, weight, 1e-5)
    chosen = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20)), np.int64)
    cut = data.draw(st.integers(0, len(chosen)))
    for made in (normed(form, x[chosen], weight, 1e-5, pieces=(cut,)), normed(form, x, weight, 1e-5, chosen, (cut,))):
        assert made.values().tobytes() == whole.values()[chosen].tobytes()


@each_form
@pytest.mark.parametrize("broken", [np.nan, np.inf], ids=str)
def test_a_broken_row_stays_broken_and_alone(form: int, broken: float) -> None:
    x, weight = activations(np.random.default_rng(0), 4, 64, "normal"), np.ones(64, np.float32)
    sound = normed(form, x, weight, 1e-5).values()
    x[2, 40] = broken
    values = normed(form, x, weight, 1e-5).values()
    assert np.isnan(values[2]).any(), "as float32 has it: infinity over infinity"
    assert values[[0, 1, 3]].tobytes() == sound[[0, 1, 3]].tobytes()


# Embedding


def embedded(packed: PackedLinear, tokens: Array, pieces: tuple[int, ...] = ()) -> Array:
    memory = Memory()
    out = memory.place(np.full((len(tokens), packed.inputs), np.nan))
    data = memory.place(packed.data, np.uint8)
    table = memory.table(data.ctypes.data, FORMATS[packed.format], packed.inputs // 32, out.ctypes.data)
    run(rows.embed, table, memory.step(tokens=tokens), len(tokens), pieces)
    memory.check()
    return out


@pytest.mark.parametrize("kind", [*INTEGER_FORMATS, *FLOAT_FORMATS])
@UNHURRIED
@given(st.integers(1, 70), sizes, st.integers(1, 20), seeds)
def test_embeddings_are_the_dequantised_rows(kind: str, vocab: int, size: int, count: int, seed: int) -> None:
    """To the bit: one product and one sum each."""
    random = np.random.default_rng(seed)
    packed = weights(kind, vocab, size, random, spread=8)
    tokens = random.integers(0, vocab, count)
    expected = packed.dequantised()[tokens]
    np.testing.assert_array_equal(embedded(packed, tokens), expected)
    np.testing.assert_array_equal(embedded(packed, tokens, (count // 2,)), expected)
