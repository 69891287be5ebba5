"""An engine for what is measured inside: the CPU kernels on a model that runs in a blink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from engine.core import EngineOptions
from engine.engine import Engine
from engine.models.llama_cpu import CpuLlama
from engine.weights.cache import quiet
from tests.engine import tiny


@pytest.fixture(scope="module")
def cpu_engine(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """In Q4_1, as the default model is."""
    config = tiny.config(hidden_size=64, intermediate_size=96, head_dim=32, context_length=512)
    path = tiny.write_gguf(tmp_path_factory.mktemp("q4_1") / "m.gguf", config, kind=GGMLQuantizationType.Q4_1)
    options = EngineOptions(model=str(path), cache_dir=tiny_folder.parent / "cache", max_total_tokens=5120, max_step_tokens=64)
    engine = Engine.load(options, quiet)
    yield engine
    assert isinstance(engine.runner.decoder, CpuLlama)
    engine.runner.decoder.close()  # other tests' engine threads may compute
