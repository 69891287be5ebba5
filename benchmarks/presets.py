"""What a step takes on hardware that need not be here: cost models for the simulator, as numbers or derived from peak numbers.

Owns the numbers and the arithmetic behind them. The model itself is `engine.cost.StepCost`, the one that the server bounds its steps by.
"""

from __future__ import annotations

import shlex
import statistics
from dataclasses import dataclass

from engine.cost import StepCost


@dataclass(slots=True, frozen=True)
class Preset:
    cost: StepCost
    overhead: float  # milliseconds of a step outside the model
    pool_tokens: int
    batch: int
    step_tokens: int
    lone_step_tokens: int
    context: int  # tokens
    max_step_ms: float = 100.0  # as the server has it by default


@dataclass(slots=True, frozen=True)
class Gpu:
    """What its data sheet says."""

    bandwidth: float  # bytes per second
    flops: float  # per second, dense, of the type the weights have
    memory: float  # bytes
    link: float  # bytes per second between host memory and its own


@dataclass(slots=True, frozen=True)
class Decoder:
    """The shape of a model with grouped-query attention."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int = 2  # bytes of a number: bfloat16

    @property
    def kv_bytes(self) -> int:
        """Of a token: a key and a value for each layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.width

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.width


def derive(gpu: Gpu, decoder: Decoder, efficiency: float, block_size: int = 16) -> StepCost:
    """Step costs from peak numbers, each peak times `efficiency`. In milliseconds:

    - Reading all weights once takes weight_bytes / bandwidth, however many rows share it. For 8.03e9 parameters of 2 bytes at 4.8 TB/s that
      is 3.35 ms, at an efficiency of 0.6 it is 5.58 ms.
    - Multiplying takes 2 * parameters / flops for a row: 16.06e9 / 989e12 = 0.0162 ms, at 0.6 it is 0.0271 ms.
    - A step takes the longer of the two, so it is flat up to flops / bandwidth (bytes of a number cancel the 2): 206 rows, a straight line
      after that. Up to there more rows are free; from there on a step is as busy as it can be.
    - A decode reads the keys and values of all positions it sees: kv_bytes / bandwidth for each, 131,072 / 4.8e12 = 2.73e-5 ms, at 0.6 it
      is 4.55e-5 ms. 256 decodes that see 1,000 positions each thus add 11.6 ms: twice the weights.
    - A prompt's row and a position it sees cost 4 * layers * heads * head_dim operations (a product with the key, one with the value):
      524,288 / 989e12 = 5.3e-7 ms, at 0.6 it is 8.8e-7 ms. Its keys and values are read once for many rows: nothing beside that.
    - A block comes back over the link, or goes out: 16 * 131,072 bytes at 64 GB/s are 0.033 ms, at 0.6 they are 0.055 ms. To compute it
      takes 0.43 ms.
    """
    seconds = 1e3 / efficiency
    weights = seconds * decoder.weight_bytes / gpu.bandwidth
    row = seconds * 2 * decoder.parameters / gpu.flops
    knee = round(weights / row)
    return StepCost(
        rows=((1, weights), (knee, weights), (2 * knee, 2 * weights)),
        pair=seconds * 4 * decoder.layers * decoder.heads * decoder.head_dim / gpu.flops,
        read=seconds * decoder.kv_bytes / gpu.bandwidth,
        load=seconds * block_size * decoder.kv_bytes / gpu.link,
        save=seconds * block_size * decoder.kv_bytes / gpu.link,
    )


def pool_tokens(gpu: Gpu, decoder: Decoder, spare: float) -> int:
    """What fits beside the weights, but for a share of the memory that activations and the system have.

    For 141 GB, 16.06 GB of weights and 5% spare: (0.95 * 141e9 - 16.06e9) / 131,072 = 899,000 tokens.
    """
    return int(((1 - spare) * gpu.memory - decoder.weight_bytes) / decoder.kv_bytes)


H200 = Gpu(bandwidth=4.8e12, flops=989e12, memory=141e9, link=64e9)  # HBM3e; bfloat16 without sparsity; PCIe 5.0 x16, one way
LLAMA_8B = Decoder(parameters=8.03e9, layers=32, heads=32, kv_heads=8, head_dim=128)

EFFICIENCY = 0.6  # of the peaks, in bandwidth and arithmetic: what good kernels keep up over a whole step, launches included


# `python -m benchmarks.simulate --calibrate ""` on two cores with AVX-512, rounded; a block of 369 kB comes from host memory, or
# goes there, in 0.1 ms.
CPU_COST = StepCost(rows=((1, 2.8), (16, 9.1), (64, 31.0), (128, 60.0)), pair=4.9e-4, read=5.8e-4, load=0.1, save=0.1)


def h200_8b(efficiency: float = EFFICIENCY) -> Preset:
    """An 8B model in bfloat16 on one H200."""
    return Preset(
        cost=derive(H200, LLAMA_8B, efficiency),
        overhead=2.0,
        pool_tokens=pool_tokens(H200, LLAMA_8B, 0.05),
        batch=512,
        step_tokens=2048,
        lone_step_tokens=8192,
        context=8192,
    )


def cpu(cost: StepCost = CPU_COST) -> Preset:
    """The server as it starts by default, on the default model."""
    return Preset(cost, overhead=0.4, pool_tokens=32768, batch=32, step_tokens=128, lone_step_tokens=512, context=8192)


def measured(flags: str, rounds: int = 12) -> StepCost:
    """The cost of steps on this machine, by the engine that `hocket serve` has with these flags. Of some rounds the quickest counts; of
    what is the difference of two times, the middle one.

    Raises: app.settings.SettingsError, engine.core.EngineError
    """
    from app.server import engine_options
    from app.settings import load
    from engine import calibrate
    from engine.engine import Engine, blocks_of
    from engine.weights.cache import quiet

    options = engine_options(load(shlex.split(flags), "hocket serve"))
    engine = Engine.load(options, quiet)
    context = engine.checkpoint.config.context_length
    decoder, blocks = engine.runner.decoder, blocks_of(options)
    found = [calibrate.measure(decoder, blocks, options.block_size, options.max_step_tokens, context, 0.0) for _ in range(rounds)]
    rows = tuple(min(points, key=lambda point: point[1]) for points in zip(*(cost.rows for cost in found), strict=True))
    return StepCost(rows, statistics.median(cost.pair for cost in found), statistics.median(cost.read for cost in found))
