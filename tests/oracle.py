"""transformers, as the judge of the default model's greedy replies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM

from engine.weights.convert import prepare

TIE = 1e-4  # two logits this close may go either way


def load() -> LlamaForCausalLM:
    """The same dequantised float32 weights in transformers' own decoder."""
    return LlamaForCausalLM.from_pretrained(prepare("default").path, dtype=torch.float32)


def check_greedy(oracle: LlamaForCausalLM, prompt: Sequence[int], reply: Sequence[int], what: str) -> None:
    """Each token is the one transformers would choose after those before it, which is to say that `generate` gives the same reply."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
    for at, (row, token) in enumerate(zip(logits, reply, strict=True)):
        top = int(row.argmax())
        if token != top:
            gap = float(row[top] - row[token])
            assert gap < TIE, f"{what}: token {at} is {token}, transformers chooses {top}, {gap} ahead"
            print(f"{what}: a tie within {TIE} at token {at} went to {token} instead of {top}")  # noqa: T201
