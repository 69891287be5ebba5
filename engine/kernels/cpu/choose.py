"""The stage that chooses tokens: one item for each row of logits.

Knows what `sampling.py` needs, and nothing of what the tokens are for.
"""

from __future__ import annotations

from engine.kernels.cpu.choices import RECORD_BYTES
from engine.kernels.cpu.rows import CHOICES, CHOSEN
from engine.kernels.cpu.sampling import choose_row
from engine.kernels.cpu.simd import get, st_i64
from engine.kernels.cpu.stage import stage

LOGITS, LOGITS_STRIDE, VOCAB, SCRATCH, SCRATCH_STRIDE, CHOOSE_FIELDS = range(6)
#   LOGITS: float32 rows, LOGITS_STRIDE bytes apart, changed in place; SCRATCH: SCRATCH_STRIDE bytes for each thread


@stage
def choose(table, step, first, last, thread):
    """Items are sampled rows."""
    scratch = get(table, SCRATCH) + thread * get(table, SCRATCH_STRIDE)
    for row in range(first, last):
        logits = get(table, LOGITS) + row * get(table, LOGITS_STRIDE)
        record = get(step, CHOICES) + row * RECORD_BYTES
        st_i64(get(step, CHOSEN) + 8 * row, choose_row(logits, get(table, VOCAB), record, scratch))
