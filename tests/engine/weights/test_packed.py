"""Packed models hold the checkpoint's numbers, product by product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.core import ModelConfig, ModelError
from engine.weights import blocks, packing
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from engine.weights.gguf import GGUFModel
from engine.weights.packed import PackedModel, prepare_packed
from engine.weights.safetensors import FolderModel
from tests.engine import tiny

Array = np.ndarray[Any, np.dtype[Any]]
Kind = GGMLQuantizationType
# Sizes that fill no tile: 24 is no multiple of 16 or 32, 300 tokens none of 16, 3 heads of 16 none of 32.
ODD = tiny.config(intermediate_size=24, heads=3, kv_heads=3, tied_head=False, attention_bias=True, mlp_bias=True)


def padded(values: Array, rows: int, columns: int | None = None) -> Array:
    wider = ((0, rows - len(values)), (0, (columns or 0) - values.shape[1])) if values.ndim == 2 else ((0, rows - len(values)),)
    return np.pad(values, wider)


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def check(model: PackedModel, config: ModelConfig, tensor: Callable[[str], Array], same: Callable[[Array, Array], None]) -> None:
    """Every product of `model` is made of `config`'s tensors, in the order and with the padding that the kernels expect."""
    inner, heads = up(config.intermediate_size, 32), up(config.heads * config.head_dim, 32)
    assert model.config == config
    assert len(model.layers) == config.layers

    def paired(gate: Array, up_: Array) -> Array:
        tiles = [part.reshape(-1, 32, *part.shape[1:]) for part in (gate, up_)]
        return np.stack(tiles, axis=1).reshape(2 * inner, *gate.shape[1:])

    for index, layer in enumerate(model.layers):

        def named(name: str, prefix: str = f"model.layers.{index}.") -> Array:
            return tensor(prefix + name)

        np.testing.assert_array_equal(layer.input_norm, named("input_layernorm.weight"))
        np.testing.assert_array_equal(layer.mlp_norm, named("post_attention_layernorm.weight"))
        same(layer.qkv.dequantised(), np.concatenate([named(f"self_attn.{part}_proj.weight") for part in "qkv"]))
        same(layer.out.dequantised(), padded(named("self_attn.o_proj.weight"), config.hidden_size, heads))
        gate, up_ = (padded(named(f"mlp.{part}_proj.weight"), inner, config.hidden_size) for part in ("gate", "up"))
        same(layer.gate_up.dequantised(), paired(gate, up_))
        same(layer.down.dequantised(), padded(named("mlp.down_proj.weight"), config.hidden_size, inner))
        biases = (layer.qkv_bias, layer.out_bias)
        if config.attention_bias:
            theirs = (np.concatenate([named(f"self_attn.{part}_proj.bias") for part in "qkv"]), named("self_attn.o_proj.bias"))
            for bias, wanted in zip(biases, theirs, strict=True):
                np.testing.assert_array_equal(bias, wanted)
        else:
            assert biases == (None, None)
        biases = (layer.gate_up_bias, layer.down_bias)
        if config.mlp_bias:
            theirs = (paired(*(padded(named(f"mlp.{part}_proj.bias"), inner) for part in ("gate", "up"))), named("mlp.down_proj.bias"))
            for bias, wanted in zip(biases, theirs, strict=True):
                np.testing.assert_array_equal(bias, wanted)
        else:
            assert biases == (None, None)
    np.testing.assert_array_equal(model.norm, tensor("model.norm.weight"))
    same(model.embedding.dequantised(), tensor("model.embed_tokens.weight"))
    if config.tied_head:
        assert model.head is model.embedding
    else:
        same(model.head.dequantised(), tensor("lm_head.weight"))
    assert model.head.outputs == config.vocab_size
    for linear in linears(model):
        assert linear.padded_outputs == up(linear.outputs, 16)
        assert linear.inputs % 32 == 0
        rows = blocks.untiled(linear.format, linear.data, linear.inputs)
        assert rows.shape == (linear.padded_outputs, linear.inputs)
        assert not rows[linear.outputs :].any()


def linears(model: PackedModel) -> list[Any]:
    layers = [each for layer in model.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return [*layers, model.head, model.embedding]


def formats(model: PackedModel) -> set[str]:
    return {linear.format for linear in linears(model)}


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A folder with some of its tensors changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def from_gguf(tmp_path: Path, config: ModelConfig = tiny.CONFIG, **options: Any) -> tuple[Checkpoint, Callable[[str], Array]]:
    path = tiny.write_gguf(tmp_path / "m.gguf", config, **options)
    return prepare(str(path), tmp_path / "cache"), GGUFModel(path).tensor


def from_folder(tmp_path: Path, config: ModelConfig = tiny.CONFIG, dtype: torch.dtype = torch.float32) -> Checkpoint:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    return prepare(str(changed(tiny.write_folder(tmp_path / "m", config), cast)), tmp_path / "cache")


def floats(checkpoint: Checkpoint) -> Callable[[str], Array]:
    tensors = checkpoint.tensors()
    return lambda name: tensors[name].float().numpy()


@pytest.mark.parametrize(("kind", "biased"), [(Kind.Q4_0, False), (Kind.Q4_1, True), (Kind.Q8_0, False)])
def test_a_ggufs_blocks_are_packed_as_they_are(tmp_path: Path, kind: GGMLQuantizationType, biased: bool) -> None:
    config = tiny.config(
        intermediate_size=96, rms_eps=float(np.float32(1e-5)), tied_head=not biased, attention_bias=biased, mlp_bias=biased
    )
    checkpoint, tensor = from_gguf(tmp_path, config, kind=kind)
    assert set(checkpoint.quantised.values()) == {kind.name}
    model = prepare_packed(checkpoint)
    assert formats(model) == {kind.name.lower()}
    check(model, config, tensor, np.testing.assert_array_equal)
    check(model, config, floats(checkpoint), np.testing.assert_array_equal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_packed_in_their_own_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = from_folder(tmp_path, ODD, dtype)
    model = prepare_packed(checkpoint)
    assert formats(model) == {"bfloat16" if dtype == torch.bfloat16 else "float32"}
    check(model, ODD, floats(checkpoint), np.testing.assert_array_equal)


def near_int8(got: Array, wanted: Array) -> None:
    groups = wanted.reshape(len(wanted), -1, 32)
    steps = np.abs(groups).max(axis=-1, keepdims=True) / 127
    assert (np.abs(got.reshape(groups.shape) - groups) <= 0.501 * steps).all()


def test_int8_of_a_float_checkpoint(tmp_path: Path) -> None:
    checkpoint = from_folder(tmp_path, ODD)
    model = prepare_packed(checkpoint, "int8")
    assert formats(model) == {"q8_0"}
    check(model, ODD, floats(checkpoint), near_int8)


def test_int8_leaves_a_ggufs_own_groups(tmp_path: Path) -> None:
    checkpoint, tensor = from_gguf(tmp_path, kind=Kind.Q4_1, kinds={"embed_tokens": Kind.F32})
    model = prepare_packed(checkpoint, "int8")
    assert (model.layers[0].qkv.format, model.head.format) == ("q4_1", "q8_0")
    near_int8(model.head.dequantised(), tensor("model.embed_tokens.weight"))
    np.testing.assert_array_equal(model.layers[1].out.dequantised(), tensor("model.layers.1.self_attn.o_proj.weight"))


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1])
def test_other_quantised_kinds_become_int8(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    checkpoint, tensor = from_gguf(tmp_path, kind=kind)
    assert not checkpoint.quantised
    assert checkpoint.requantise == {name for name, values in tiny.tensors().items() if values.ndim == 2}
    model = prepare_packed(checkpoint)
    assert formats(model) == {"q8_0"}
    check(model, checkpoint.config, tensor, near_int8)
    check(prepare_packed(checkpoint, "float32"), checkpoint.config, tensor, np.testing.assert_array_equal)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_any_source_as_floats(tmp_path: Path, weights: str) -> None:
    checkpoint, tensor = from_gguf(tmp_path, kind=Kind.Q4_0)
    model = prepare_packed(checkpoint, weights)
    assert formats(model) == {weights}

    def rounded(got: Array, wanted: Array) -> None:
        values = torch.from_numpy(wanted)
        np.testing.assert_array_equal(got, (values.bfloat16() if weights == "bfloat16" else values).float().numpy())

    check(model, checkpoint.config, tensor, rounded)


def test_the_parts_of_a_product_have_one_format(tmp_path: Path) -> None:
    checkpoint, tensor = from_gguf(tmp_path, kind=Kind.Q4_1, kinds={"v_proj": Kind.Q8_0, "up_proj": Kind.BF16, "embed": Kind.F16})
    model = prepare_packed(checkpoint)
    layer = model.layers[1]
    assert [each.format for each in (layer.qkv, layer.out, layer.gate_up, layer.down, model.head)] == [
        *("q8_0", "q4_1", "q8_0", "q4_1"),
        "float32",
    ]
    q_rows = tensor("model.layers.1.self_attn.q_proj.weight")
    np.testing.assert_array_equal(layer.qkv.dequantised()[: len(q_rows)], blocks.dequantised(blocks.quantised(q_rows)))
    near_int8(layer.gate_up.dequantised()[32:64], tensor("model.layers.1.mlp.up_proj.weight")[:32])


def test_floats_of_several_kinds_lose_nothing(tmp_path: Path) -> None:
    def mix(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items() if "q_proj" in name or "o_proj" in name})

    folder = changed(tiny.write_folder(tmp_path / "m"), mix)
    checkpoint = prepare(str(folder), tmp_path / "cache")
    model = prepare_packed(checkpoint)
    assert (model.layers[0].qkv.format, model.layers[0].out.format) == ("float32", "bfloat16")
    check(model, tiny.CONFIG, floats(checkpoint), np.testing.assert_array_equal)


def put(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors[name].view(-1)[7:8].fill_(value)  # type: ignore[return-value]


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_groups_of_zeros_stay_zeros(tmp_path: Path) -> None:
    folder = changed(tiny.write_folder(tmp_path / "m"), lambda tensors: tensors[DOWN].zero_())  # type: ignore[arg-type, return-value]
    model = prepare_packed(prepare(str(folder), tmp_path / "cache"), "int8")
    down = model.layers[1].down
    assert not down.dequantised().any()
    assert not np.isnan(down.data.reshape(-1, 544)[:, 512:].copy().view(np.float16)).any()


@pytest.mark.parametrize(
    ("weights", "value", "works"), [("int8", 1e8, "float32"), ("bfloat16", 3.4e38, "float32"), ("int8", -1e30, "bfloat16")]
)
def test_a_weight_too_large_names_its_tensor_and_what_works(tmp_path: Path, weights: str, value: float, works: str) -> None:
    folder = changed(tiny.write_folder(tmp_path / "m"), put(DOWN, value))
    checkpoint = prepare(str(folder), tmp_path / "cache")
    with pytest.raises(ModelError, match=rf"tensor {DOWN}: .*{works}.* weights hold it"):
        prepare_packed(checkpoint, weights)
    held = prepare_packed(checkpoint, works).layers[1].down.dequantised().reshape(-1)[7]
    assert held == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.input_layernorm.weight"])
def test_what_is_not_finite_is_damage(tmp_path: Path, name: str) -> None:
    folder = changed(tiny.write_folder(tmp_path / "m"), put(name, float("nan")))
    with pytest.raises(ModelError, match=rf"tensor {name}: .*not finite"):
        prepare_packed(prepare(str(folder), tmp_path / "cache"))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": 48}, "hidden_size.*multiple of 32, got 48"),
        ({"head_dim": 24}, "head_dim.*multiple of 16, got 24"),
    ],
)
def test_what_the_kernels_cannot_run_names_what_can(tmp_path: Path, changes: dict[str, int], names: str) -> None:
    checkpoint = from_folder(tmp_path, tiny.config(**changes))
    with pytest.raises(ModelError, match=f"{names}.*`kernels reference` runs it"):
        prepare_packed(checkpoint)


def test_an_unknown_format_is_refused(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelError, match="expected one of auto, int8, float32, bfloat16, got 'int3'"):
        prepare_packed(tiny_checkpoint, "int3")


@given(st.sampled_from([32, 64, 96, 1024]), st.sampled_from(packing.WEIGHTS))
def test_how_many_rows_are_packed_at_once_does_not_matter(tiny_checkpoint: Checkpoint, slab: int, weights: str) -> None:
    """In slabs of any size the bytes are those of a whole tensor at once."""
    rows, whole = packing._Rows(tiny_checkpoint), packing._SLAB_ROWS
    assert FolderModel(tiny_checkpoint.path).config == tiny_checkpoint.config
    for item in packing.plan(tiny_checkpoint, weights).items.values():
        wanted = np.concatenate(list(packing._pieces(item, rows)))
        assert wanted.size == item.size
        packing._SLAB_ROWS = slab
        try:
            np.testing.assert_array_equal(np.concatenate(list(packing._pieces(item, rows))), wanted)
        finally:
            packing._SLAB_ROWS = whole


@pytest.mark.slow
def test_the_default_model_is_packed_exactly() -> None:
    checkpoint = prepare("default")
    model = prepare_packed(checkpoint)
    assert formats(model) == {"q4_1", "q8_0"}
    check(model, checkpoint.config, floats(checkpoint), np.testing.assert_array_equal)
