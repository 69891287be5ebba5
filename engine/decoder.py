"""What runs a model's steps, chosen by the options: the CPU kernels, or the reference.

Owns the choice and nothing else. Importing this module imports neither torch nor a compiler.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.core import PROMPT_ROWS, EngineOptions, Sequence
from engine.weights.cache import Progress
from engine.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from engine.kernels.batch import Batch

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Logits = np.ndarray[Any, np.dtype[np.float32]]


class Decoder(Protocol):
    """One model with its KV cache. Every call comes from the thread that made it."""

    @property
    def identity(self) -> str:
        """Of the arithmetic: KV made by another one is not what this one would have made."""
        ...

    @property
    def block_bytes(self) -> int:
        """Of a KV block, all layers."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Give one KV block what another holds."""
        ...

    def touch_block(self, block: int) -> None:
        """Have memory for a KV block, which keeps what it holds. The first to write to memory waits for the system to find it."""
        ...

    def save_block(self, block: int, into: Bytes) -> None:
        """Write a KV block's `block_bytes` bytes out."""
        ...

    def load_block(self, block: int, data: Bytes) -> None:
        """Take back what `save_block` gave."""
        ...

    def choose(self, batch: Batch, sequences: list[Sequence]) -> list[int]:
        """Run a step's rows, writing their K and V, and choose a token for each sampled row, in order.

        sequences: those of `batch.sample_rows`. A row whose logits are no numbers gets -1.
        """
        ...

    def forward(self, batch: Batch) -> Logits:
        """The first half of it: the logits float32 [len(batch.sample_rows), vocab]. They may be changed; the next step overwrites them."""
        ...

    def pick(self, sequences: list[Sequence]) -> list[int]:
        """The second half: choose from the first rows of the logits that `forward` gave, as they now are."""
        ...


def sources_digest(root: Path = Path(__file__).parent) -> str:
    """Of every source file that what a decoder computes depends on."""
    digest = hashlib.sha256()
    for source in sorted(path for part in ("kernels", "models", "weights") for path in (root / part).rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def load_decoder(checkpoint: Checkpoint, options: EngineOptions, blocks: int, progress: Progress) -> Decoder:
    """The decoder that `options` ask for, with `blocks` KV blocks. Raises: ModelError, EngineError"""
    if options.kernels == "reference":
        from engine.models.llama import ReferenceDecoder

        return ReferenceDecoder(checkpoint, blocks, options.block_size, options.threads)

    from engine.models.llama_cpu import CpuLlama
    from engine.weights.packed import prepare_packed

    return CpuLlama(
        prepare_packed(checkpoint, options.weights, progress),
        cache_dir=options.cache_dir,
        threads=options.threads,
        blocks=blocks,
        block_size=options.block_size,
        kv_dtype=options.kv_dtype or ("float32" if options.exact else "bfloat16"),
        exact=options.exact,
        max_rows=max(options.max_step_tokens, options.lone_step_tokens),
        max_samples=options.max_batch_size + PROMPT_ROWS,
        progress=progress,
    )
