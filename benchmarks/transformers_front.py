"""transformers in float32 behind a chat server: the reference that others are held against, and no rival in speed.

    python -m benchmarks.transformers_front --model FOLDER --port 8093

Serves one request after the other, each with the KV cache that transformers keeps while it generates; nothing is kept from turn to turn.
Run in an environment that has `torch` and `transformers`. Knows nothing of Hocket.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.front import Front, Gains


class Transformers:
    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._waiting: deque[tuple[int, list[int], int]] = deque()  # (request, what is run next, tokens it still wants); the first one runs
        self._cache = DynamicCache()

    def add(self, request: int, ids: list[int], tokens: int) -> None:
        self._waiting.append((request, ids, tokens))

    def step(self) -> Gains:
        request, ids, wanted = self._waiting.popleft()
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids]), cache=self._cache, use_cache=True, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
        if wanted > 1:
            self._waiting.appendleft((request, [token], wanted - 1))
        else:
            self._cache = DynamicCache()
        return [(request, [token], wanted == 1)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.transformers_front")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--port", type=int, default=8093)
    asked = parser.parse_args()
    asyncio.run(Front(Transformers(asked.model), asked.model).serve(asked.port))


if __name__ == "__main__":
    main()
