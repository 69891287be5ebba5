"""What the CPU that is compiled for can do beyond what plain LLVM IR asks of any.

Owns the decision, for the whole process and once. VNNI: four products of bytes added to an int32, in each of 16 lanes, by one
instruction. F16C: float16 widened by one. Both are exact, so they change the speed and no bit of any result.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.codegen import get_host_cpu_features

from engine.core import EngineError

# HOCKET_SIMD=portable leaves both out: for tests, and for whoever doubts an instruction.
_ASKED = os.environ.get("HOCKET_SIMD", "")
if _ASKED not in ("", "portable"):
    raise EngineError(f"HOCKET_SIMD: expected portable or nothing, got {_ASKED!r}")

_config: Any = numba.config
# As Numba has them, which its NUMBA_CPU_NAME and NUMBA_CPU_FEATURES can change.
CPU = _config.CPU_NAME or llvm.get_host_cpu_name()
FEATURES = get_host_cpu_features() if _config.CPU_FEATURES is None else _config.CPU_FEATURES

_has = set(FEATURES.split(","))
VNNI = not _ASKED and "+avx512vnni" in _has
F16C = not _ASKED and ("+f16c" in _has or platform.machine() in ("aarch64", "arm64"))
