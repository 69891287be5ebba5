"""What this CPU can do that plain LLVM IR does not ask for.

Owns the decision, for the whole process and once. VNNI: four products of bytes added to an int32, in each of 16 lanes, by one
instruction. It is exact integer arithmetic, so it changes the speed and no bit of any result.
"""

from __future__ import annotations

import os

import llvmlite.binding as llvm

# HOCKET_SIMD=portable leaves the instruction out: for tests, and for whoever doubts it.
PORTABLE = os.environ.get("HOCKET_SIMD") == "portable"
VNNI = not PORTABLE and bool(llvm.get_host_cpu_features().get("avx512vnni"))
