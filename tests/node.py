"""Node's scripts for tests: the packages that a lock file names, installed once into the user's cache, and runs of scripts beside them.

Owns where packages are kept and how a script's lines come back; does not know what the scripts do.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from engine.weights.cache import default_cache_dir

OLDEST = (20, 10)  # the first with a WebSocket of its own, behind a flag up to 21
NPM_CI = ("npm", "ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error")


class Node:
    """Scripts in a folder of the tree that has a package.json and a package-lock.json."""

    def __init__(self, scripts: Path, scratch: Path) -> None:
        """scratch: an empty folder. The scripts are copied there, to find their packages without these being in the tree."""
        self._scripts = scratch
        shutil.copytree(scripts, scratch, dirs_exist_ok=True)
        (scratch / "node_modules").symlink_to(_installed(scripts))

    def run(self, script: str, *arguments: str, environment: dict[str, str], seconds: float = 120) -> list[Any]:
        """As `json_lines` does."""
        flags = ("--experimental-websocket",) if version() < (22,) else ()
        return json_lines("node", *flags, str(self._scripts / script), *arguments, environment=environment, seconds=seconds)


def json_lines(*command: str, environment: dict[str, str], seconds: float = 120) -> list[Any]:
    """The lines of JSON that a command prints. That it fails, or has anything to say on stderr, is a failure."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    ended = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=seconds)
    assert (ended.returncode, ended.stderr) == (0, ""), f"{' '.join(command)}\n{ended.stdout}{ended.stderr}"
    return [json.loads(line) for line in ended.stdout.splitlines()]


def version() -> tuple[int, ...]:
    """Of the node that there is."""
    text = subprocess.run(("node", "--version"), check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in text.strip().removeprefix("v").split("."))


def _installed(scripts: Path) -> Path:
    """The folder of the packages that `scripts` needs; npm is asked for them once for each state of its two files."""
    wanted = [scripts / "package.json", scripts / "package-lock.json"]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in wanted)).hexdigest()
    folder = default_cache_dir() / "npm" / digest[:16]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".new"))
        try:
            for file in wanted:
                shutil.copy(file, draft)
            ended = subprocess.run(NPM_CI, cwd=draft, capture_output=True, text=True)
            assert ended.returncode == 0, f"{' '.join(NPM_CI)}\n{ended.stdout}{ended.stderr}"
            draft.rename(folder)
        except OSError:
            assert folder.exists(), f"expected {draft} to become {folder}"  # another process was faster
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder / "node_modules"
