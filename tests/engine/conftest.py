"""One live thread of a process may enter OpenMP (the engine's): the tests' own torch operations stay out of it."""

import torch

torch.set_num_threads(1)

from pathlib import Path  # noqa: E402  (torch's thread count comes before anything else)

import pytest  # noqa: E402

from engine.weights.checkpoint import Checkpoint  # noqa: E402
from engine.weights.convert import prepare  # noqa: E402
from tests.engine import tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_folder: Path) -> Checkpoint:
    return prepare(str(tiny_folder), tiny_folder.parent / "cache")
