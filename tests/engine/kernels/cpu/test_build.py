"""Compiled kernels: made once, kept under a name that says what they depend on, and told of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import pytest

from engine.core import EngineError, ModelError
from engine.kernels.cpu import build, features
from engine.kernels.cpu.stage import STAGES
from engine.weights.cache import default_cache_dir, file_sha256, quiet

ROOT = Path(__file__).parents[4]

# A process that wants stages: prints the folder, what it was told, and which stages came from the cache.
WANTS = """
import json, sys
from pathlib import Path
from engine.kernels.cpu import attention, build, kv, linear, rows
from engine.kernels.cpu.stage import STAGES
told = []
cache_dir, *names = sys.argv[1:]
print("started", flush=True)
sys.stdin.readline()
build.prepare(Path(cache_dir), names, lambda stage, fraction: told.append([stage, fraction]))
hits = {}
for name in names:
    STAGES[name].address
    hits[name] = STAGES[name].from_cache
print(json.dumps({"told": told, "hits": hits}), flush=True)
"""


class Wanting:
    """That process; it begins when it is told to."""

    def __init__(self, cache_dir: Path, *names: str) -> None:
        command = [sys.executable, "-c", WANTS, str(cache_dir), *names]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def begin(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stdout.readline() == "started\n"
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, err
        return dict(json.loads(out))


def want(cache_dir: Path, *names: str) -> dict[str, Any]:
    process = Wanting(cache_dir, *names)
    process.begin()
    return process.end()


@pytest.mark.slow
def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    """Two processes that come at once to an empty cache: one compiles, telling how far it is, the other waits and says so; both load the
    result, as every later one does. Folders of other sources go when nobody has used them for long."""
    kernels = tmp_path / "kernels"
    day = 86400
    for name, age in (("old", 31 * day), ("lately-used", 29 * day)):
        (kernels / name).mkdir(parents=True)
        mark = kernels / name / "run.done"
        mark.touch()
        os.utime(mark, (time.time() - age,) * 2)
    (kernels / "half-made").mkdir()
    both = [Wanting(tmp_path, "embed") for _ in range(2)]
    for process in both:
        process.begin()
    said = [process.end() for process in both]
    assert [each["hits"] for each in said] == [{"embed": True}] * 2
    compiling = [[fraction for stage, fraction in each["told"] if stage == "compiling the kernels, once"] for each in said]
    assert sum(bool(each) for each in compiling) == 1
    assert max(compiling) == [0.0, 0.5, 1.0], "the loop over stages, and the stage"
    waited = said[compiling.index([])]["told"]
    assert waited == [["waiting for another process", None]]
    assert {folder.name for folder in kernels.iterdir()} == {"lately-used", "half-made", build.folder(tmp_path).name}

    home = build.folder(tmp_path)
    (home / "run.done").touch()
    os.utime(home / "run.done", (0, 0))
    assert want(tmp_path, "embed") == {"told": [], "hits": {"embed": True}}
    assert time.time() - (home / "run.done").stat().st_mtime < 100, "a folder in use is not an old one"


def test_a_second_process_compiles_nothing() -> None:
    """Every stage that the first one asked for comes from the cache, and nothing is told."""
    names = ["rms_norm", "linear_q4_1_coarse", "attend_bfloat16", "merge"]
    build.prepare(default_cache_dir(), names, quiet)
    assert want(default_cache_dir(), *names) == {"told": [], "hits": dict.fromkeys(names, True)}


@pytest.mark.slow
def test_stages_of_different_children_do_not_mix(tmp_path: Path) -> None:
    """Machine code made in one process at a time is loaded side by side: each stage still calls its own functions."""
    code = """
import numpy as np
from tests.engine.kernels.cpu.test_kv import Store, angles, stored
for kind in ("float32", "bfloat16", "int8"):
    cos, sin = angles(4, 16)
    nothing = np.zeros(1, np.int64)
    store = Store(kind, np.ones((1, 48), np.float32), 1, 16, nothing, nothing, cos, sin).run()
    for lies in stored(kind, store.pages, 16):
        assert np.allclose(lies[0], 1), (kind, lies[0])
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # the bench has each stage prepared when it is first run
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def finish(home: Path, name: str) -> None:
    """As if a stage had been compiled."""
    (home / f"{name}.nbc").write_bytes(b"code")
    (home / f"{name}.done").write_text(json.dumps({f"{name}.nbc": file_sha256(home / f"{name}.nbc")}))


@pytest.mark.slow
def test_damaged_machine_code_is_made_again(tmp_path: Path) -> None:
    """A truncated, zeroed or missing file is noticed before anything is loaded, and only its stage is compiled again."""
    want(tmp_path, "embed", "merge")
    home = build.folder(tmp_path)
    for damage in (
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        Path.unlink,
        lambda path: (home / "embed.done").write_text("torn"),
    ):
        (code,) = home.rglob("*rows.embed*.nbc")
        damage(code)
        again = want(tmp_path, "embed", "merge")
        assert again["told"] == [["compiling the kernels, once", fraction] for fraction in (0.0, 1.0)]
        assert again["hits"] == {"embed": True, "merge": True}
        assert want(tmp_path, "embed", "merge")["told"] == []


def test_numba_without_compiling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(EngineError, match="NUMBA_DISABLE_JIT"):
        build.prepare(tmp_path, ["embed"], quiet)


def test_what_is_there_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only stages that are missing are compiled, each named once, in a child; and what it says is passed on."""
    home = build.folder(tmp_path)
    calls: list[list[str]] = []

    def compile_them(module: str, arguments: list[str], stage: str, progress: Callable[[str, float | None], None], _: object) -> None:
        calls.append(arguments)
        home.mkdir(parents=True, exist_ok=True)
        for name in arguments[1:]:
            finish(home, name)
        progress(stage, 1.0)

    monkeypatch.setattr(build.child, "run", compile_them)
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    told: list[tuple[str, float | None]] = []
    for names in (["embed", "merge", "embed"], ["merge"], ["merge", "rms_norm"]):
        build.prepare(tmp_path, names, lambda stage, fraction: told.append((stage, fraction)))
    assert calls == [[str(home), "run", "embed", "merge"], [str(home), "rms_norm"]]
    assert told == [("compiling the kernels, once", 1.0)] * 2
    assert str(home) == numba.config.CACHE_DIR


def test_the_folder_is_named_after_all_that_machine_code_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, their names and where they lie (Numba's own index goes by it), the compiler, the CPU and the instructions that are used."""
    names = [build.folder(tmp_path)]
    assert build.folder(tmp_path) == names[0]
    assert build.folder(tmp_path / "elsewhere").name == names[0].name
    assert names[0].parent == tmp_path / "kernels"
    copy = Path(shutil.copytree(Path(build.__file__).parent, tmp_path / "sources", ignore=shutil.ignore_patterns("__pycache__")))
    monkeypatch.setattr(build, "__file__", str(copy / "build.py"))
    names.append(build.folder(tmp_path))
    (copy / "notes.txt").write_text("not a source")
    assert build.folder(tmp_path) == names[-1]
    for source in ("tiles.py", "simd.py", "kv.py"):
        with (copy / source).open("a") as file:
            file.write("#\n")
        names.append(build.folder(tmp_path))
    (copy / "rows.py").rename(copy / "roes.py")
    names.append(build.folder(tmp_path))
    for owner, name, value in (
        (numba, "__version__", "0.0"),
        (llvmlite, "__version__", "0.0"),
        (build.platform, "python_version", lambda: "3.0"),
        (build, "CPU", "abacus"),
        (build, "FEATURES", "+beads"),
        (build, "VNNI", not features.VNNI),
        (build, "MATRIX", not features.MATRIX),
        (build, "F16C", not features.F16C),
    ):
        monkeypatch.setattr(owner, name, value)
        names.append(build.folder(tmp_path))
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.skipif(not features.MATRIX, reason="this CPU has no matrix unit")
def test_a_process_that_may_not_use_the_matrix_unit_has_its_kernels_made_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that compiles them may use it: what it made would be an illegal instruction here."""
    monkeypatch.setattr(build, "MATRIX", False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)  # to have it restored
    build.prepare(tmp_path, ["merge"], quiet)
    assert not build._missing(build.folder(tmp_path), ["run", "merge"])


def test_kernels_for_other_features_are_not_made(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a child process with its parent's CPU features"):
        build.compile_all(tmp_path / "kernels" / "another", ["merge"], lambda fraction: None)


def test_every_source_of_the_kernels_lies_in_the_one_folder() -> None:
    """Or its change would go unseen: the digest reads no other."""
    here = Path(build.__file__).parent
    assert STAGES
    for stage in STAGES.values():
        assert Path(stage.function.__code__.co_filename).parent == here


@pytest.mark.parametrize("taken", ["", "kernels", "locks"])
def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    """It names the folder and what the system said."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    cache_dir = tmp_path / "cache"
    (cache_dir / taken).parent.mkdir(parents=True, exist_ok=True)
    (cache_dir / taken).touch()
    with pytest.raises(EngineError, match=r"Not a directory|File exists") as caught:
        build.prepare(cache_dir, ["embed"], quiet)
    assert str(cache_dir / taken) in str(caught.value)


def test_a_stage_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    home = build.folder(tmp_path)
    home.mkdir(parents=True)
    finish(home, "run")
    with pytest.raises(EngineError, match=r"compiling the kernels, once ended with exit code 1: (?s:.*)KeyError: 'no_such_stage'"):
        build.prepare(tmp_path, ["no_such_stage"], quiet)
    assert [path.name for path in home.iterdir() if path.suffix == ".done"] == ["run.done"]
