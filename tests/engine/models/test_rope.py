from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.core import ModelError, RopeScaling
from engine.models import rope
from tests.engine import tiny

DIM = 64
SCALINGS = {
    "linear": RopeScaling("linear", factor=4.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeScaling("yarn", factor=4.0, original_context=32768),
    "longrope": RopeScaling(
        "longrope", original_context=4096, short_factor=tuple([1.0] * 32), long_factor=tuple(1.0 + i for i in range(32))
    ),
}


def theirs(scaling: RopeScaling, context: int) -> tuple[torch.Tensor, float]:
    """The same from transformers, the oracle."""
    parameters = {"rope_type": scaling.kind, "rope_theta": 500000.0, "factor": scaling.factor}
    if scaling.original_context:
        parameters["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        parameters |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "longrope":
        parameters |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor), "factor": context / 4096}
    config = LlamaConfig(hidden_size=DIM * 4, num_attention_heads=4, max_position_embeddings=context, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu", seq_len=context)


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(kind: str) -> None:
    context = 131072
    config = tiny.config(head_dim=DIM, context_length=context, rope_theta=500000.0, rope_scaling=SCALINGS[kind])
    got, attention = rope.scaled_frequencies(config)
    wanted, wanted_attention = theirs(SCALINGS[kind], context)
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-6, atol=0)
    assert attention == pytest.approx(wanted_attention)


def test_plain_and_dynamic_within_the_context() -> None:
    wanted = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    for kind in ("default", "dynamic"):
        got, attention = rope.scaled_frequencies(tiny.config(rope_scaling=RopeScaling(kind, factor=2.0)))
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=2e-7, atol=0)
        assert attention == 1.0
    cos, sin = rope.tables(tiny.CONFIG, 5)
    torch.testing.assert_close(torch.from_numpy(cos[3]), (3 * wanted).cos())
    torch.testing.assert_close(torch.from_numpy(sin[3]), (3 * wanted).sin())


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="'spiral'"):
        rope.scaled_frequencies(tiny.config(rope_scaling=RopeScaling("spiral")))
