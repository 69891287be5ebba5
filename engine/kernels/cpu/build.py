"""Compiled stages: made once in a child process, kept in the user's cache, loaded in a blink from then on.

Owns where they are kept and when they are made. The folder's name is a digest of all that machine code depends on: every source file of the
kernels, the versions of Numba, llvmlite and Python, and the CPU. Knows no stage by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.bytecode import FunctionIdentity

from engine.core import EngineError, ModelError
from engine.kernels.cpu.features import CPU, F16C, FEATURES, MATRIX, VNNI
from engine.weights import child
from engine.weights.cache import Progress, file_sha256, locked

KEPT_SECONDS = 30 * 86400  # an unused folder of other sources, or of another CPU, is removed after this long
_RUN = "run"  # the loop over stages, which is compiled too


def folder(cache_dir: Path) -> Path:
    """Where the machine code of these sources for this CPU is kept."""

    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    facts = (
        Path(__file__).parent,  # Numba's own index goes by it
        numba.__version__,
        llvmlite.__version__,
        platform.python_version(),
        platform.machine(),
        CPU,
        FEATURES,
        VNNI,
        MATRIX,
        F16C,
    )
    digest.update(repr(facts).encode())
    return cache_dir / "kernels" / digest.hexdigest()[:32]


def prepare(cache_dir: Path, names: Iterable[str], progress: Progress) -> None:
    """Have the stages of these names in the cache, and this process load them from there.

    Several processes may ask at once: one compiles, the others wait for it. Raises: EngineError
    """
    config: Any = numba.config
    if config.DISABLE_JIT:
        raise EngineError("expected Numba to compile, got NUMBA_DISABLE_JIT: unset it, or ask for --kernels reference")
    home = folder(cache_dir)
    use(home)
    wanted = [_RUN, *names]
    if not _missing(home, wanted):
        _touch(home)
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / "locks" / f"kernels-{home.name}", progress):
            if missing := _missing(home, wanted):
                for name in missing:
                    _forget(home, name)
                # What the system refuses this process it may give a child.
                same = {"HOCKET_SIMD": "vector"} if VNNI and not MATRIX else {}
                child.run(__name__, [str(home), *missing], "compiling the kernels, once", progress, same)
        _remove_unused(home)
    except OSError as fault:
        raise EngineError(f"the compiled kernels cannot be kept in {home}: {fault}") from fault


def use(home: Path) -> None:
    """Numba keeps what it compiles from now on in `home`."""
    config: Any = numba.config
    config.CACHE_DIR = str(home)


def compile_all(home: Path, names: Iterable[str], report: Callable[[float], None]) -> None:
    """In the child: compile these stages, one after the other. Raises: ModelError if here they would not be those that `home` is for"""
    if folder(home.parent.parent).name != home.name:
        raise ModelError(f"{home}: expected a child process with its parent's CPU features, got one with others ({MATRIX=})")
    use(home)
    from engine.kernels.cpu import attention, choose, kv, linear, rows  # noqa: F401  (they declare the stages)
    from engine.kernels.cpu.stage import STAGES, Team

    # Numba counts functions from 1 in every process and names their symbols by it: what one child compiled would call what another did.
    FunctionIdentity._unique_ids = itertools.count(time.time_ns())
    listed = list(names)
    known = {home / path for name in STAGES.keys() | {_RUN} for path in _made(home, name)}
    for path in set(home.rglob("*.nb?")) - known:
        path.unlink()  # of a child that was killed: whole or not, nobody knows
    for index, name in enumerate(listed):
        if name == _RUN:
            Team()
        else:
            _ = STAGES[name].address
        made = set(home.rglob("*.nb?")) - known
        draft = _done(home, name).with_suffix(".new")
        draft.write_text(json.dumps({str(path.relative_to(home)): file_sha256(path) for path in sorted(made)}))
        draft.replace(_done(home, name))
        known |= made
        report((index + 1) / len(listed))


def _done(home: Path, name: str) -> Path:
    return home / f"{name}.done"


def _missing(home: Path, names: Iterable[str]) -> list[str]:
    """Those of which not everything that was made is there, whole."""
    return [name for name in dict.fromkeys(names) if not _is_whole(home, name)]


def _made(home: Path, name: str) -> dict[str, str]:
    """The files that a stage is kept in, by their path in `home`, and the SHA-256 of each; none if it was not compiled to its end."""
    try:
        return dict(json.loads(_done(home, name).read_text()))
    except (OSError, ValueError):
        return {}


def _is_whole(home: Path, name: str) -> bool:
    made = _made(home, name)
    try:
        return bool(made) and all(file_sha256(home / path) == sha256 for path, sha256 in made.items())
    except OSError:
        return False


def _forget(home: Path, name: str) -> None:
    """Remove what is left of a stage, so that nothing damaged is loaded."""
    for path in _made(home, name):
        (home / path).unlink(missing_ok=True)
    _done(home, name).unlink(missing_ok=True)


def _touch(home: Path) -> None:
    """Show that the folder is in use."""
    with contextlib.suppress(OSError):  # a cache made for an image may be read-only
        _done(home, _RUN).touch()


def _remove_unused(home: Path) -> None:
    for other in home.parent.iterdir():
        mark = _done(other, _RUN)
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            used = (mark if mark.exists() else other).stat().st_mtime
            if other != home and time.time() - used > KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(child.answer(lambda report: compile_all(Path(sys.argv[1]), sys.argv[2:], report)))
