"""The numbers of one step, as every kernel set takes them.

Owns their layout. Rows are the step's tokens: the chunks of a `StepPlan`, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True, frozen=True)
class Span:
    """One sequence's rows in a step and the KV they attend to."""

    first: int  # its first row
    rows: int
    context: int  # tokens up to and including its last row; row r sees positions < context - rows + r + 1
    table: Integers  # [ceil(context / block_size)] block ids


@dataclass(slots=True, frozen=True)
class Batch:
    tokens: Integers  # [rows]
    positions: Integers  # [rows]
    slots: Integers  # [rows] block id * block_size + offset, where the row's K and V go
    spans: list[Span]
    sample_rows: Integers  # [sampling chunks] the rows whose logits are wanted
