"""OpenVINO GenAI's continuous batching behind a chat server, as a peer to measure. Run in an environment that has `openvino-genai`:

    python -m benchmarks.openvino_front --model Q8_0.gguf --tokenizer FOLDER --port 8092

FOLDER is a Hugging Face folder with the model's tokenizer and chat template. Knows nothing of Hocket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from benchmarks.front import Front, Gains


class OpenVINO:
    def __init__(self, model: Path, cache_gb: int, batched_tokens: int, properties: dict[str, object]) -> None:
        """`properties`: of the CPU plugin, as in {"INFERENCE_PRECISION_HINT": "f32"}; cache_gb 0: grows as needed."""
        schedule = genai.SchedulerConfig()
        schedule.cache_size = cache_gb
        schedule.enable_prefix_caching = True
        schedule.dynamic_split_fuse = True
        schedule.max_num_batched_tokens = batched_tokens
        self._pipeline = genai.ContinuousBatchingPipeline(str(model), schedule, "CPU", properties)
        self._live: dict[int, genai.GenerationHandle] = {}

    def add(self, request: int, ids: list[int], tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
        self._live[request] = self._pipeline.add_request(request, ov.Tensor(np.array([ids], dtype=np.int64)), config)

    def step(self) -> Gains:
        self._pipeline.step()
        gains: Gains = []
        for request, handle in self._live.items():
            ids: list[int] = []
            while handle.can_read():
                ids += (id for output in handle.read().values() for id in output.generated_ids)
            ended = handle.get_status() != genai.GenerationStatus.RUNNING
            if ids or ended:
                gains.append((request, ids, ended))
        for request, _, ended in gains:
            if ended:
                del self._live[request]
        return gains


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.openvino_front")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a folder in OpenVINO's format")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a Hugging Face folder with tokenizer and chat template")
    parser.add_argument("--port", type=int, default=8092)
    parser.add_argument("--cache-gb", type=int, default=0, help="size of the KV cache; 0: as large as needed (default: 0)")
    parser.add_argument("--batched-tokens", type=int, default=256, help="tokens in one step (default: 256, as its own)")
    parser.add_argument("--properties", type=json.loads, default={}, help='of the CPU plugin, as in {"INFERENCE_PRECISION_HINT": "f32"}')
    asked = parser.parse_args()
    engine = OpenVINO(asked.model, asked.cache_gb, asked.batched_tokens, asked.properties)
    asyncio.run(Front(engine, asked.tokenizer).serve(asked.port))


if __name__ == "__main__":
    main()
