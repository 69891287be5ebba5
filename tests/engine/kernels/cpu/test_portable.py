"""Without the CPU's own instructions for bytes and float16, and without its widest vectors, the integer kernels give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from engine.kernels.cpu import features
from tests.engine.kernels.cpu import integers
from tests.engine.kernels.cpu.workbench import Array

ROOT = Path(__file__).parents[4]


def in_a_process(tmp_path: Path, *names: str, **environment: str) -> dict[str, Array]:
    """What `integers` gives in a fresh process with a cache of its own and HOCKET_SIMD=portable, or as told."""
    out = tmp_path / "out.npz"
    environment = {**os.environ, "HOCKET_SIMD": "portable", "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    command = [sys.executable, "-m", "tests.engine.kernels.cpu.integers", str(out), *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    with np.load(out) as made:
        assert not made["matrix"]
        assert bool(made["vnni"]) == (features.VNNI and environment["HOCKET_SIMD"] == "vector")
        return {name: made[name] for name in made.files if name not in ("vnni", "matrix")}


def check(mine: dict[str, Array], theirs: dict[str, Array]) -> None:
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert values.dtype == theirs[name].dtype
        assert values.tobytes() == theirs[name].tobytes(), name


def test_the_instructions_are_used_where_there_are_any() -> None:
    if os.environ.get("HOCKET_SIMD"):
        pytest.skip("HOCKET_SIMD is set")
    has = llvm.get_host_cpu_features()
    assert bool(has.get("avx512vnni")) == features.VNNI
    unit = all(has.get(name) for name in ("amx-tile", "amx-int8", "amx-bf16", "avx512vnni"))
    assert (unit and features._matrix_allowed()) == features.MATRIX


def test_dots_of_bytes_are_exact(tmp_path: Path) -> None:
    """With the instruction, if there is one, and without: nothing saturates, signs are right, every lane has its own bytes."""
    mine, theirs = integers.dots(), in_a_process(tmp_path)
    for made in (mine, theirs):
        np.testing.assert_array_equal(made["dot"], made["dot_expected"])
        np.testing.assert_array_equal(made["rows"], made["rows_expected"])
    check(mine, theirs)


@pytest.mark.slow
def test_linear_layers_have_the_same_bits(tmp_path: Path) -> None:
    names = ["q4_1 coarse", "q4_1 fine", "q8_0 coarse", "q8_0 fine"]
    check(integers.linears(names), in_a_process(tmp_path, *names))


@pytest.mark.slow
@pytest.mark.skipif(not features.MATRIX, reason="this CPU has no matrix unit")
def test_the_same_bits_without_the_matrix_unit(tmp_path: Path) -> None:
    names = ["q4_1 coarse", "q4_1 fine", "q4_0 coarse", "q4_0 fine", "q8_0 coarse"]
    check(integers.linears(names) | integers.attentions(), in_a_process(tmp_path, *names, "attention", HOCKET_SIMD="vector"))


@pytest.mark.slow
@pytest.mark.skipif(not llvm.get_default_triple().startswith("x86_64"), reason="names an x86 CPU")
@pytest.mark.parametrize("cpu", ["haswell", "generic"])
def test_the_same_bits_on_an_older_cpu(tmp_path: Path, cpu: str) -> None:
    """Compiled for one with vectors of half the width, and for one of 2003: no fused multiply-add, no float16."""
    names = ["q4_1 fine", "q8_0 coarse"]
    mine = integers.linears(names) | integers.attentions()
    check(mine, in_a_process(tmp_path, *names, "attention", NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=""))


def test_a_misspelt_choice_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import engine.kernels.cpu.features"],
        env={**os.environ, "HOCKET_SIMD": "portabel"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "HOCKET_SIMD: expected vector, portable or nothing, got 'portabel'" in done.stderr


def test_float16_is_widened_exactly_without_the_instruction() -> None:
    """Every float16, subnormal, infinite and NaN ones too."""
    code = """
import numpy as np
from numba import njit
from engine.kernels.cpu import features
from engine.kernels.cpu.simd import load_half, store_f32
assert not features.F16C
@njit
def widen(source, out, count):
    for i in range(0, count, 16):
        store_f32(out + 4 * i, load_half(source + 2 * i))
every = np.arange(65536, dtype=np.uint16)
out = np.empty(65536, np.float32)
widen(every.ctypes.data, out.ctypes.data, 65536)
np.testing.assert_array_equal(out, every.view(np.float16).astype(np.float32))
assert (np.signbit(out) == (every >= 32768)).all()
"""
    environment = {**os.environ, "HOCKET_SIMD": "portable"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
