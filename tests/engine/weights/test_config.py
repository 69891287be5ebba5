"""config.json: both generations of Hugging Face's field names, and a refusal for what the decoder does not do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from engine.core import ModelConfig, ModelError, RopeScaling
from engine.weights import config as hf_config
from tests.engine import tiny

FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # one per frequency
SCALINGS = [
    RopeScaling(),
    RopeScaling("linear", 4.0),
    RopeScaling("dynamic", 4.0),
    RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeScaling("yarn", 4.0, 64, beta_fast=16.0, beta_slow=2.0),
    RopeScaling("yarn", 4.0, 64, attention_factor=0.9),
    RopeScaling("longrope", 4.0, 64, short_factor=FACTORS, long_factor=FACTORS),
    RopeScaling("longrope", 1.0, 256, attention_factor=1.0, short_factor=FACTORS, long_factor=FACTORS),
]


def raw(**changes: Any) -> dict[str, Any]:
    return hf_config.to_json(tiny.CONFIG) | changes


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_config_survives_the_round_trip(scaling: RopeScaling) -> None:
    config = tiny.config(rope_scaling=scaling, tied_head=False, attention_bias=True, mlp_bias=True)
    assert hf_config.from_json(hf_config.to_json(config), "c") == config


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_older_fields_mean_the_same(scaling: RopeScaling) -> None:
    config = tiny.config(rope_scaling=scaling, rope_theta=5e5)
    older = hf_config.to_json(config)
    rope = older.pop("rope_parameters")
    older["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    older["rope_scaling"] = None if scaling.kind == "default" else rope
    assert hf_config.from_json(older, "c") == config


def test_absent_fields_have_llamas_defaults() -> None:
    least = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    assert hf_config.from_json(least, "c") == ModelConfig(300, 32, 64, 2, 4, 4, 8, 2048, 1e-6, 10000.0)


def test_yarn_derives_its_factors_as_transformers_does() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64, "mscale": 2.0, "mscale_all_dim": 1.0}
    scaling = hf_config.from_json(raw(rope_parameters=rope), "c").rope_scaling
    assert scaling.factor == 4.0  # 256 / 64
    assert scaling.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "mistral"}, "Llama.*'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*'gptq'"),
        ({"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ({"hidden_size": None}, "hidden_size.*integer.*nothing"),
        ({"hidden_size": "32"}, "hidden_size.*'32'"),
        ({"hidden_size": True}, "hidden_size.*True"),
        ({"num_hidden_layers": 10**9}, "layers.*1000000000"),
        ({"num_attention_heads": 0, "head_dim": None}, "heads.*0"),
        ({"num_key_value_heads": 3}, "kv_heads.*3"),
        ({"head_dim": 7}, "head_dim.*even.*7"),
        ({"rms_norm_eps": math.nan}, "rms_eps.*nan"),
        ({"rms_norm_eps": 10**400}, "rms_eps.*inf"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings.*'yes'"),
        ({"rope_parameters": [1]}, "rope_parameters.*list"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type.*'mrope'"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "rope_type.*linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor.*nothing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor.*0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor.*8"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 1, 1, "x"], "long_factor": []}}, "short_factor.*'x'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.*0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=f"here: .*{names}"):
        hf_config.from_json(raw(**changes), "here")


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_broken_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json: expected"):
        hf_config.read_json(tmp_path / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_transformers_reads_the_same_model(scaling: RopeScaling) -> None:
    from transformers import LlamaConfig

    config = tiny.config(rope_scaling=scaling, attention_bias=True)
    theirs = LlamaConfig(**hf_config.to_json(config))
    assert hf_config.from_json(theirs.to_dict(), "c") == config
