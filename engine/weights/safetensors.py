"""safetensors files, read with distrust and written one tensor at a time; and a Llama in a Hugging Face folder.

Owns the file format (8 bytes of header length, a JSON header, the tensors' bytes) so that converting a model larger than memory copies byte
ranges and needs no torch. Pickles are never opened: loading one runs whatever code its author put there (CVE-2025-32434).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.core import ModelError
from engine.weights import config as hf_config
from engine.weights.config import Json, read_json
from engine.weights.tokens import TokenFacts, checked_id, end_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FLOATS = ("F32", "F16", "BF16")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
_CHUNK = 1 << 24  # bytes copied at once
_MAX_DIMS = 8
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Left in old checkpoints beside the weights; transformers derives it from the config and so does the decoder.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(slots=True, frozen=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: str  # "F32" | "F16" | "BF16" | "U8"
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    size: int  # bytes


def read_header(path: Path, dtypes: Collection[str] = _FLOATS) -> dict[str, Entry]:
    """The tensors of a safetensors file, each of one of `dtypes`.

    Raises:
        ModelError: the header is not JSON of the known form, or does not fit the file.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if length < 8 or not 2 <= size <= min(_MAX_HEADER, length - 8):
            raise ModelError(f"{path}: safetensors header: {size} bytes cannot be in a file of {length}: truncated, or no safetensors file")
        raw = file.read(size)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: safetensors header: expected JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: safetensors header: expected a JSON object, got {type(header).__name__}")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, said, 8 + size, length, dtypes) for name, said in header.items()}
    end = 8 + size
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset != end:
            raise ModelError(f"{path}: tensor {name}: expected to start at {end}, where the one before ends, got {entry.offset}")
        end += entry.size
    if end != length:
        raise ModelError(f"{path}: expected {end} bytes, got {length}")
    return entries


def _entry(path: Path, name: str, said: Any, start: int, length: int, dtypes: Collection[str]) -> Entry:
    try:
        dtype, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
        whole = len(shape) <= _MAX_DIMS and all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ModelError(f"{path}: tensor {name}: expected dtype, shape and data_offsets, got {str(said)[:200]}")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise ModelError(f"{path}: tensor {name}: dtype: expected one of {', '.join(dtypes)}, got {dtype!r}")
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype] or start + end > length:
        raise ModelError(
            f"{path}: tensor {name}: {dtype} of shape {shape} does not fit bytes {begin} to {end} of {length - start}: "
            "truncated, or its header lies"
        )
    return Entry(dtype, tuple(shape), path, start + begin, end - begin)


def write(
    path: Path, kinds: Mapping[str, tuple[str, tuple[int, ...]]], buffers: Callable[[str], Iterable[Any]], report: Callable[[float], None]
) -> str:
    """Write a safetensors file and return the SHA-256 of its bytes.

    `kinds` gives each tensor's dtype and shape; `buffers(name)` gives its little-endian bytes, in pieces. Wide dtypes come first,
    which keeps every tensor aligned to its items; `report` gets the fraction written.
    """
    order = sorted(kinds, key=lambda name: (-_ITEM_BYTES[kinds[name][0]], name))
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = kinds[name]
        begin, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            file.write(piece)
            digest.update(piece)
        for name in order:
            for buffer in buffers(name):
                file.write(buffer)
                digest.update(buffer)
                written += memoryview(buffer).nbytes
            if written != header[name]["data_offsets"][1]:
                raise AssertionError(f"{name}: {header[name]} announced, {written} bytes written so far")
            report(written / end)
    return digest.hexdigest()


class FolderModel:
    """A Llama in a Hugging Face folder: config.json, safetensors (one file, or shards and their index), tokenizer files."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError: files are missing, pickled or damaged, or the model is not a Llama this package can run."""
        self.path = folder
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: expected a Hugging Face model folder: config.json is missing")
        self._raw = read_json(folder / "config.json")
        self.config = hf_config.from_json(self._raw, folder / "config.json")
        shapes = hf_config.tensor_shapes(self.config)
        entries = {name: entry for name, entry in _weights(folder).items() if not _DERIVED.fullmatch(name)}
        if self.config.tied_head:
            entries.pop("lm_head.weight", None)  # some tied checkpoints carry the table twice
        hf_config.check_tensors(shapes, {name: entry.shape for name, entry in entries.items()}, folder)
        self.entries = entries

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, as they are."""
        entry = self.entries[name]
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            yield from _read(file, entry)

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.json, or what transformers makes of the older files; no code of the model's is run."""
        from tokenizers import Tokenizer

        path = self.path / "tokenizer.json"
        if path.is_file():
            try:
                return Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises Exception itself
                raise ModelError(f"{path}: not a tokenizer: {error}") from error
        from transformers import AutoTokenizer

        try:
            made = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever the many readers of old formats raise
            raise ModelError(
                f"{self.path}: no tokenizer.json, and transformers could not make one: {type(error).__name__}: {error}"
            ) from error
        backend = getattr(made, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelError(f"{self.path}: no tokenizer.json, and transformers has no fast tokenizer for {type(made).__name__}")
        return backend

    def tokens(self, tokenizer: Tokenizer) -> TokenFacts:
        """What config.json, generation_config.json and tokenizer_config.json say of `tokenizer`'s tokens."""
        size = self.config.vocab_size
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if (highest := max(vocabulary.values(), default=-1)) >= size:
            raise ModelError(f"{self.path}: the tokenizer has ids up to {highest}, the embedding only {size} rows")
        settings = self._optional("tokenizer_config.json")
        named_texts = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(settings.get(name))) is not None and text in vocabulary
        }
        eos: list[int] = []
        sources = {"config.json": self._raw, "generation_config.json": self._optional("generation_config.json")}
        for file, raw in sources.items():
            named = raw.get("eos_token_id")
            for value in named if isinstance(named, list) else [] if named is None else [named]:
                eos.append(checked_id(value, size, "eos_token_id", self.path / file))
        if "eos_token" in named_texts:
            eos.insert(0, vocabulary[named_texts["eos_token"]])
        control = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        bos = vocabulary[named_texts["bos_token"]] if "bos_token" in named_texts else self._raw.get("bos_token_id")
        bos_id = None if bos is None else checked_id(bos, size, "bos_token_id", self.path / "config.json")
        texts = {index: text for text, index in vocabulary.items()}
        for name, index in (("bos_token", bos_id), ("eos_token", eos[0] if eos else None)):
            if index is not None and index in texts:
                named_texts.setdefault(name, texts[index])
        return TokenFacts(
            eos_ids=end_ids(eos, control),
            bos_id=bos_id,
            add_bos=bos_id is not None and tokenizer.encode("").ids[:1] == [bos_id],
            template=self._template(settings),
            special_tokens=named_texts,
        )

    def _template(self, settings: Json) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"{path}: expected UTF-8: {error}") from error
        template = settings.get("chat_template") or self._optional("chat_template.json").get("chat_template")
        if isinstance(template, list):  # several, each with a name
            with contextlib.suppress(TypeError, KeyError):
                template = {each["name"]: each["template"] for each in template}.get("default")
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self.path}: chat_template: expected text or a list of named templates, got {type(template).__name__}")
        return template

    def _optional(self, name: str) -> Json:
        path = self.path / name
        return read_json(path) if path.is_file() else {}


def _read(file: IO[bytes], entry: Entry) -> Iterator[bytes]:
    left = entry.size
    while left:
        piece = file.read(min(_CHUNK, left))
        if not piece:
            raise ModelError(f"{entry.file}: ended while it was read, {left} bytes too early")
        left -= len(piece)
        yield piece


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the folder's weights; ModelError if there are none."""
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(names) != 1:
            pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
            reason = "it has several safetensors files and no index" if names else "it has no safetensors file"
            if pickles:
                reason += f", only {pickles[0]}: a pickle, which can run code when loaded and so is never read; convert it to safetensors"
            raise ModelError(f"{folder}: expected model.safetensors or {_INDEX}: {reason}")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{index}: expected the name of a file beside it, got {name!r}")
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ModelError(f"{index}: weight_map: expected an object of tensor names and file names")
    return mapping


def _weights(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder's files; an index must tell the truth about where each is."""
    files = {path.name: read_header(path) for path in weight_files(folder)}
    index = folder / _INDEX
    if not index.is_file():
        return {name: entry for entries in files.values() for name, entry in entries.items()}
    mapping = _weight_map(index)
    for name, file in mapping.items():
        if name not in files[file]:
            raise ModelError(f"{index}: tensor {name} is not in {file}")
    return {name: files[file][name] for name, file in mapping.items()}


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
