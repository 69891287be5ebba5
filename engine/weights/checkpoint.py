"""A converted model: the one layout that serving reads.

A plain Hugging Face folder (config.json, model.safetensors, tokenizer.json, chat_template.jinja) and `hocket.json`, which says what else
serving needs and how large each file must be. Matrices that a GGUF had in Q4_0, Q4_1 or Q8_0 blocks are those very blocks still: uint8
[rows, bytes per row], their kind in `hocket.json`. Knows nothing of where the model came from, and imports torch only to give out tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core import ModelConfig, ModelError
from engine.weights import config as hf_config
from engine.weights import safetensors as st
from engine.weights.formats import GROUP, KINDS, row_bytes
from engine.weights.tokens import TokenFacts, checked_id

if TYPE_CHECKING:
    import torch

VERSION = 2  # of the layout and of what the converter makes; another version is converted again
CONFIG, WEIGHTS, TOKENIZER, TEMPLATE, MANIFEST = "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "hocket.json"


class Checkpoint:
    """A converted folder, opened. Everything but the tensors is read and checked at once.

    Attributes:
        path: the folder
        name: the model's public name
        fingerprint: what tokenizer, template and weights together are: hexadecimal, the same wherever the same model is converted
        config: the model's shape
        eos_ids: every token that ends a reply, the one the model itself names first first
        bos_id: the token that begins a prompt, if there is one
        add_bos: a prompt begins with `bos_id`, unless the template has written it already
        special_tokens: what templates may ask for: bos_token, eos_token, unk_token, pad_token -> text
        template: the chat template, Jinja text; None if the model has none
        tokenizer_path: the tokenizer, as the `tokenizers` library reads it
        quantised: the matrices that are GGUF blocks, by Hugging Face name, and their kind: "Q4_0", "Q4_1" or "Q8_0"
        requantise: the matrices whose float32 values came from another kind of block: int8 loses little of what they are
    """

    __slots__ = (
        "add_bos",
        "bos_id",
        "config",
        "eos_ids",
        "fingerprint",
        "name",
        "path",
        "quantised",
        "requantise",
        "special_tokens",
        "template",
        "tokenizer_path",
    )

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Open `path`, under another public name if `name` is given.

        Raises:
            ModelError: not a converted folder of this version, or one of its files is missing or has another size than it was written with.
        """
        manifest = hf_config.read_json(path / MANIFEST)
        if manifest.get("version") != VERSION:
            raise ModelError(f"{path}: a converted model of version {VERSION} expected, got {manifest.get('version')!r}")
        try:
            sizes = dict(manifest["files"])
            self.name: str = name or manifest["name"]
            self.fingerprint: str = manifest["fingerprint"]
            self.add_bos: bool = manifest["add_bos"]
            self.special_tokens: dict[str, str] = dict(manifest["special_tokens"])
            self.quantised: dict[str, str] = dict(manifest["quantised"])
            self.requantise: frozenset[str] = frozenset(manifest["requantise"])
            eos_ids, bos_id = list(manifest["eos_ids"]), manifest["bos_id"]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path / MANIFEST}: damaged: {type(error).__name__} {error}") from error
        for file in (CONFIG, WEIGHTS, TOKENIZER, *sizes):
            found = (path / file).stat().st_size if (path / file).is_file() else None
            if file not in sizes or sizes[file] != found:
                raise ModelError(f"{path / file}: damaged: {sizes.get(file)} bytes expected, {found} found")
        if unknown := [kind for kind in self.quantised.values() if kind not in tuple(KINDS)]:
            raise ModelError(f"{path / MANIFEST}: quantised: expected one of {', '.join(KINDS)}, got {unknown[0]!r}")
        self.path = path
        self.config: ModelConfig = hf_config.from_json(hf_config.read_json(path / CONFIG), path / CONFIG)
        vocab_size = self.config.vocab_size
        self.eos_ids: tuple[int, ...] = tuple(checked_id(value, vocab_size, "eos_ids", path / MANIFEST) for value in eos_ids)
        self.bos_id: int | None = None if bos_id is None else checked_id(bos_id, vocab_size, "bos_id", path / MANIFEST)
        self.tokenizer_path = path / TOKENIZER
        self.template: str | None = (path / TEMPLATE).read_text("utf-8") if TEMPLATE in sizes else None

    def entries(self) -> dict[str, st.Entry]:
        """Where each tensor is in the weights' file, by its Hugging Face name.

        Raises:
            ModelError: the file is damaged, or a tensor is missing or has another shape than the config says.
        """
        file = self.path / WEIGHTS
        found = st.read_header(file, ("F32", "F16", "BF16", "U8"))
        expected = hf_config.tensor_shapes(self.config)
        if strange := sorted(name for name in self.quantised if len(expected.get(name, ())) != 2 or expected[name][1] % GROUP):
            raise ModelError(f"{self.path / MANIFEST}: quantised: expected matrices with rows of whole blocks, got {strange[0]}")
        for name, kind in self.quantised.items():
            rows, inputs = expected[name]
            expected[name] = rows, row_bytes(kind, inputs)
        hf_config.check_tensors(expected, {name: entry.shape for name, entry in found.items()}, file)
        for name, entry in found.items():
            if (entry.dtype == "U8") != (name in self.quantised):
                raise ModelError(f"{file}: tensor {name}: {'blocks' if name in self.quantised else 'floats'} expected, got {entry.dtype}")
        return found

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor by its Hugging Face name. One at a time is made as it is asked for:

        those that are floats in the file's own dtype, memory-mapped; those that are blocks dequantised to float32, anew each time.

        Raises:
            ModelError: the file is damaged, or a tensor is missing or has another shape than the config says.
        """
        return _Tensors(self)


class _Tensors(Mapping[str, "torch.Tensor"]):
    """What `Checkpoint.tensors` gives: reads the file, and knows how its blocks become floats."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from safetensors import SafetensorError, safe_open

        self._names = list(checkpoint.entries())
        self._quantised = checkpoint.quantised
        file = checkpoint.path / WEIGHTS
        try:
            self._file: Any = safe_open(file, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ModelError(f"{file}: damaged: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        if name not in self._quantised:
            return tensor
        import torch

        from engine.weights import blocks

        return torch.from_numpy(blocks.dequantised(blocks.split(self._quantised[name], tensor.numpy())))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_facts(
    folder: Path,
    name: str,
    source: Path,
    config: ModelConfig,
    tokens: TokenFacts,
    weights_sha256: str,
    dtype: str,
    quantised: Mapping[str, str],
    requantise: Iterable[str],
) -> None:
    """Complete a folder that holds the weights and the tokenizer: config, template, and last the manifest that makes it a checkpoint."""
    raw: dict[str, Any] = hf_config.to_json(config) | {"dtype": dtype, "bos_token_id": tokens.bos_id, "eos_token_id": list(tokens.eos_ids)}
    (folder / CONFIG).write_text(json.dumps(raw, indent=2))
    if tokens.template is not None:
        (folder / TEMPLATE).write_text(tokens.template, "utf-8", newline="")
    identity = {
        "config": hf_config.to_json(config),
        "tokenizer": hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest(),
        "template": tokens.template,
        "weights": weights_sha256,
    }
    manifest = {
        "version": VERSION,
        "name": name,
        "source": str(source),
        "fingerprint": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32],
        "eos_ids": list(tokens.eos_ids),
        "bos_id": tokens.bos_id,
        "add_bos": tokens.add_bos,
        "special_tokens": tokens.special_tokens,
        "quantised": dict(quantised),
        "requantise": list(requantise),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
