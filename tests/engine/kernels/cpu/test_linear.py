"""Linear layers against float64 on the same dequantised numbers, whatever the format, the form of input and the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cpu import linear as li
from engine.kernels.cpu.linear import linear_stage
from engine.kernels.cpu.rows import COARSE, FINE, PLAIN
from tests.engine.kernels.cpu.workbench import (
    ACTIVATIONS,
    FEW,
    FLOAT_FORMATS,
    FORM_NAMES,
    INTEGER_FORMATS,
    UNHURRIED,
    Array,
    Input,
    Linear,
    Memory,
    activations,
    product,
    weights,
)

FORMS = [(kind, form) for kind in INTEGER_FORMATS for form in FORM_NAMES] + [(kind, "plain") for kind in FLOAT_FORMATS]
each_form = pytest.mark.parametrize(("kind", "form_name"), FORMS, ids=lambda part: part)
FLOAT_ROUNDING = 2e-6  # of the sum of magnitudes: sums of up to 1,536 float32 products in 2 x 16 lanes
ALLOWED = {PLAIN: 1e-5, COARSE: 1e-2, FINE: 1e-3}  # relative error

row_counts = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 28, 31, 32, 33, 50, 130, 144])
input_sizes = st.sampled_from([32, 64, 96, 256, 576, 1536])
output_sizes = st.integers(1, 100)
seeds = st.integers(0, 2**32)


def bound(layer: Array, given_input: Input, x: Array, bias: Array | None) -> Array:
    """float64 [rows, outputs]: the most that an output can be off by the input's rounding and by float32's."""
    magnitudes = np.abs(layer)
    allowed = given_input.rounding(x) @ magnitudes.T
    # A quantised weight is scale * q + minimum, and an integer sum times each part is rounded by itself: of their sizes, not their sum's.
    sums = (np.abs(x) + given_input.rounding(x)) @ np.broadcast_to(magnitudes.max(1), magnitudes.T.shape)
    return allowed + FLOAT_ROUNDING * (sums + (0 if bias is None else np.abs(bias))) + 1e-30


@each_form
@UNHURRIED
@given(row_counts, input_sizes, output_sizes, st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans(), seeds)
def test_outputs_are_those_of_float64(
    kind: str, form_name: str, count: int, inputs: int, outputs: int, what: str, biased: bool, adds: bool, seed: int
) -> None:
    """KEEP and ADD, with and without bias; nothing is written outside the outputs, whose padding is exactly zero (or what it was)."""
    random, memory, form = np.random.default_rng(seed), Memory(), FORM_NAMES[form_name]
    layer, x = weights(kind, outputs, inputs, random), activations(random, count, inputs, what)
    source = Input(memory, form, count, inputs, kind).fill(memory, x)
    bias = random.standard_normal(layer.padded_outputs).astype(np.float32) if biased else None
    before = random.standard_normal((count, layer.padded_outputs)).astype(np.float32) if adds else None
    out = Linear(memory, layer, source, li.ADD if adds else li.KEEP, bias, before).run()
    memory.check()
    full = np.zeros((layer.padded_outputs, inputs))
    full[:outputs] = layer.dequantised()
    wide = x.astype(np.float64)
    expected = wide @ full.T + (0 if bias is None else bias) + (0 if before is None else before)
    allowed = bound(full, source, wide, bias) + (0 if before is None else 1e-6 * (np.abs(before) + np.abs(expected)))
    assert (np.abs(out - expected) <= allowed).all()


@each_form
@UNHURRIED
@given(row_counts, input_sizes, output_sizes, seeds)
def test_the_relative_error_is_small(kind: str, form_name: str, count: int, inputs: int, outputs: int, seed: int) -> None:
    """1e-2 with int8 activations, 1e-3 with fine ones, 1e-5 with float32, of the size of rows and weights; few outputs may cancel out."""
    random, form = np.random.default_rng(seed), FORM_NAMES[form_name]
    layer, x = weights(kind, outputs, inputs, random), random.standard_normal((count, inputs)).astype(np.float32)
    expected = x.astype(np.float64) @ layer.dequantised().T
    error = np.linalg.norm(product(kind, form, layer, x)[:, :outputs] - expected)
    assert error <= ALLOWED[form] * np.linalg.norm(x) * np.linalg.norm(layer.dequantised())


@pytest.mark.parametrize(("kind", "form_name"), [("q4_1", "fine"), ("q8_0", "coarse"), ("q4_0", "plain"), ("float32", "plain")])
def test_a_thousand_rows(kind: str, form_name: str) -> None:
    random, form = np.random.default_rng(0), FORM_NAMES[form_name]
    layer, x = weights(kind, 50, 192, random), random.standard_normal((1000, 192)).astype(np.float32)
    expected = x.astype(np.float64) @ layer.dequantised().T
    out = product(kind, form, layer, x)[:, :50]
    per_row = np.linalg.norm(out - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert per_row.max() <= 1.5 * ALLOWED[form], "the worst row"
    assert np.linalg.norm(out - expected) <= ALLOWED[form] * np.linalg.norm(expected)


@each_form
@FEW
@given(row_counts, input_sizes, st.integers(1, 3), st.booleans(), st.sampled_from([*FORMS]), seeds)
def test_swiglu(kind: str, form_name: str, count: int, inputs: int, units: int, biased: bool, into: tuple[str, str], seed: int) -> None:
    """silu(gate) * up of units of 32 gates and 32 ups, in the form in which the next layer wants it."""
    random, memory, form = np.random.default_rng(seed), Memory(), FORM_NAMES[form_name]
    layer = weights(kind, 64 * units, inputs, random)
    x = (random.standard_normal((count, inputs)) * 8 / np.sqrt(inputs)).astype(np.float32)
    source = Input(memory, form, count, inputs, kind).fill(memory, x)
    target = Input(memory, FORM_NAMES[into[1]], count, 32 * units, into[0])
    bias = random.standard_normal(64 * units).astype(np.float32) if biased else None
    Linear(memory, layer, source, li.SWIGLU, bias, target=target).run()
    memory.check()
    gate, up = _gate_and_up(source.values() @ layer.dequantised().astype(np.float64).T + (0 if bias is None else bias))
    expected = gate * up / (1 + np.exp(-gate))
    size = np.abs(source.values()) @ np.abs(layer.dequantised()).max(1).astype(np.float64)[None].repeat(inputs, 0)
    gate_off, up_off = _gate_and_up(FLOAT_ROUNDING * (size + (0 if bias is None else np.abs(bias))))
    allowed = gate_off * (np.abs(up) + up_off) * 1.2 + np.abs(gate) * up_off + 2e-6 * np.abs(expected) + 1e-9  # |silu'| <= 1.1
    assert (np.abs(target.values() - expected) <= allowed + target.rounding(np.abs(expected) + allowed)).all()


def _gate_and_up(units: Array) -> tuple[Array, Array]:
    parts = units.reshape(len(units), -1, 2, 32)
    return parts[:, :, 0].reshape(len(units), -1), parts[:, :, 1].reshape(len(units), -1)


def test_swiglu_of_gates_far_out() -> None:
    """Gates beyond exp's range give 0 or the gate itself, never NaN."""
    memory = Memory()
    gates = np.array([-1e30, -1e4, -200, -90, -87, -20, -0.0, 0.0, 1e-30, 20, 87, 90, 200, 1e4, 1e18], np.float32)
    x = np.zeros((1, 32), np.float32)
    x[0, :15] = gates
    x[0, 31] = 2
    values = np.zeros((64, 32), np.float32)
    values[np.arange(15), np.arange(15)] = 1
    values[32:, 31] = 1
    packed = weights("float32", 64, 32, np.random.default_rng(0))
    layer = type(packed)("float32", 64, 64, 32, _float_tiles(values))
    target = Input(memory, PLAIN, 1, 32, "float32")
    Linear(memory, layer, Input(memory, PLAIN, 1, 32, "float32").fill(memory, x), li.SWIGLU, target=target).run()
    wide = gates.astype(np.float64)
    expected = 2 * wide / (1 + np.exp(np.minimum(-wide, 700)))
    np.testing.assert_allclose(target.values()[0, :15], expected, rtol=2e-6, atol=1e-5)


def _float_tiles(values: Array) -> Array:
    return np.ascontiguousarray(values.reshape(-1, 16, values.shape[1]).swapaxes(1, 2)).view(np.uint8).reshape(-1)


@each_form
def test_no_rows_write_nothing(kind: str, form_name: str) -> None:
    random, memory, form = np.random.default_rng(0), Memory(), FORM_NAMES[form_name]
    source = Input(memory, form, 16, 64, kind).fill(memory, activations(random, 16, 64, "normal"))
    linear = Linear(memory, weights(kind, 32, 64, random), source)
    linear.step = memory.step(rows=0, shares=1)
    assert np.isnan(linear.run()).all()
    memory.check()


@each_form
def test_the_head_runs_over_the_sampled_rows(kind: str, form_name: str) -> None:
    """Of which there are fewer."""
    random, memory, form = np.random.default_rng(0), Memory(), FORM_NAMES[form_name]
    source = Input(memory, form, 5, 64, kind).fill(memory, activations(random, 5, 64, "normal"))
    linear = Linear(memory, weights(kind, 32, 64, random), source, sampled=True)
    linear.step = memory.step(rows=5, shares=1, samples=2)
    out = linear.run()
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2:]).all()


@each_form
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf], ids=str)
def test_a_broken_row_is_seen_and_stays_alone(kind: str, form_name: str, broken: float) -> None:
    """Each of its outputs is no number (NaN for NaN), and the other rows keep their bits, wherever it lies."""
    random, form = np.random.default_rng(0), FORM_NAMES[form_name]
    layer = weights(kind, 32, 96, random)
    x = activations(random, 19, 96, "normal")
    sound = product(kind, form, layer, x)
    for row, column in ((0, 0), (7, 95), (8, 40), (16, 63), (18, 64)):
        poisoned = x.copy()
        poisoned[row, column] = broken
        with np.errstate(invalid="ignore"):
            out = product(kind, form, layer, poisoned)
        assert not np.isfinite(out[row]).any()
        if np.isnan(broken):
            assert np.isnan(out[row]).all()
        others = np.arange(19) != row
        assert out[others].tobytes() == sound[others].tobytes()


def test_a_broken_row_is_seen_after_swiglu() -> None:
    """Through the epilogue and the quantising that follows it."""
    random = np.random.default_rng(0)
    for kind, form in (("q4_1", FINE), ("q8_0", COARSE), ("float32", PLAIN)):
        for into in (PLAIN, COARSE, FINE):
            memory = Memory()
            x = activations(random, 3, 64, "normal")
            x[1, 5] = np.nan
            target = Input(memory, into, 3, 32, "q4_1")
            Linear(memory, weights(kind, 64, 64, random), Input(memory, form, 3, 64, kind).fill(memory, x), li.SWIGLU, target=target).run()
            values = target.values()
            assert np.isnan(values[1]).all()
            assert np.isfinite(values[[0, 2]]).all()


@each_form
@FEW
@given(st.data(), st.integers(1, 40) | st.integers(100, 150), input_sizes, st.integers(1, 130), st.sampled_from(ACTIVATIONS), seeds)
def test_a_rows_bits_are_the_same_in_every_batch(
    kind: str, form_name: str, data: Any, count: int, inputs: int, outputs: int, what: str, seed: int
) -> None:
    """Alone, among others, at any place, and however the items are shared out."""
    random, form = np.random.default_rng(seed), FORM_NAMES[form_name]
    layer, x = weights(kind, outputs, inputs, random), activations(random, count, inputs, what)
    whole = product(kind, form, layer, x)
    order = np.array(data.draw(st.permutations(range(count))))
    shares = data.draw(st.integers(1, 3))
    pieces = data.draw(st.lists(st.integers(0, shares * layer.padded_outputs // 16), max_size=4))
    assert product(kind, form, layer, x[order], pieces, shares).tobytes() == whole[order].tobytes()
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    assert product(kind, form, layer, x[first:last]).tobytes() == whole[first:last].tobytes()
    row = data.draw(st.integers(0, count - 1))
    assert product(kind, form, layer, x[[row]]).tobytes() == whole[[row]].tobytes()


@pytest.mark.parametrize("kind", FLOAT_FORMATS)
@pytest.mark.parametrize("form", [COARSE, FINE])
def test_float_weights_take_no_integers(kind: str, form: int) -> None:
    with pytest.raises(KeyError):
        linear_stage(kind, form)


@pytest.mark.parametrize("form", [COARSE, FINE])
def test_integer_sums_are_exact(form: int) -> None:
    """The largest weights times the largest activations, which is where narrower sums would saturate or wrap."""
    for quant, value in ((127, 1.0), (-128, 1.0), (127, -1.0), (-128, -1.0)):
        packed = weights("q8_0", 16, 1536, np.random.default_rng(0))
        groups = packed.data.reshape(48, 544).copy()
        groups[:, :512] = quant + 128
        groups[:, 512:] = np.ones(16, np.float16).view(np.uint8)
        layer = type(packed)("q8_0", 16, 16, 1536, groups.reshape(-1))
        out = product("q8_0", form, layer, np.full((9, 1536), value, np.float32))
        np.testing.assert_allclose(out, quant * value * 1536, rtol=1e-6)
