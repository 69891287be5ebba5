"""Makes the forms of Hocket's model that peers read: a float32 Hugging Face folder, and a Q8_0 GGUF where the model is a GGUF.

    python -m benchmarks.models TARGET [--model MODEL]

Writes TARGET/float32 and TARGET/Q8_0.gguf, both of the very weights that Hocket runs, dequantised. Knows no peer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from safetensors.torch import save_file

from engine.weights import config as hf_config
from engine.weights.cache import default_cache_dir, quiet
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from engine.weights.fetch import resolve

WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")  # fields the writer sets itself


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder to write to")
    parser.add_argument("--model", default="default", help="as for `hocket serve` (default: the default model)")
    asked = parser.parse_args()
    print(folder(prepare(asked.model), asked.target / "float32"))
    source = resolve(asked.model, default_cache_dir(), quiet)
    if source.is_file():
        print(q8_0(source, asked.target / "Q8_0.gguf"))


def folder(checkpoint: Checkpoint, target: Path) -> Path:
    """Write the checkpoint as a Hugging Face folder of plain float32 tensors; returns it."""
    target.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.float().contiguous() for name, tensor in checkpoint.tensors().items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    tokens = {"bos_token_id": checkpoint.bos_id, "eos_token_id": list(checkpoint.eos_ids)}
    _write(target / "config.json", hf_config.to_json(checkpoint.config) | tokens | {"dtype": "float32"})
    _write(target / "generation_config.json", tokens)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": checkpoint.template}
    _write(target / "tokenizer_config.json", names | checkpoint.special_tokens)
    (target / "tokenizer.json").write_bytes(checkpoint.tokenizer_path.read_bytes())
    return target


def q8_0(source: Path, target: Path) -> Path:
    """Write the GGUF `source` again with every matrix in Q8_0 blocks (8 bits, groups of 32); returns `target`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, field in reader.fields.items():
        if not name.startswith(WRITTEN_ANEW):
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        if len(shape) == 2 and shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")


if __name__ == "__main__":
    main()
