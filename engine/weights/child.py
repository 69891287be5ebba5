"""Work on weights in a child process, which has the memory and the imports that the work needs; the caller's process never does.

Owns how the two talk: the child says how far it is in JSON lines on its standard output, {"progress": 0.5}, or {"error": "..."} before
it fails. Knows nothing of what the work is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import engine
from engine.core import ModelError
from engine.weights.cache import Progress

_STDERR_TAIL = 2000  # characters
_NOTHING: Mapping[str, str] = {}


def run(module: str, arguments: Sequence[str], stage: str, progress: Progress, environment: Mapping[str, str] = _NOTHING) -> None:
    """Run `python -m module arguments...` to its end and show its progress as that of `stage`; environment: what to add to this process's.

    The module's main program answers with `answer`. arguments[0] names the work's subject in errors.

    Raises:
        ModelError: the child said one, or ended in another way than it should.
    """
    progress(stage, 0.0)
    # The child must find this very package, and (-P) no module that happens to lie in the working directory.
    package = str(Path(engine.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-P", "-m", module, *arguments]
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            command, env={**os.environ, **environment, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        )
        assert child.stdout is not None
        error = None
        with child.stdout:
            try:
                for said in _json_lines(child.stdout):
                    error = said.get("error", error)
                    if "progress" in said:
                        progress(stage, said["progress"])
                child.wait()
            finally:
                child.kill()
                child.wait()
        if error is not None:
            raise ModelError(error)
        if child.returncode != 0:
            stderr.seek(0)
            tail = stderr.read().decode(errors="replace").strip()[-_STDERR_TAIL:]
            raise ModelError(f"{arguments[0]}: {stage} ended with exit code {child.returncode}: {tail or 'nothing was said'}")


def _json_lines(stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in stream:
        with contextlib.suppress(ValueError):  # what a library prints
            said = json.loads(line)
            if isinstance(said, dict):
                yield said


def answer(work: Callable[[Callable[[float], None]], None]) -> int:
    """In the child: do `work`, which is given where to report the fraction done; the exit code."""

    def say(**said: object) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    try:
        work(lambda fraction: say(progress=round(fraction, 4)))
    except (ModelError, OSError) as error:
        say(error=str(error))
        return 1
    return 0
