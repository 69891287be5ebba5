"""The tensors of one step, as every kernel set takes them.

Owns their layout. Rows are the step's tokens: the chunks of a `StepPlan`, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Span:
    """One sequence's rows in a step and the KV they attend to."""

    first: int  # its first row
    rows: int
    context: int  # tokens up to and including its last row; row r sees positions < context - rows + r + 1
    table: torch.Tensor  # [ceil(context / block_size)] int64, block ids


@dataclass(slots=True, frozen=True)
class Batch:
    tokens: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    slots: torch.Tensor  # [rows] int64: block id * block_size + offset, where the row's K and V go
    spans: list[Span]
    sample_rows: torch.Tensor  # [sampling chunks] int64: the rows whose logits are wanted
