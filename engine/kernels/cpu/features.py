"""What the CPU that is compiled for can do beyond what plain LLVM IR asks of any.

Owns the decision, for the whole process and once. VNNI: four products of bytes added to an int32, in each of 16 lanes, by one
instruction. MATRIX: a matrix unit for bytes and bfloat16 (Intel's AMX). F16C: float16 widened by one instruction. All are exact, or do
what can be done without, so they change the speed and no bit of any result.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.codegen import get_host_cpu_features

from engine.core import EngineError

# For tests, and for whoever doubts an instruction: HOCKET_SIMD=vector leaves MATRIX out, portable all of them.
_ASKED = os.environ.get("HOCKET_SIMD", "")
if _ASKED not in ("", "vector", "portable"):
    raise EngineError(f"HOCKET_SIMD: expected vector, portable or nothing, got {_ASKED!r}")

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def _matrix_allowed() -> bool:
    """Linux gives a process the matrix unit's registers when it asks. (Documentation/arch/x86/xstate.rst)"""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


_config: Any = numba.config
# As Numba has them, which its NUMBA_CPU_NAME and NUMBA_CPU_FEATURES can change.
CPU = _config.CPU_NAME or llvm.get_host_cpu_name()
FEATURES = get_host_cpu_features() if _config.CPU_FEATURES is None else _config.CPU_FEATURES

_has = set(FEATURES.split(","))
VNNI = _ASKED != "portable" and "+avx512vnni" in _has
MATRIX = not _ASKED and VNNI and {"+amx-tile", "+amx-int8", "+amx-bf16"} <= _has and _matrix_allowed()
F16C = _ASKED != "portable" and ("+f16c" in _has or platform.machine() in ("aarch64", "arm64"))
