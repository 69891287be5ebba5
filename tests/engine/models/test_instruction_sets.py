"""A whole model gives the same logits whatever instructions its kernels were compiled for, bit for bit. (slow: it compiles them anew)"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.weights.checkpoint import Checkpoint
from engine.weights.packed import prepare_packed
from tests.engine.models.test_llama_cpu import ROOT, SOURCES, _others_may_compute, make, new, some_ids, some_tables  # noqa: F401
from tests.engine.stepping import logits

CUTS = [130, 131, 132]  # a chunk that goes through a matrix unit if there is one, single rows, a rest that is a few


def digest(folder: str, kv_dtype: str) -> str:
    """Of the logits of 170 tokens."""
    decoder = new(prepare_packed(Checkpoint(Path(folder))), kv_dtype=kv_dtype)
    ids = some_ids(170)
    (table,) = some_tables([len(ids)])
    return hashlib.sha256(logits(decoder, ids, table, CUTS).tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("simd", ["vector", "portable"])
def test_logits_have_the_same_bits(simd: str, tmp_path: Path) -> None:
    for name in ("Q4_1", "Q8_0"):
        make(*SOURCES[name], tmp_path / name)
    models = (("Q4_1", "bfloat16"), ("Q8_0", "bfloat16"), ("Q4_1", "int8"))
    asked = [(str(tmp_path / name / "converted" / "m"), kv_dtype) for name, kv_dtype in models]
    code = f"from tests.engine.models.test_instruction_sets import digest\nfor asked in {asked!r}: print(digest(*asked))"
    environment = {**os.environ, "HOCKET_SIMD": simd}
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert said.stdout.split() == [digest(*each) for each in asked], said.stderr
