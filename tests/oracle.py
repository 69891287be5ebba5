"""transformers, as the judge of the default model's greedy replies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.weights.convert import prepare

EOS = (2, 0)
TIE = 1e-4  # two logits this close may go either way


def load() -> LlamaForCausalLM:
    """The same dequantised float32 weights in transformers' own decoder."""
    checkpoint = prepare("default")
    config, weights = LlamaConfig.from_pretrained(checkpoint.path), dict(checkpoint.tensors())
    model, report = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def check_greedy(oracle: LlamaForCausalLM, prompt: Sequence[int], reply: Sequence[int], limit: int, what: str) -> None:
    """The reply is the one that transformers' `generate` gives for at most `limit` tokens.

    By induction: each token is the one it would choose after those before it, and a shorter reply ends where it would choose to end.
    """
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 :]
    assert len(reply) <= limit
    for at, (row, token) in enumerate(zip(logits, reply, strict=False)):
        _check_choice(row, (token,), f"{what}: token {at}")
    if len(reply) < limit:
        _check_choice(logits[-1], EOS, f"{what}: its end")


def _check_choice(logits: torch.Tensor, chosen: Sequence[int], what: str) -> None:
    top = int(logits.argmax())
    if top in chosen:
        return
    gap = float(logits[top] - logits[list(chosen)].max())
    assert gap < TIE, f"{what} is {chosen}, transformers chooses {top}, {gap} ahead"
    print(f"{what}: a tie within {TIE} went to {chosen} instead of {top}")  # noqa: T201
