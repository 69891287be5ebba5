"""One live thread of a process may enter OpenMP (the engine's): the tests' own torch operations stay out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.core import EngineOptions
from engine.engine import Engine
from engine.models.llama_cpu import CpuLlama
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from tests.engine import tiny

torch.set_num_threads(1)

DEFAULTS: dict[str, Any] = {"max_batch_size": 9, "max_step_tokens": 512, "max_total_tokens": 4096}


@pytest.fixture(scope="session")
def quantised(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny model in Q4_1, as the default model is: its activations go through int8."""
    config = tiny.config(hidden_size=64, intermediate_size=96, head_dim=32, context_length=512)
    path = tiny.write_gguf(tmp_path_factory.mktemp("q4_1") / "m.gguf", config, kind=GGMLQuantizationType.Q4_1)
    return prepare(str(path), tiny_folder.parent / "cache")


@pytest.fixture
def new_engine(tiny_folder: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines from a checkpoint and options."""
    made: list[Engine] = []

    def make(checkpoint: Checkpoint, **options: Any) -> Engine:
        given = DEFAULTS | {"model": "tiny", "cache_dir": tiny_folder.parent / "cache"} | options
        made.append(Engine(checkpoint, EngineOptions(**given)))
        return made[-1]

    yield make
    for engine in made:
        decoder = engine.runner.decoder
        if isinstance(decoder, CpuLlama):
            decoder.close()  # other tests' engine threads may compute
