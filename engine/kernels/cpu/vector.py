"""SIMD vector types as ordinary values in Numba code, and how operations on them are declared.

Owns `f32x16`, `i32x16` and `b8x64`, which are Numba types backed by LLVM vectors, and `op`, which turns a few lines of LLVM IR into a
function that compiled code can call. The operations are in `simd.py` (one vector), `simd_rows.py` (one for each row) and `sync.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16


F32, I32, I8, I16, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(16), ir.IntType(64)


class Vector(types.Type):
    """A fixed-length vector of `lanes` elements of LLVM type `elem`."""

    def __init__(self, name: str, elem: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(elem, lanes)
        super().__init__(name=name)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


f32x16, i32x16, b8x64 = Vector("f32x16", F32, LANES), Vector("i32x16", I32, LANES), Vector("b8x64", I8, 4 * LANES)
address = types.intp
F32X16, I32X16, B8X64 = f32x16.llvm, i32x16.llvm, b8x64.llvm


def op(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Declare a Numba function from `emit(builder, *llvm_values) -> llvm_value`."""
    return generic_op(lambda *_: (result, arguments), len(arguments))


def generic_op(signature: Callable[..., tuple[types.Type, tuple[types.Type, ...]]], count: int) -> Callable[[Callable[..., Any]], Any]:
    """The same, where `signature(*argument types)` gives the types of result and arguments."""

    def declare(emit: Callable[..., Any]) -> Any:
        def typed(_context: Any, *given: types.Type) -> Any:
            result, arguments = signature(*given)

            def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                value = emit(builder, *args)
                return context.get_dummy_value() if result is types.void else value

            return result(*arguments), codegen

        names = ", ".join(f"a{i}" for i in range(count))  # intrinsic() wants named parameters
        scope: dict[str, Any] = {"typed": typed}
        exec(
            f"def {emit.__name__}(typingctx, {names}): return typed(typingctx, {names})" if count else _NO_ARGUMENTS.format(emit.__name__),
            scope,
        )
        scope[emit.__name__].__doc__ = emit.__doc__
        return intrinsic(scope[emit.__name__])

    return declare


_NO_ARGUMENTS = "def {}(typingctx): return typed(typingctx)"


def pointer(b: Any, addr: Any, kind: ir.Type) -> Any:
    return b.inttoptr(addr, kind.as_pointer())


def emit_load(b: Any, addr: Any, kind: ir.Type, align: int = 1) -> Any:
    value = b.load(pointer(b, addr, kind))
    value.align = align
    return value


def emit_store(b: Any, addr: Any, value: Any, align: int = 1) -> None:
    b.store(value, pointer(b, addr, value.type)).align = align


def emit_splat(b: Any, scalar: Any, kind: ir.VectorType) -> Any:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def lanes(value: float, kind: ir.VectorType = F32X16) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def emit_call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), list(args))


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return emit_call(b, "llvm.fma.v16f32", F32X16, x, y, z)
