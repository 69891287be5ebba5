"""What threads need between them: atomic counters, waiting, and calling a stage by its address.

Owns the instructions; `stage.py` owns what they are for.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from engine.kernels.cpu.vector import I32, I64, address, emit_call, op, pointer


@op(types.int64, address, types.int64)
def fetch_add(b, addr, amount):
    """Add atomically; returns what was there."""
    return b.atomic_rmw("add", pointer(b, addr, I64), amount, "acq_rel")


@op(types.int64, address)
def load_acquire(b, addr):
    return b.load_atomic(pointer(b, addr, I64), "acquire", 8)


@op(types.void)
def relax(b):
    """Let the other half of a core, or the other thread, have this moment."""
    machine = llvm.get_default_triple().split("-")[0]
    if machine == "x86_64":
        emit_call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine in ("aarch64", "arm64"):
        emit_call(b, "llvm.aarch64.hint", ir.VoidType(), I32(1))  # yield


@op(types.void)
def yield_core(b):
    """Let another thread that waits for a core have this one."""
    emit_call(b, "sched_yield", I32)


@op(types.void, address, address, address, types.int64, types.int64, types.int64)
def call_stage(b, function, table, step, first, last, thread):
    """Call a compiled stage by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 5)
    b.call(b.inttoptr(function, kind.as_pointer()), [table, step, first, last, thread])
