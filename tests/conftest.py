"""Fixtures for the whole suite. `server` is the real thing: a process with the default model and its own data folder."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the engine does, before any test imports torch

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.weights.cache import default_cache_dir
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from tests.engine import tiny
from tests.serving import Server

collect_ignore = ["clients"]  # opt-in: `make test-clients`


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"), "--exact").start()  # its replies are judged by transformers
    yield running
    running.stop()


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers with flags of their own, not yet started; they are stopped at the end."""
    made: list[Server] = []

    def make(*flags: str) -> Server:
        made.append(Server(tmp_path / f"server{len(made)}", *flags))
        return made[-1]

    yield make
    for running in made:
        running.stop()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that runs in a blink, as a Hugging Face folder, with a cache beside it that has the user's compiled kernels."""
    folder = tiny.write_folder(tmp_path_factory.mktemp("tiny") / "model")
    (folder.parent / "cache").mkdir()
    kernels = default_cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder.parent / "cache" / "kernels").symlink_to(kernels)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_folder: Path) -> Checkpoint:
    return prepare(str(tiny_folder), tiny_folder.parent / "cache")
