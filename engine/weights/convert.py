"""Makes a checkpoint of any model that `fetch.resolve` finds: once, in a child process, into the cache.

The child is `python -m engine.weights.convert SOURCE TARGET NAME`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from engine.core import ModelError
from engine.weights import checkpoint, child, fetch
from engine.weights import safetensors as st
from engine.weights.cache import Progress, content_digest, default_cache_dir, locked, publish, quiet, staging
from engine.weights.checkpoint import Checkpoint

_FOLDER_FILES = ("*.json", "*.jinja", "tokenizer.model")  # beside the weights: what may change what is made of a folder


def prepare(spec: str, cache_dir: Path | None = None, progress: Progress = quiet) -> Checkpoint:
    """The checkpoint of the model `spec` names (see `fetch.resolve`), fetched and converted first if the cache has it not.

    A checkpoint is kept under the digest of its source's content, so a source that moved is not converted again and one that
    changed is. Several processes may prepare the same model at once: one works, the others wait for it.

    Raises:
        ModelError: there is no such model, or it cannot be used; says why.
    """
    try:
        return _prepare(spec, cache_dir or default_cache_dir(), progress)
    except OSError as error:
        raise ModelError(f"{spec}: {error}") from error


def _prepare(spec: str, cache_dir: Path, progress: Progress) -> Checkpoint:
    name = fetch.model_name(spec)
    if spec == "default":
        # The digest is known before the file is there: once converted, the download is not needed, nor read, again.
        ready = _open(_folder(cache_dir, fetch.DEFAULT_MODEL.sha256), name)
        if ready is not None:
            return ready
    source = fetch.resolve(spec, cache_dir, progress)
    digest = content_digest(_source_files(source), cache_dir, progress)
    folder = _folder(cache_dir, digest)
    key = f"convert-{folder.name}"
    if (ready := _open(folder, name)) is not None:
        return ready
    with locked(cache_dir / "locks" / key, progress):
        if (ready := _open(folder, name)) is not None:
            return ready
        with staging(folder.parent, key) as staged:
            child.run(__name__, [str(source), str(staged), name], "converting the model", progress)
            publish(staged, folder)
    return Checkpoint(folder, name)


def _folder(cache_dir: Path, digest: str) -> Path:
    return cache_dir / "converted" / f"{digest[:32]}-v{checkpoint.VERSION}"


def _open(folder: Path, name: str) -> Checkpoint | None:
    """The checkpoint in `folder`; None if there is none or it is damaged, to be made again."""
    try:
        return Checkpoint(folder, name)
    except ModelError:
        return None


def _source_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    others = {path for pattern in _FOLDER_FILES for path in source.glob(pattern) if path.is_file()}
    return sorted({*others, *st.weight_files(source)})


def convert(source: Path, target: Path, name: str, report: Callable[[float], None]) -> None:
    """Write the checkpoint of a GGUF file or Hugging Face folder into the empty folder `target`; `report` gets the fraction done.

    Raises:
        ModelError: the source cannot be used; says why.
    """
    weights, tokenizer_file = target / checkpoint.WEIGHTS, str(target / checkpoint.TOKENIZER)
    quantised: dict[str, str] = {}
    requantise: list[str] = []
    if source.is_dir():
        model = st.FolderModel(source)
        tokenizer = model.tokenizer()
        tokens = model.tokens(tokenizer)
        kinds = {each: (entry.dtype, entry.shape) for each, entry in model.entries.items()}
        sha256 = st.write(weights, kinds, model.pieces, report)
        config, dtype = model.config, kinds["model.embed_tokens.weight"][0]
    else:
        from engine.weights.gguf import GGUFModel
        from engine.weights.gguf_tokenizer import build

        gguf = GGUFModel(source)
        tokenizer = build(gguf.reader())
        config, tokens, dtype = gguf.config, gguf.tokens, "F32"
        quantised, requantise = gguf.quantised, gguf.requantise
        if (size := tokenizer.get_vocab_size(with_added_tokens=True)) != config.vocab_size:
            raise ModelError(f"{source}: the tokenizer has {size} tokens, the embedding {config.vocab_size} rows")
        sha256 = st.write(weights, gguf.kept(), lambda each: [gguf.kept_tensor(each)], report)
    tokenizer.save(tokenizer_file)
    long_dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    checkpoint.write_facts(target, name, source, config, tokens, sha256, long_dtype, quantised, requantise)


def main(arguments: list[str]) -> int:
    """The child's life; its exit code."""
    source, target, name = arguments
    return child.answer(lambda report: convert(Path(source), Path(target), name, report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
