"""A Llama small enough to run in a blink, with a working tokenizer and chat template, as a GGUF file and as a Hugging Face folder.

Weights are random but fixed by a seed; both forms of one seed are the same model. The vocabulary is byte-level BPE of 300 tokens (digits
one by one, as SmolLM's): 0 `<|endoftext|>`, 1 `<|im_start|>` (BOS), 2 `<|im_end|>` (EOS), 3 to 258 the bytes, then 41 merges.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.core import ModelConfig
from engine.weights import config as hf_config

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, 2
MERGES = [
    *("h e", "i n", "e r", "a n", "o n", "r e", "a t", "e n", "o r", "i t", "i s", "e s", "a r", "s t", "l l", "o u", "e d", "a l"),
    *("Ġ t", "Ġ a", "Ġ s", "Ġ w", "Ġ i", "Ġ o", "Ġ b", "Ġ c", "Ġ Ġ", "Ġt he", "in g", "an d", "Ġa n", "Ġo f", "Ġt o", "Ġi n", "Ġi s"),
    *("y ou", "Ġ you", "he ll", "hell o", "w or", "l d"),
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,  # not hidden_size / heads; the least that the CPU kernels run
    context_length=256,
    rms_eps=1e-5,
    rope_theta=10000.0,
    tied_head=True,
)


def config(**changes: Any) -> ModelConfig:
    """CONFIG with some fields changed; the vocabulary must stay as it is."""
    return dataclasses.replace(CONFIG, **changes)


def vocabulary() -> list[str]:
    """The text of every token, by id."""
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tokenizer() -> Tokenizer:
    vocab = {text: index for index, text in enumerate(vocabulary())}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in MERGES]))
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


def tensors(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face name, scaled so that logits are a few units apart."""
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in hf_config.tensor_shapes(config).items():
        values = random.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif len(shape) == 2:
            values *= 1.5 / np.sqrt(shape[1])
        made[name] = values.astype(np.float32)
    return made


def write_folder(folder: Path, config: ModelConfig = CONFIG, seed: int = 0, **raw_changes: Any) -> Path:
    """Write a Hugging Face folder and return it; `raw_changes` are set in config.json as they are (None: the field is left out)."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = hf_config.to_json(config) | {"bos_token_id": BOS, "eos_token_id": EOS} | raw_changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_gguf(
    path: Path,
    config: ModelConfig = CONFIG,
    seed: int = 0,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file and return it.

    `kind` quantises the two-dimensional weights, except those whose Hugging Face name holds a key of `kinds`; `metadata` sets fields
    (None: leaves one out; ints become uint32, floats float32); `extra` adds tensors. `config.rope_scaling` is not written: give it as
    `metadata`.
    """
    fields: dict[str, Any] = {
        "llama.context_length": config.context_length,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (config.vocab_size - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    architecture = (metadata or {}).get("general.architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (fields | (metadata or {})).items():
        if value is not None and name != "general.architecture":
            _add_field(writer, name, value)
    for name, values in tensors(config, seed).items():
        values = _permuted(values, name, config)
        own = next((each for part, each in (kinds or {}).items() if part in name), kind)
        if len(values.shape) == 2 and own != GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name), gguf.quantize(values, own), raw_dtype=own)
        else:
            writer.add_tensor(_gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    for part, short in parts.items():
        name = name.replace(part, short)
    return name


def _permuted(values: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """Rows of queries and keys as a GGUF has them: the two values that one frequency rotates side by side."""
    heads = config.heads if ".q_proj." in name else config.kv_heads if ".k_proj." in name else 0
    if not heads:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
