"""A model's weights as the CPU kernels read them: packed once, read as they are from then on.

`prepare_packed` is the door. Owns what a packed model is made of and when its file is good; `packing` makes the file. Knows no kernels,
and imports neither torch nor transformers nor gguf.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.core import ModelConfig, ModelError
from engine.weights import blocks, child, packing
from engine.weights.blocks import Array
from engine.weights.cache import Progress, content_digest, locked, publish, quiet, staging
from engine.weights.checkpoint import Checkpoint
from engine.weights.config import read_json
from engine.weights.packing import DATA, MANIFEST, PACKED_VERSION, Plan


@dataclass(slots=True, frozen=True, eq=False)
class PackedLinear:
    """The weights of one product y = W x, in tiles of 16 outputs (`blocks` says how).

    Rows are those of a tensor, or of several: q then k then v; gate and up in units of 64, each 32 rows of gate and the same 32 of up.
    """

    format: str  # "q4_0" | "q4_1" | "q8_0" | "float32" | "bfloat16"
    outputs: int  # rows; those of gate and up count with their padding, which lies among them
    padded_outputs: int  # rows with zeros added up to a multiple of 16
    inputs: int  # columns, zeros added up to a multiple of 32
    data: Array  # uint8, flat, read-only; starts at a multiple of 64 bytes

    def dequantised(self) -> Array:
        """float32 [outputs, inputs]: what the weights mean."""
        return blocks.untiled(self.format, self.data, self.inputs)[: self.outputs]


@dataclass(slots=True, frozen=True, eq=False)
class PackedLayer:
    """One decoder layer. Norms are float32 [hidden_size], biases float32 [padded_outputs], in the order of their product's rows."""

    input_norm: Array
    qkv: PackedLinear  # rows of q, then k, then v
    qkv_bias: Array | None
    out: PackedLinear  # inputs: heads * head_dim, padded
    out_bias: Array | None
    mlp_norm: Array
    gate_up: PackedLinear  # of 64 rows each: 32 of gate, the same 32 of up; intermediate_size is padded to a multiple of 32
    gate_up_bias: Array | None
    down: PackedLinear  # inputs: intermediate_size, padded
    down_bias: Array | None


@dataclass(slots=True, frozen=True, eq=False)
class PackedModel:
    """A whole model, ready for the kernels."""

    config: ModelConfig
    layers: list[PackedLayer]
    norm: Array  # float32 [hidden_size]
    head: PackedLinear
    embedding: PackedLinear  # rows are tokens; the same object as `head` when they are tied
    nbytes: int  # of the packed file


def prepare_packed(checkpoint: Checkpoint, weights: str = "auto", progress: Progress = quiet) -> PackedModel:
    """`checkpoint` packed as `weights`, made first if the cache has it not, beside the checkpoint (as `convert.prepare` gives it).

    weights:
        "auto": a GGUF's Q4_0, Q4_1 and Q8_0 as they are, its other quantised kinds as int8; float32 and bfloat16 as they are, float16
            as float32.
        "int8": Q4_0, Q4_1 and Q8_0 as they are, every other matrix in groups of 32 int8 values and a float16 scale (q8_0).
        "float32", "bfloat16": dequantised, or cast.

    The tensors of one product have one format: floats of several kinds become float32, other mixtures int8. Several processes may ask at
    once: one packs, the others wait for it.

    Raises:
        ModelError: the CPU kernels cannot run the model, a weight does not fit the format, or the cache cannot be written; says why.
    """
    try:
        return _prepare(checkpoint, weights, progress)
    except OSError as error:
        raise ModelError(f"{checkpoint.name}: {error}") from error


def _prepare(checkpoint: Checkpoint, weights: str, progress: Progress) -> PackedModel:
    plan = packing.plan(checkpoint, weights)
    folder = checkpoint.path.with_name(f"{checkpoint.path.name}-{weights}-p{PACKED_VERSION}")
    cache_dir = folder.parent.parent
    key = f"pack-{folder.name}"
    if not _is_good(folder, plan, cache_dir, progress):
        with locked(cache_dir / "locks" / key, progress):
            if not _is_good(folder, plan, cache_dir, progress):
                with staging(folder.parent, key) as staged:
                    child.run(packing.__name__, [str(checkpoint.path), str(staged), weights], "packing the weights", progress)
                    publish(staged, folder)
    return _open(folder, plan, checkpoint.config)


def _is_good(folder: Path, plan: Plan, cache_dir: Path, progress: Progress) -> bool:
    """The folder holds just what the plan says, its bytes unchanged (they are read only where the file has changed since the last time)."""
    try:
        said = read_json(folder / MANIFEST)
        if said != plan.to_json() | {"sha256": said.get("sha256")} or (folder / DATA).stat().st_size != plan.size:
            return False
        return bool(content_digest([folder / DATA], cache_dir, progress) == said["sha256"])
    except (ModelError, OSError):
        return False


def _read(path: Path) -> Array:
    """A file's bytes, at a cache line's start. In memory of our own, which Linux gives in large pages: a mapped file's are of 4 KiB, and a
    step that reads all weights once would look up every one of them."""
    size = path.stat().st_size
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    data = room[start : start + size]
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < size:
            count = file.readinto(data[done:])  # type: ignore[arg-type]
            if not count:
                raise ModelError(f"{path}: expected {size} bytes, got {done}")
            done += count
    data.flags.writeable = False
    return data


def _open(folder: Path, plan: Plan, config: ModelConfig) -> PackedModel:
    data = _read(folder / DATA)

    def linear(key: str) -> PackedLinear:
        item = plan.items[key]
        part = data[item.offset : item.offset + item.size]
        return PackedLinear(item.format, item.outputs, item.padded_outputs, item.inputs, part)

    def vector(key: str) -> Array:
        return linear(key).data.view(np.float32)

    def bias(key: str) -> Array | None:
        return vector(key) if key in plan.items else None

    layers = [
        PackedLayer(
            input_norm=vector(f"{key}.input_norm"),
            qkv=linear(f"{key}.qkv"),
            qkv_bias=bias(f"{key}.qkv_bias"),
            out=linear(f"{key}.out"),
            out_bias=bias(f"{key}.out_bias"),
            mlp_norm=vector(f"{key}.mlp_norm"),
            gate_up=linear(f"{key}.gate_up"),
            gate_up_bias=bias(f"{key}.gate_up_bias"),
            down=linear(f"{key}.down"),
            down_bias=bias(f"{key}.down_bias"),
        )
        for key in (f"layers.{layer}" for layer in range(config.layers))
    ]
    head = linear("head")
    return PackedModel(config, layers, vector("norm"), head, head if config.tied_head else linear("embedding"), plan.size)
