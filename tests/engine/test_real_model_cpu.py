"""The default model on the CPU kernels: how true it is to float32, and that a reply depends on nothing else. (slow)"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks import fidelity
from benchmarks.fidelity import compare
from engine.batcher import Batcher
from engine.core import EngineOptions, Message, SamplingParams, Sequence
from engine.decoder import load_decoder
from engine.engine import Engine
from engine.kernels.cpu.stage import Team
from engine.models.llama import Llama
from engine.models.llama_cpu import CpuLlama
from engine.tokenizer import Tokenizer
from engine.weights.cache import default_cache_dir, quiet
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from tests.engine.stepping import SIZE, Array, Run, batch, logits
from tests.engine.test_engine import ids_of, run
from tests.engine.test_real_model import PROMPTS, collect, greedy, until

pytestmark = pytest.mark.slow

PROSE = """The ferry left the quay a little after six, when the lamps along the harbour were already lit and the rain had thinned to a
mist. There were nine passengers. Most of them had taken the crossing so often that they no longer looked up as the engine changed its
note, but a boy of seven or eight stood at the rail with both hands around the cold iron and watched the town become smaller.

"How long until we see the island?" he asked.

His aunt, who was reading, said that it depended on the weather. On a clear day you could make out the white tower from the harbour
itself; tonight they would be lucky to see it before the boat turned into the bay. She had grown up there. She could have told him how
the keeper's children used to row across for bread, and how, one winter, the sea froze so hard that a horse pulled a sledge from one shore
to the other. Instead she marked her page with a ticket and came to stand beside him.

Water is densest at about four degrees, which is why a lake freezes from the top down and why fish survive below the ice. Salt lowers the
point at which it freezes: sea water of 35 grams per litre stays liquid until roughly -1.9 degrees. For the whole strait to freeze,
then, the air must stay cold for weeks, the wind must be still, and the current slow. It has happened twice in a hundred years.
"""


def options(**changes: object) -> EngineOptions:
    return EngineOptions(model="default", cache_dir=default_cache_dir(), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return prepare("default")


@pytest.fixture(autouse=True)
def _others_may_compute() -> Iterator[None]:
    """The engine threads of other tests are let in when a test of this thread is done."""
    yield
    Team(1).close()


@pytest.fixture(scope="module")
def ids(checkpoint: Checkpoint) -> list[int]:
    return Tokenizer(checkpoint.tokenizer_path, checkpoint.eos_ids).encode_plain(PROSE)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, ids: list[int]) -> Array:
    model = Llama(checkpoint.config, checkpoint.tensors())
    with torch.inference_mode():
        return model.forward(batch([Run(ids, 0, np.arange(64))]), model.new_cache(64, SIZE)).numpy()


def decoder_of(checkpoint: Checkpoint, **changes: object) -> CpuLlama:
    """Which can give the logits of every row of a step."""
    made = load_decoder(checkpoint, options(max_batch_size=64, max_step_tokens=64, **changes), 400, quiet)
    assert isinstance(made, CpuLlama)
    return made


@pytest.mark.parametrize(
    ("changes", "divergence", "same"),
    [
        ({}, 0.005, 0.93),
        ({"kv_dtype": "float32"}, 0.005, 0.93),
        ({"kv_dtype": "int8"}, 0.005, 0.93),
        ({"exact": True}, 1e-6, 1.0),
        ({"weights": "float32"}, 1e-4, 0.98),
        ({"exact": True, "kv_dtype": "int8"}, 0.002, 0.95),
    ],
)
def test_distributions_are_near_those_of_float32(
    checkpoint: Checkpoint, ids: list[int], reference: Array, changes: dict[str, object], divergence: float, same: float
) -> None:
    found = compare(reference, logits(decoder_of(checkpoint, **changes), ids, np.arange(64), range(64, len(ids), 64)), ids)
    assert found.positions == len(ids) >= 250
    assert found.kl <= divergence
    assert found.argmax >= same
    assert abs(found.perplexity_ratio - 1) < 0.02


def test_the_default_stays_true_over_the_repositorys_prose(checkpoint: Checkpoint) -> None:
    """What the default may lose of float32, over the half of the benchmark's texts that needs no sampling."""
    judge = fidelity.Reference(checkpoint)
    found = fidelity.measure(judge.logits, fidelity.kernel_logits(checkpoint, options()), fidelity.prose(judge))
    assert found.positions >= 2000
    assert found.kl <= 0.005
    assert found.argmax >= 0.945
    assert abs(found.perplexity_ratio - 1) <= 0.005


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_logits_are_the_same_bits_alone_in_a_crowd_and_in_pieces(checkpoint: Checkpoint, ids: list[int], kv_dtype: str) -> None:
    """E12, E18"""
    decoder = decoder_of(checkpoint, kv_dtype=kv_dtype)
    places = np.random.default_rng(0).permutation(400)
    tables = [places[at * 20 : at * 20 + 20] for at in range(18)]
    alone = logits(decoder, ids, tables[0], range(64, len(ids), 64))
    np.testing.assert_array_equal(logits(decoder, ids, tables[1], (1, 17, 50, 113, 129, 160, 161, 200, 250)), alone, "in pieces")

    others = [ids[at:] + ids[:at] for at in range(1, 17)]
    for start, stop in pairwise(range(0, 241, 48)):
        for other, table in zip(others, tables[2:], strict=True):
            decoder.forward(batch([Run(other[start:stop], start, table)], every=False))
    mine = np.concatenate([tables[0][:14], tables[1][14:]])  # as on a cache hit of 14 blocks
    decoder.forward(batch([Run(ids[224:240], 224, mine)], every=False))
    for at in range(240, 250):
        crowd = [Run([other[at]], at, table) for other, table in zip(others, tables[2:], strict=True)]
        got = decoder.forward(batch([*crowd[:9], Run([ids[at]], at, mine), *crowd[9:]]))
        np.testing.assert_array_equal(got[9], alone[at], "one of 17")


def test_a_sampled_reply_is_the_same_alone_among_16_and_on_a_cache_hit() -> None:
    """E12, E18, to the end of the engine; E11 in a second turn."""
    engine = Engine.load(options(), quiet)
    prompts = [engine.template.prompt([Message("user", text)]).ids for text in PROMPTS]

    def ask(id: int, prompt: list[int], tokens: int, salt: bytes = b"a") -> Sequence:
        return Sequence(id, salt, prompt, SamplingParams(max_tokens=tokens, seed=11, ignore_eos=True))

    alone = ids_of(run(engine, {0: [ask(0, prompts[0], 60)]})[0])
    turn = [*prompts[0], *alone, *engine.template.prompt([Message("user", PROMPTS[1])]).ids]
    cold = ids_of(run(engine, {0: [ask(0, turn, 30, b"cold")]})[0])
    crowd = [ask(1 + at, prompt, 80) for at, prompt in enumerate(prompts[1:17])]
    second = ask(50, turn, 30)
    replies = run(engine, {0: crowd[:8], 10: [ask(0, prompts[0], 60, b"b"), *crowd[8:]], 40: [second]})
    assert ids_of(replies[0]) == alone
    assert ids_of(replies[50]) == cold
    assert second.cached == len(prompts[0]) + len(alone) - 1
    assert max(len(step.decodes) for step in engine.steps) >= 17


async def test_the_loop_stays_responsive_while_16_converse_and_a_long_prompt_comes() -> None:
    """C8: a step computes without the GIL. (How responsive is what benchmarks measure.)"""
    batcher = Batcher(options())
    batcher.start()
    await batcher.settled()
    engine = batcher._engine
    assert engine
    prompts = [(await batcher.prompt([Message("user", text)])).ids for text in PROMPTS[:16]]
    (longer,) = [(await batcher.prompt([Message("user", "the quick brown fox " * 260)])).ids]
    assert len(longer) > 1000
    attempts = []
    for attempt in range(3):
        replies = [batcher.session(b"a").generate(ids, greedy(500, ignore_eos=True)) for ids in prompts]
        names = {reply.id for reply in replies}
        ended = asyncio.gather(*map(collect, replies))
        await until(lambda names=names: len(engine.steps) and set(engine.steps[-1].decodes) == names)
        before = engine.steps[-1].index
        prefill = asyncio.create_task(collect(batcher.session(b"%d" % attempt).generate(longer, greedy(8, ignore_eos=True))))
        lags = []
        while not prefill.done():
            begin = time.perf_counter()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - begin - 0.002)
        during = [step for step in list(engine.steps) if step.index > before and step.prefills]
        assert sum(count for step in during for _, count in step.prefills) >= len(longer)
        assert all(names <= set(step.decodes) for step in during)
        for reply in replies:
            reply.cancel()
        await ended
        attempts.append(max(lags))
    await batcher.close()
    assert min(attempts) < 0.25, "the attempt that other processes disturbed least"
