"""Groups and tiles: every byte is where the layout says, int8 rounding loses no more than half a step."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import blocks
from engine.weights.formats import FORMATS, KINDS, row_bytes, tile_bytes

Array = np.ndarray[Any, np.dtype[Any]]


def random(rows: int, inputs: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, inputs), dtype=np.float32)


def gguf_rows(kind: str, rows: int, inputs: int, seed: int = 0) -> Array:
    """Rows of any valid blocks: every value of a quantised byte occurs, scales of both signs and of any size."""
    numbers = np.random.default_rng(seed)
    raw = numbers.integers(0, 256, (rows, row_bytes(kind, inputs)), dtype=np.uint8)
    made = raw.reshape(rows, inputs // 32, -1)
    halves = (numbers.standard_normal((rows, inputs // 32, 2)) * 10.0 ** numbers.integers(-8, 4, (rows, inputs // 32, 1))).astype("<f2")
    count = 4 if kind == "Q4_1" else 2
    made[..., :count] = halves.view(np.uint8)[..., :count]
    return raw


@pytest.mark.parametrize("kind", KINDS)
def test_rows_mean_what_the_gguf_library_says(kind: str) -> None:
    raw = gguf_rows(kind, 5, 96)
    values = blocks.dequantised(blocks.split(kind, raw))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, gguf.dequantize(raw, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_each_byte_of_a_quantised_tile_is_where_the_kernels_look(kind: str) -> None:
    """The layout, spelled out one weight at a time."""
    inputs, raw = 96, gguf_rows(kind, 32, 96)
    values, packed = gguf.dequantize(raw, GGMLQuantizationType[kind]), blocks.tiles(blocks.split(kind, raw))
    assert packed.shape == (2, tile_bytes(KINDS[kind], inputs))
    size = {"Q4_0": 288, "Q4_1": 320, "Q8_0": 544}[kind]
    quant_bytes = 512 if kind == "Q8_0" else 256
    for row in range(32):
        tile, lane = divmod(row, 16)
        for column in range(inputs):
            group, at = divmod(column, 32)
            block = packed[tile, group * size : (group + 1) * size]
            scales = block[quant_bytes : quant_bytes + 32].view(np.float16).astype(np.float32)
            if kind == "Q8_0":
                weight = scales[lane] * np.float32(int(block[64 * (at // 4) + 4 * lane + at % 4]) - 128)
            else:
                byte = block[64 * (at % 16 // 4) + 4 * lane + at % 4]
                quant = np.float32(byte >> 4 if at >= 16 else byte & 15)
                minima = block[quant_bytes + 32 :].view(np.float16).astype(np.float32)
                weight = scales[lane] * quant + minima[lane] if kind == "Q4_1" else scales[lane] * (quant - 8)
            assert weight == values[row, column], (row, column)


@pytest.mark.parametrize("format_", ["float32", "bfloat16"])
def test_tiles_of_floats_are_inputs_by_outputs(format_: str) -> None:
    values = random(32, 5)
    packed = blocks.tiles(values if format_ == "float32" else blocks.to_bfloat16(values))
    assert packed.shape == (2, tile_bytes(format_, 5))
    numbers = packed.view(np.float32) if format_ == "float32" else blocks.from_bfloat16(packed.view(np.uint16))
    exact = values if format_ == "float32" else torch.from_numpy(values).bfloat16().float().numpy()
    for row in range(32):
        np.testing.assert_array_equal(numbers.reshape(2, 5, 16)[row // 16, :, row % 16], exact[row])


@given(
    st.sampled_from(FORMATS),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 1 << 31),
)
def test_what_is_tiled_comes_back(format_: str, tiles: int, groups: int, seed: int) -> None:
    rows, inputs = 16 * tiles, 32 * groups
    made: blocks.Groups | Array
    if format_ in KINDS.values():
        made = blocks.split(format_.upper(), gguf_rows(format_.upper(), rows, inputs, seed))
        values = blocks.dequantised(made)
    else:
        values = random(rows, inputs, seed)
        made = blocks.to_bfloat16(values) if format_ == "bfloat16" else values
        values = blocks.from_bfloat16(made) if format_ == "bfloat16" else values
    packed = blocks.tiles(made)
    assert packed.dtype == np.uint8
    assert packed.shape == (tiles, tile_bytes(format_, inputs))
    np.testing.assert_array_equal(blocks.untiled(format_, packed.reshape(-1), inputs), values)


def test_padding_adds_zero_weights() -> None:
    for kind in KINDS:
        groups = blocks.split(kind, gguf_rows(kind, 3, 64))
        padded = blocks.dequantised(groups.padded(16))
        np.testing.assert_array_equal(padded[:3], blocks.dequantised(groups))
        assert not padded[3:].any()
        assert groups.padded(3) is groups
    tile = blocks.tiles(blocks.quantised(random(1, 32)).padded(16)).reshape(-1)
    lanes = tile[:512].reshape(8, 16, 4)
    assert (lanes[:, 1:] == 128).all()


FLOATS = st.floats(-60000, 60000, width=32)
TINY = st.floats(-(2.0**-17), 2.0**-17, width=32)  # scales in float16's subnormal range


@given(st.lists(st.one_of(st.lists(FLOATS, min_size=32, max_size=32), st.lists(TINY, min_size=32, max_size=32)), min_size=1, max_size=4))
def test_int8_is_within_half_a_step_and_never_clips(rows: list[list[float]]) -> None:
    values = np.array(rows, np.float32)
    groups = blocks.quantised(values)
    largest, quants = np.abs(values).max(axis=1), groups.quants.view(np.int8).astype(int)[:, 0]
    scales = groups.scales.astype(np.float64)
    assert groups.format == "q8_0"
    assert np.abs(quants).max(initial=0) <= 127
    assert ((scales[:, 0] == 0) == (largest == 0)).all()
    # The scale is the nearest float16 to absmax / 127, or one unit in the last place above it.
    ideal = largest.astype(np.float64) / 127
    assert (np.abs(scales[:, 0] - ideal) <= np.maximum(ideal * 2.0**-10, 2.0**-24)).all()
    error = np.abs(quants * scales - values)
    assert (error <= scales * 0.5000001).all()


def test_a_subnormal_scale_does_not_clip() -> None:
    """absmax / 127 is 1.4 float16 units here: rounded down to 1, q would be 178."""
    values = np.full((1, 32), 1.4 * 127 * 2.0**-24, np.float32)
    groups = blocks.quantised(values)
    assert float(groups.scales[0, 0]) == 2 * 2.0**-24
    assert (groups.quants.view(np.int8) == 89).all()


def test_zeros_are_quantised_to_zeros() -> None:
    values = random(2, 64)
    values[0, :32] = 0
    values[1] = -0.0
    groups = blocks.quantised(values)
    assert groups.scales.tolist()[1] == [0, 0]
    assert groups.scales[0, 0] == 0
    assert not groups.quants[0, 0].any()
    assert not blocks.dequantised(groups)[1].any()


def test_what_no_scale_can_hold_is_an_overflow() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, 3] = 127 * 65504
    assert float(blocks.quantised(values).scales[0, 0]) == 65504
    values[0, 3] = -127 * 65600
    with pytest.raises(OverflowError, match=r"8\.3312e\+06 is too large.*at most 8319008"):
        blocks.quantised(values)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_bfloat16_rounds_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    theirs = torch.from_numpy(values).bfloat16().float()
    if theirs.isinf().any():
        with pytest.raises(OverflowError, match="beyond bfloat16"):
            blocks.to_bfloat16(values)
        return
    np.testing.assert_array_equal(blocks.from_bfloat16(blocks.to_bfloat16(values)), theirs.numpy())
