"""GGUF files: what an honest one holds is read exactly, what a lying one claims is refused."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import ModelConfig, ModelError, RopeScaling
from engine.weights import config as hf_config
from engine.weights import gguf_header
from engine.weights.gguf import GGUFModel
from engine.weights.gguf_header import read_header
from tests.engine import tiny

Kind = GGMLQuantizationType


def rounded(config: ModelConfig) -> ModelConfig:
    """The config as a GGUF can say it: in float32."""
    return tiny.config(rms_eps=float(np.float32(config.rms_eps)), tied_head=config.tied_head)


@pytest.mark.parametrize("tied", [True, False])
def test_config_and_float_tensors_come_back_exactly(tmp_path: Path, tied: bool) -> None:
    config = tiny.config(tied_head=tied)
    model = GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", config))
    assert model.config == rounded(config)
    expected = tiny.tensors(config)
    read = dict(model.tensors())
    assert read.keys() == expected.keys() == model.tensor_shapes().keys()
    for name, values in expected.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], values, err_msg=name)


def test_biases_are_read_and_permuted_like_their_weights(tmp_path: Path) -> None:
    config = tiny.config(attention_bias=True, mlp_bias=True)
    model = GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", config))
    assert model.config.attention_bias
    assert model.config.mlp_bias
    np.testing.assert_array_equal(
        model.tensor("model.layers.1.self_attn.q_proj.bias"), tiny.tensors(config)["model.layers.1.self_attn.q_proj.bias"]
    )


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_tensors_are_near_their_originals(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    model = GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", kind=kind))
    for name, values in tiny.tensors().items():
        read = model.tensor(name)
        assert read.dtype == np.float32
        error = np.abs(read - values).max() / np.abs(values).max()
        assert error < (0.1 if kind in (Kind.Q4_0, Kind.Q4_1) else 0.05), name


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_dequantised_by_the_library(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # 0x3030 as a half-precision scale is a small number, so any bytes of this value are a valid block.
    raw = np.full((4, 2 * size), 0x30, np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = read_header(tmp_path / "k.gguf").tensors["w"]
    assert (info.shape, info.kind, info.size) == ((4, 2 * block), kind, raw.size)
    model = GGUFModel.__new__(GGUFModel)
    model.path, model._data = tmp_path / "k.gguf", np.memmap(tmp_path / "k.gguf", mode="r")
    np.testing.assert_array_equal(model._dequantised(info), gguf.dequantize(raw, kind))


def test_the_tokens_a_file_names(tmp_path: Path) -> None:
    tokens = GGUFModel(tiny.write_gguf(tmp_path / "m.gguf")).tokens
    assert tokens.eos_ids == (tiny.EOS, 0)  # the file's own first, then <|endoftext|>, a control token
    assert (tokens.bos_id, tokens.add_bos, tokens.template) == (tiny.BOS, False, tiny.TEMPLATE)
    assert tokens.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_end_of_turn_tokens_end_a_reply_and_words_do_not(tmp_path: Path) -> None:
    kinds = [3] * 3 + [1] * 297
    kinds[0] = 1  # "<|endoftext|>" as an ordinary word
    changed = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    assert GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", metadata=changed)).tokens.eos_ids == (2, 7, 8)


@pytest.mark.parametrize(("kind", "pre", "adds"), [("llama", "default", True), ("gpt2", "llama-bpe", True), ("gpt2", "smollm", False)])
def test_bos_is_added_where_the_kind_of_vocabulary_does(tmp_path: Path, kind: str, pre: str, adds: bool) -> None:
    changed = {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre}
    assert GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", metadata=changed)).tokens.add_bos is adds


FACTORS = np.array([1, 1.5, 2, 3, 4, 6, 8, 12], np.float32)  # one per frequency
PLAIN, DOUBLED = tuple(FACTORS.tolist()), tuple((2 * FACTORS).tolist())


@pytest.mark.parametrize(
    ("metadata", "extra", "scaling"),
    [
        ({}, {}, RopeScaling()),
        ({"type": "none"}, {}, RopeScaling()),
        ({"type": "linear", "factor": 4.0}, {}, RopeScaling("linear", 4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "attn_factor": 0.5},
            {},
            RopeScaling("yarn", 4.0, 64, attention_factor=0.5 * (0.1 * math.log(4.0) + 1)),
        ),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 64}, {}, RopeScaling("yarn", 4.0, 64)),
        (
            {},
            {"rope_freqs.weight": FACTORS},
            RopeScaling("longrope", 1.0, 256, attention_factor=1.0, short_factor=PLAIN, long_factor=PLAIN),
        ),
        (
            {"type": "linear", "factor": 2.0},
            {"rope_freqs.weight": FACTORS},
            RopeScaling("longrope", 1.0, 256, attention_factor=1.0, short_factor=DOUBLED, long_factor=DOUBLED),
        ),
        (
            {"type": "longrope", "factor": 4.0, "original_context_length": 64},
            {"rope_factors_short.weight": FACTORS, "rope_factors_long.weight": 2 * FACTORS},
            RopeScaling("longrope", 4.0, 64, attention_factor=1.0, short_factor=PLAIN, long_factor=DOUBLED),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], extra: dict[str, np.ndarray], scaling: RopeScaling) -> None:
    metadata = {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    model = GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", metadata=metadata, extra=extra))
    assert model.config.rope_scaling == scaling
    assert model.tensor_shapes().keys() == tiny.tensors().keys()  # frequency factors are part of the config, not of the tensors


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"general.architecture": "gemma"}, "general.architecture.*'gemma'"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"split.count": 3}, "split.count"),
        ({"llama.block_count": 3}, "model.layers.2"),
        ({"llama.block_count": 1}, "unknown tensors"),
        ({"llama.block_count": 4_000_000_000}, "layers"),
        ({"llama.embedding_length": 64, "llama.attention.key_length": 16}, "shape"),
        ({"llama.feed_forward_length": None}, "llama.feed_forward_length.*nothing"),
        ({"llama.context_length": "long"}, "llama.context_length.*integer.*'?str"),
        ({"llama.context_length": 0}, "context_length"),
        ({"llama.attention.head_count": 0}, "heads"),
        ({"llama.attention.head_count_kv": 3}, "kv_heads"),
        ({"llama.attention.head_count": [4, 4]}, "head_count.*integer"),
        ({"llama.rope.dimension_count": 4}, "dimension_count"),
        ({"llama.rope.freq_base": math.nan}, "rope_theta"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "rms_eps"),
        ({"llama.vocab_size": 301}, "vocabulary.*301"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "vocabulary.*2 tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id.*299"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"llama.rope.scaling.type": "spiral"}, "spiral"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_factors_short"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused(tmp_path: Path, metadata: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=f"m.gguf.*{names}"):
        GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", metadata=metadata))


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "model.norm.weight", "blk.7.attn_q.weight"])
def test_an_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="unknown tensors"):
        GGUFModel(tiny.write_gguf(tmp_path / "m.gguf", extra={name: np.zeros(8, np.float32)}))


def test_values_that_are_not_finite_are_damage(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf")
    info = read_header(path).tensors["output_norm.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(struct.pack("<f", math.inf))
    with pytest.raises(ModelError, match=r"output_norm.weight.*not finite"):
        GGUFModel(path).tensor("model.norm.weight")


def after(data: bytes, text: bytes, skip: int = 0) -> int:
    """The offset just behind `text` (a key or a tensor's name), plus `skip`."""
    return data.index(text) + len(text) + skip


def patch(offset: Callable[[bytes], int], code: str, value: int | float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(f"<{code}", changed, offset(data), value)
        return bytes(changed)

    return change


TENSOR = b"blk.0.ffn_up.weight"  # in a header entry: name, dimensions u32, 2 sizes u64, type u32, offset u64
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda data: b"", "empty"),
        (lambda data: b"GG", "magic"),
        (lambda data: b"PK\x03\x04" + data[4:], "magic"),
        (patch(lambda data: 4, "I", 1), "version.*got 1"),
        (patch(lambda data: 4, "I", 3 << 24), "version.*big-endian"),
        (patch(lambda data: 8, "Q", HUGE), f"tensor_count.*{HUGE}"),
        (patch(lambda data: 8, "Q", 1), "unknown tensors|missing|lies over"),
        (patch(lambda data: 16, "Q", HUGE), f"metadata_kv_count.*{HUGE}"),
        (patch(lambda data: 16, "Q", 10_000), "metadata"),
        (patch(lambda data: 24, "Q", HUGE), "metadata key 0.*bytes"),
        (patch(lambda data: after(data, b"general.architecture", 4), "Q", HUGE), "general.architecture.*bytes"),
        (patch(lambda data: after(data, b"general.architecture"), "I", 99), "general.architecture.*type.*99"),
        (patch(lambda data: after(data, b"tokenizer.ggml.tokens", 8), "Q", HUGE), f"tokenizer.ggml.tokens.*{HUGE}"),
        (patch(lambda data: after(data, b"tokenizer.ggml.tokens", 4), "I", 9), "tokenizer.ggml.tokens.*arrays of arrays"),
        (patch(lambda data: after(data, b"tokenizer.ggml.add_bos_token", 4), "B", 7), "add_bos_token.*bool"),
        (patch(lambda data: data.index(b"llama.block_count"), "B", 0xFF), "UTF-8"),
        (patch(lambda data: after(data, TENSOR), "I", 0xFFFFFFFF), "ffn_up.*dimensions"),
        (patch(lambda data: after(data, TENSOR, 4), "Q", HUGE), "ffn_up.*shape"),
        (patch(lambda data: after(data, TENSOR, 12), "Q", 1 << 32), "ffn_up.*shape"),
        (patch(lambda data: after(data, TENSOR, 12), "Q", 0), "ffn_up.*shape"),
        (patch(lambda data: after(data, TENSOR, 20), "I", 77), "ffn_up.*type 77"),
        (patch(lambda data: after(data, TENSOR, 20), "I", Kind.Q4_K), "ffn_up.*blocks of 256"),
        (patch(lambda data: after(data, TENSOR, 20), "I", Kind.F64), "ffn|lies over|truncated"),
        (patch(lambda data: after(data, TENSOR, 24), "Q", HUGE), "ffn_up.*lies"),
        (patch(lambda data: after(data, TENSOR, 24), "Q", 0), "lies over"),
        (patch(lambda data: after(data, TENSOR, 24), "Q", 4), "ffn_up.*alignment"),
        (lambda data: data[:-100], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:1000], "metadata|bytes"),
        (lambda data: data.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"), "twice"),
        (lambda data: data.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"), "new name"),
    ],
)
def test_a_header_that_lies_is_refused_at_once(tmp_path: Path, change: Callable[[bytes], bytes], names: str) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf")
    path.write_bytes(change(path.read_bytes()))
    started = time.monotonic()
    with pytest.raises(ModelError, match=rf"m\.gguf(.|\n)*({names})"):
        GGUFModel(path)
    assert time.monotonic() - started < 2


def test_an_array_is_as_long_as_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_MAX_ELEMENTS", 500)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml.*cannot be"):
        read_header(tiny.write_gguf(tmp_path / "m.gguf"))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    path = tiny.write_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf", kind=Kind.Q8_0)
    data = path.read_bytes()
    return path, data, min(info.offset for info in read_header(path).tensors.values())


EDIT = st.tuples(st.floats(0, 1), st.one_of(st.integers(0, 255).map(lambda byte: bytes([byte])), st.binary(min_size=1, max_size=8)))


@settings(max_examples=300, deadline=2000)
@given(edits=st.lists(EDIT, min_size=1, max_size=3), cut=st.one_of(st.none(), st.none(), st.floats(0, 1)))
def test_any_header_is_read_whole_or_refused(honest: tuple[Path, bytes, int], edits: list[tuple[float, bytes]], cut: float | None) -> None:
    path, data, header_end = honest
    changed = bytearray(data if cut is None else data[: int(cut * len(data))])
    for where, new in edits:
        at = int(where * (header_end - 1))
        if at + len(new) <= len(changed):
            changed[at : at + len(new)] = new
    path.write_bytes(changed)
    try:
        model = GGUFModel(path)
        shapes = hf_config.tensor_shapes(model.config)
        read = {name: values.shape for name, values in model.tensors()}
    except ModelError as error:
        assert str(path) in str(error)
        return
    assert read == shapes
    assert all(0 <= index < model.config.vocab_size for index in model.tokens.eos_ids)
    # What passed our own checks is safe to hand to the library, and means the same to it.
    library = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in model.reader().tensors}
    assert library == {name: (info.offset, info.size) for name, info in read_header(path).tensors.items()}
