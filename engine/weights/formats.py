"""The formats that weights are kept in, and how many bytes each takes: as a GGUF's rows, and as the tiles that CPU kernels read.

Sizes only, and nothing to import; `blocks` has the layouts and the arithmetic.
"""

from __future__ import annotations

GROUP = 32  # inputs that share a scale
LANES = 16  # outputs of a tile
QUANT_BYTES = {"q4_0": 16, "q4_1": 16, "q8_0": 32}  # of one output's group, beside its scale (and minimum)
HALVES = {"q4_0": 1, "q4_1": 2, "q8_0": 1}  # float16 numbers of one output's group: scale, minimum
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
FORMATS = (*QUANT_BYTES, *VALUE_BYTES)
KINDS = {format_.upper(): format_ for format_ in QUANT_BYTES}  # a GGUF's kind of block -> the format that keeps its values


def row_bytes(kind: str, inputs: int) -> int:
    """Bytes of a GGUF row of `inputs` (a multiple of 32) values in blocks of `kind` ("Q4_0", "Q4_1", "Q8_0")."""
    format_ = KINDS[kind]
    return inputs // GROUP * (QUANT_BYTES[format_] + 2 * HALVES[format_])


def tile_bytes(format_: str, inputs: int) -> int:
    """Bytes of a tile of 16 outputs and `inputs` inputs (for quantised formats: a multiple of 32)."""
    if format_ in VALUE_BYTES:
        return LANES * inputs * VALUE_BYTES[format_]
    return LANES * (inputs // GROUP) * (QUANT_BYTES[format_] + 2 * HALVES[format_])
