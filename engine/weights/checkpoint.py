"""A converted model: the one layout that serving reads.

A plain Hugging Face folder (config.json, model.safetensors, tokenizer.json, chat_template.jinja) and `hocket.json`, which says what else
serving needs and how large each file must be. Knows nothing of where the model came from, and imports torch only to give out tensors.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core import ModelConfig, ModelError
from engine.weights import config as hf_config
from engine.weights import safetensors as st
from engine.weights.tokens import TokenFacts, checked_id

if TYPE_CHECKING:
    import torch

VERSION = 1  # of the layout and of what the converter makes; another version is converted again
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
    """

    __slots__ = (
        "add_bos",
        "bos_id",
        "config",
        "eos_ids",
        "fingerprint",
        "name",
        "path",
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
            eos_ids, bos_id = list(manifest["eos_ids"]), manifest["bos_id"]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path / MANIFEST}: damaged: {type(error).__name__} {error}") from error
        for file in (CONFIG, WEIGHTS, TOKENIZER, *sizes):
            found = (path / file).stat().st_size if (path / file).is_file() else None
            if file not in sizes or sizes[file] != found:
                raise ModelError(f"{path / file}: damaged: {sizes.get(file)} bytes expected, {found} found")
        self.path = path
        self.config: ModelConfig = hf_config.from_json(hf_config.read_json(path / CONFIG), path / CONFIG)
        vocab_size = self.config.vocab_size
        self.eos_ids: tuple[int, ...] = tuple(checked_id(value, vocab_size, "eos_ids", path / MANIFEST) for value in eos_ids)
        self.bos_id: int | None = None if bos_id is None else checked_id(bos_id, vocab_size, "bos_id", path / MANIFEST)
        self.tokenizer_path = path / TOKENIZER
        self.template: str | None = (path / TEMPLATE).read_text("utf-8") if TEMPLATE in sizes else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its Hugging Face name, in the checkpoint's own dtype, memory-mapped: read from the disk when first touched.

        Raises:
            ModelError: the file is damaged, or a tensor is missing or has another shape than the config says.
        """
        from safetensors import SafetensorError, safe_open

        file = self.path / WEIGHTS
        found = {name: entry.shape for name, entry in st.read_header(file).items()}
        hf_config.check_tensors(hf_config.tensor_shapes(self.config), found, file)
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                return {name: opened.get_tensor(name) for name in found}
        except SafetensorError as error:
            raise ModelError(f"{file}: damaged: {error}") from error


def write_facts(folder: Path, name: str, source: Path, config: ModelConfig, tokens: TokenFacts, weights_sha256: str, dtype: str) -> None:
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
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
