"""A prompt of 40,000 tokens in a context of 65,536: its logits against transformers, position by position, and its price in memory."""

from __future__ import annotations

import dataclasses
import itertools
import random
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core import EngineOptions, ModelConfig, RopeScaling, SamplingParams, Sequence, StepPlan, StepResult
from engine.engine import Engine
from engine.kernels.batch import Batch
from engine.models.llama_cpu import PARTS, CpuLlama
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from engine.weights.packed import PackedModel, prepare_packed
from tests.engine import tiny
from tests.engine.stepping import SIZE, Array, Run, batch

CONTEXT = 65_536
LENGTH = 40_000  # tokens of the prompt
REPLY = 8
STEP = 500  # tokens of a step: steps end at no edge of a block or of attention's tiles
CONFIG = tiny.config(heads=2, kv_heads=1, head_dim=32, context_length=CONTEXT, rope_theta=500_000.0)
PROMPT = random.Random(0).choices(range(3, 300), k=LENGTH)
ROOT = Path(__file__).resolve().parents[2]
STATM = Path("/proc/self/statm")
NUMBERS = itertools.count()  # ids of sequences


@dataclass(slots=True)
class Heard:
    """What an engine made of a prompt, overheard."""

    engine: Engine
    sequence: Sequence
    logits: Array  # float32 [tokens of prompt and reply, vocab]; NaN where no row was run
    rows: list[int] = field(default_factory=list)  # of each step


def ask(prompt: list[int], reply: int, salt: bytes = b"a") -> Sequence:
    return Sequence(next(NUMBERS), salt, prompt, SamplingParams(max_tokens=reply, temperature=0, ignore_eos=True))


def listen(engine: Engine, prompt: list[int], reply: int) -> Heard:
    """Run a prompt and a greedy reply, and take the logits of every row."""
    sequence = ask(prompt, reply)
    heard = Heard(engine, sequence, np.full((len(prompt) + reply, engine.checkpoint.config.vocab_size), np.nan, np.float32))
    decoder: Any = engine.runner.decoder
    choose = decoder.choose

    def overhear(step: Batch, sequences: list[Sequence]) -> list[int]:
        heard.logits[step.positions] = decoder.forward(dataclasses.replace(step, sample_rows=np.arange(len(step.tokens))))
        chosen: list[int] = choose(step, sequences)
        heard.rows.append(len(step.tokens))
        return chosen

    with mock.patch.object(decoder, "choose", overhear):
        arrivals = [sequence]
        while arrivals or not engine.idle:
            for _, delta in engine.step(arrivals):
                assert delta.error is None
            arrivals = []
    return heard


def options_of(cache_dir: Path, **options: Any) -> EngineOptions:
    given = {"max_batch_size": STEP, "max_step_tokens": STEP, "max_total_tokens": LENGTH + 4 * SIZE} | options
    return EngineOptions(model="tiny", cache_dir=cache_dir, **given)


@pytest.fixture(scope="module")
def new_engine(tiny_folder: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(checkpoint: Checkpoint, **options: Any) -> Engine:
        made.append(Engine(checkpoint, options_of(tiny_folder.parent / "cache", **options)))
        return made[-1]

    yield make
    for engine in made:
        decoder: Any = engine.runner.decoder
        decoder.close()  # other tests' engine threads may compute


def write(parent: Path, config: ModelConfig) -> tuple[Path, Checkpoint]:
    folder = tiny.write_folder(parent / "m", config)
    return folder, prepare(str(folder), parent / "cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    return write(tmp_path_factory.mktemp("long"), CONFIG)


@pytest.fixture(scope="module")
def exact(model: tuple[Path, Checkpoint], new_engine: Callable[..., Engine]) -> Heard:
    return listen(new_engine(model[1], exact=True), PROMPT, REPLY)


def theirs(folder: Path, ids: list[int]) -> Array:
    """float32 [len(ids), vocab] of transformers. Its `sdpa` makes no matrix of positions by positions."""
    oracle = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with torch.inference_mode():
        logits: Array = oracle(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


@pytest.fixture(scope="module")
def oracle(model: tuple[Path, Checkpoint], exact: Heard) -> Array:
    """Logits of the prompt and of `exact`'s reply to it."""
    return theirs(model[0], PROMPT + exact.sequence.output)


def errors(got: Array, wanted: Array) -> Array:
    """Each row's largest error, as part of what lies between its largest and its smallest logit."""
    off: Array = np.abs(got - wanted).max(1) / (wanted.max(1) - wanted.min(1))
    return off


# Logits

# The largest error of a row. What float32 rounds off (6e-8 of each product and sum, through two layers of sums and softmax) comes to 5e-6
# at the worst of 40,000 rows, early ones and late ones alike. Angles that are not rounded as transformers rounds them make 1e-3, a lost
# block 0.07.
EXACT = 2e-5


def test_logits_at_every_position_are_those_of_transformers(exact: Heard, oracle: Array) -> None:
    off = errors(exact.logits[: LENGTH + REPLY - 1], oracle[:-1])
    assert off.max() < EXACT
    assert np.median(off) < EXACT / 20
    assert exact.rows == [STEP] * (LENGTH // STEP) + [1] * (REPLY - 1), "in chunks"


def test_the_greedy_reply_is_that_of_transformers(exact: Heard, oracle: Array) -> None:
    assert exact.sequence.output == oracle[LENGTH - 1 : -1].argmax(1).tolist()


def test_int8_weights_and_the_default_kv_are_as_true_at_the_end_as_at_the_beginning(
    model: tuple[Path, Checkpoint], new_engine: Callable[..., Engine], oracle: Array
) -> None:
    """Rounding does not add up over the positions: 20,000 of them show it as well."""
    half = LENGTH // 2
    off = errors(listen(new_engine(model[1], weights="int8"), PROMPT[:half], 1).logits[:half], oracle[:half])
    assert off.max() < 0.2
    assert np.median(off) < 0.03
    assert np.median(off[-5000:]) < 1.5 * np.median(off[:5000])


@pytest.mark.parametrize(
    "scaling",
    [RopeScaling("llama3", factor=8.0, original_context=4096, low_freq_factor=1.0, high_freq_factor=4.0), RopeScaling("yarn", 8.0, 4096)],
    ids=lambda scaling: scaling.kind,
)
def test_logits_far_beyond_the_context_a_model_was_trained_on(
    scaling: RopeScaling, tmp_path: Path, new_engine: Callable[..., Engine]
) -> None:
    prompt = PROMPT[:9_000]
    folder, checkpoint = write(tmp_path, dataclasses.replace(CONFIG, context_length=8 * 4096, rope_scaling=scaling))
    heard = listen(new_engine(checkpoint, exact=True), prompt, 1)
    assert errors(heard.logits[: len(prompt)], theirs(folder, prompt)).max() < EXACT


def test_a_prompt_that_was_run_before_runs_its_end_only(exact: Heard) -> None:
    """E18 at 40,000 tokens: to the same bits."""
    again = listen(exact.engine, PROMPT, 1)
    known = again.sequence.cached
    assert LENGTH - SIZE <= known < LENGTH
    np.testing.assert_array_equal(again.logits[known:LENGTH], exact.logits[known:LENGTH])
    assert np.isnan(again.logits[:known]).all()


# The end of the context


@pytest.fixture(scope="module")
def packed(model: tuple[Path, Checkpoint]) -> PackedModel:
    return prepare_packed(model[1], "auto")


def written(packed: PackedModel, cache_dir: Path, context: int, pool: int) -> CpuLlama:
    """A decoder whose KV pool of so many tokens holds random numbers."""
    longer = dataclasses.replace(packed, config=dataclasses.replace(packed.config, context_length=context))
    made = CpuLlama(longer, cache_dir=cache_dir, blocks=pool // SIZE, block_size=SIZE, kv_dtype="float32", exact=True, max_samples=40)
    numbers = made._cache.view(np.float32)
    numbers[:] = np.random.default_rng(0).standard_normal(numbers.shape, np.float32)
    return made


@pytest.mark.parametrize("context", [CONTEXT, 2 * CONTEXT])
def test_the_last_token_of_a_context_has_the_same_bits_alone_and_among_others(packed: PackedModel, tiny_folder: Path, context: int) -> None:
    """Alone, its tiles are shared out among the threads; in the middle of a chunk they are not."""
    decoder = written(packed, tiny_folder.parent / "cache", context, context)
    table = np.random.default_rng(1).permutation(context // SIZE)
    last = PROMPT[:40]
    together = decoder.forward(batch([Run(last, context - len(last), table)])).copy()
    for at in (0, 38, 39):
        alone = decoder.forward(batch([Run(last[at : at + 1], context - len(last) + at, table)]))
        np.testing.assert_array_equal(alone[0], together[at])
    decoder.close()


def test_each_of_several_long_contexts_is_shared_out_among_the_threads(packed: PackedModel, tiny_folder: Path) -> None:
    """All tiles that a pool can hold, not only as many as one context has."""
    decoder = written(packed, tiny_folder.parent / "cache", CONTEXT, 3 * CONTEXT)
    tables = np.arange(3 * CONTEXT // SIZE).reshape(3, -1)
    step = batch([Run([5], CONTEXT - 1, table) for table in tables])
    blocks, part_rows, _ = decoder._blocks(step)
    assert (part_rows[:, 1] == PARTS).all()
    assert len(blocks) == 3 * PARTS
    got = decoder.forward(step).copy()
    for at, table in enumerate(tables):
        np.testing.assert_array_equal(got[at], decoder.forward(batch([Run([5], CONTEXT - 1, table)]))[0])
    decoder.close()


# Memory

KV_BYTES = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 4  # of a token, float32


EARLY = 10_000  # tokens, after which all that a step needs has been taken


def tell_memory(checkpoint: str, cache_dir: str) -> None:
    """Run the prompt in this process, and print what memory it has, in bytes, after its first tokens and after all."""
    engine = Engine(Checkpoint(Path(checkpoint)), options_of(Path(cache_dir), exact=True))
    sequence = ask(PROMPT, REPLY)
    engine.step([sequence])
    while sequence.computed < LENGTH:
        engine.step()
        if sequence.computed in (EARLY, LENGTH):
            sys.stdout.write(f"{resource.getpagesize() * int(STATM.read_text().split()[1])}\n")


@pytest.mark.skipif(not STATM.exists(), reason="tells the process's memory as Linux has it")
def test_memory_grows_by_the_kv_of_the_tokens_run(model: tuple[Path, Checkpoint], tiny_folder: Path) -> None:
    """In a process of its own: what earlier tests have freed would be taken again, and seem to cost nothing."""
    told = f"import sys; from {__name__} import tell_memory; tell_memory(*sys.argv[1:])"
    command = [sys.executable, "-c", told, str(model[1].path), str(tiny_folder.parent / "cache")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    early, late = map(int, said.stdout.split())
    kv = KV_BYTES * (LENGTH - EARLY)
    assert kv / 2 < late - early < 1.5 * kv, "KV is taken as it is written, and little else"


def test_a_decoder_s_buffers_are_linear_in_the_tokens_of_its_pool(packed: PackedModel, tiny_folder: Path) -> None:
    def buffers(tokens: int, context: int) -> int:
        longer = dataclasses.replace(packed, config=dataclasses.replace(packed.config, context_length=context))
        tracemalloc.start()
        decoder = CpuLlama(
            longer, cache_dir=tiny_folder.parent / "cache", blocks=tokens // SIZE, block_size=SIZE, kv_dtype="float32", exact=True
        )
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        decoder.close()
        return held

    buffers(CONTEXT, CONTEXT)  # kernels are brought in
    small, middle, large = (buffers(tokens, tokens) for tokens in (CONTEXT // 4, CONTEXT // 2, CONTEXT))
    rotary = 4 * CONFIG.head_dim  # cosines and sines of a position
    assert large - middle == pytest.approx((KV_BYTES + rotary) * CONTEXT / 2, rel=0.01)
    assert middle - small == pytest.approx((KV_BYTES + rotary) * CONTEXT / 4, rel=0.01)
    assert buffers(CONTEXT, 16 * CONTEXT) == pytest.approx(large, rel=0.01), "positions that the pool has no room for cost nothing"


def test_what_a_step_takes_for_a_while_is_a_few_bytes_for_each_token_of_context(exact: Heard) -> None:
    """The end of a prompt, and decodes: lists, block tables, attention's blocks."""
    engine = exact.engine

    def most(context: int) -> int:
        """Bytes that three steps hold at a time."""
        prompt = [1 + context % 7] * (context - STEP) + PROMPT[:STEP]
        sequence = ask(prompt, 4, b"b")
        with mock.patch.object(engine.runner, "run", unrun):
            engine.step([sequence])
            while sequence.computed < context - STEP:
                engine.step()
        tracemalloc.start()
        for _ in range(3):
            engine.step()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        engine.step([], [sequence])
        return peak

    short, long = most(10_000), most(LENGTH)
    assert long - short < 16 * (LENGTH - 10_000)


def unrun(plan: StepPlan) -> StepResult:
    return StepResult([0 for chunk in plan.chunks if chunk.samples])
