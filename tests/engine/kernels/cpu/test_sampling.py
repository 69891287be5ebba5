"""Choices of the CPU kernels against `engine/sampler.py`, which says in torch what they must be."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from engine import sampler
from engine.core import Sequence
from engine.kernels.cpu import sampling
from engine.kernels.cpu.choices import RECORD_BYTES, Choices
from tests.engine.fakes import sequence

Logits = npt.NDArray[np.float32]

GUARD = 0x5AFE5AFE
LARGEST = float(np.finfo(np.float32).max)
UNHURRIED = settings(deadline=None)  # the first example compiles
# top_p may be off by 1e-12 of the mass, min_p by the last bit of a logarithm.
OFF = (0.0, -1e-12, 1e-12)


def choose(logits: Logits, asked: list[Sequence], choices: Choices | None = None) -> list[int]:
    """The kernel's tokens for rows [rows, vocab]; what lies beyond its logits and scratch must stay as it was."""
    rows, vocab = logits.shape
    choices = choices or Choices(vocab)
    records = choices.prepare(asked)
    tokens = []
    for row in range(rows):
        own = np.append(logits[row], np.float32(12345))
        words = -(-sampling.scratch_bytes(vocab) // 4)
        scratch = np.full((words + 3) // 2 * 2, GUARD, np.int32)
        record = records.ctypes.data + row * RECORD_BYTES
        tokens.append(int(sampling.choose_row(own.ctypes.data, vocab, record, scratch.ctypes.data)))
        assert own[-1] == 12345
        assert (scratch[words:] == GUARD).all()
    return tokens


def expected(logits: Logits, asked: Sequence) -> set[int]:
    """What the oracle chooses, and what it chooses with thresholds that a rounding apart would be the same."""
    params = asked.sampling
    tokens = set()
    for p, m in itertools.product(OFF if params.top_p < 1 else OFF[:1], OFF if params.min_p > 0 else OFF[:1]):
        apart = replace(asked, sampling=replace(params, top_p=params.top_p * (1 + p), min_p=params.min_p * (1 + m)))
        tokens.add(sampler.sample(torch.from_numpy(logits)[None], [apart])[0])
    return tokens


def check(logits: Logits, asked: Sequence) -> None:
    assert choose(logits[None], [asked])[0] in expected(logits, asked)


@st.composite
def rows(draw: st.DrawFn, most: int = 700) -> Logits:
    """Flat, peaked and huge, with ties, infinities and zeros of both signs; sizes on both sides of a block's."""
    size = draw(st.integers(1, most) | st.sampled_from([127, 128, 129, 256, 257]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(draw(st.sampled_from([0, 5, -300, 1e6])), draw(st.sampled_from([0, 1e-3, 1, 4, 30, 1e5, 1e12, 1e38])), size)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    if draw(st.booleans()):
        logits[random.integers(size)] += draw(st.sampled_from([3, 12, 60, math.inf]))
    if draw(st.booleans()):
        logits[random.integers(size, size=3)] = (0.0, -0.0, 0.0)
    logits = logits.clip(-LARGEST, LARGEST if draw(st.booleans()) else math.inf)
    if draw(st.booleans()):
        logits[random.random(size) < draw(st.sampled_from([0.3, 0.99, 1]))] = -math.inf
    with np.errstate(over="ignore"):
        return logits.astype(np.float32)


TEMPERATURES = st.sampled_from([0.0, 5e-5, 1e-4, 1e-3, 0.3, 0.7, 1.0, 1.5, 2.0, 50.0, 1e12]) | st.floats(0.05, 5)
TOP_K = st.sampled_from([0, 0, 1, 2, 3, 5, 40, 300, 10**6, 2**70])
TOP_P = st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12]) | st.floats(0, 1)
MIN_P = st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]) | st.floats(0, 1)
SEEDS = st.integers(-(2**63), 2**64 - 1)


@UNHURRIED
@given(logits=rows(), seed=SEEDS, length=st.integers(0, 50), temperature=TEMPERATURES)
def test_plain_draws_are_the_oracles(logits: Logits, seed: int, length: int, temperature: float) -> None:
    check(logits, sequence(0, [0] * length, seed=seed, temperature=temperature))


@UNHURRIED
@given(logits=rows(), seed=SEEDS, temperature=TEMPERATURES, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P)
def test_filtered_draws_are_the_oracles(logits: Logits, seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    check(logits, sequence(0, [0], seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))


@UNHURRIED
@given(data=st.data(), logits=rows(60), seed=SEEDS, temperature=TEMPERATURES, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P)
def test_all_together_are_the_oracles(
    data: st.DataObject, logits: Logits, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    tokens = st.lists(st.integers(0, len(logits) - 1), max_size=100)
    penalty = st.sampled_from([0.0, 0.0, 1.1, -0.7, 2.0]) | st.floats(-2, 2)
    asked = sequence(
        0,
        data.draw(tokens),
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=data.draw(penalty),
        frequency_penalty=data.draw(penalty),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.1, 0.9, 3.0]) | st.floats(0.1, 5)),
        logit_bias=data.draw(st.dictionaries(st.integers(0, len(logits) - 1), st.floats(-100, 100), max_size=5)),
    )
    asked.output = data.draw(tokens)
    check(logits, asked)


@pytest.mark.parametrize("spread", [0.01, 2.0, 6.0])
@pytest.mark.parametrize(
    "sampling_params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 50},
        {"top_k": 3000, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"temperature": 0},
    ],
    ids=str,
)
def test_a_large_vocabulary_many_times(spread: float, sampling_params: dict[str, float]) -> None:
    """Pruning and selection at the size they are for: a wrong one would show in some of these rows."""
    logits = np.random.default_rng(7).normal(0, spread, (40, 20_011)).astype(np.float32)
    asked = [sequence(row, [0] * row, seed=row * 31, **sampling_params) for row in range(len(logits))]
    assert choose(logits, asked) == sampler.sample(torch.from_numpy(logits), asked)


def test_thousands_of_rows() -> None:
    logits = np.random.default_rng(8).normal(0, 2, (4000, 300)).astype(np.float32)
    asked = [sequence(row, [0], seed=row) for row in range(len(logits))]
    assert choose(logits, asked) == sampler.sample(torch.from_numpy(logits), asked)


@njit(error_model="numpy")
def hopeful(logits: Logits, high: np.float32, temperature: float, best: float, seed: int, position: int) -> npt.NDArray[np.bool_]:
    """For each token, whether the draw would weigh it if the best total so far were `best`."""
    stream = sampling._stream(np.uint64(seed), np.uint64(position))
    slope, base = sampling._slope(temperature), sampling._base(high, temperature, best)
    found = np.empty(len(logits), np.bool_)
    for token in range(len(logits)):
        found[token] = sampling._may_win(logits[token], token, stream, high, slope, base)
    return found


def totals_of(logits: Logits, temperature: float, seed: int, position: int) -> npt.NDArray[np.float64]:
    return logits.astype(np.float64) / temperature + sampler.noise(seed, position, torch.arange(len(logits))).numpy()


@UNHURRIED
@given(
    logits=rows(2000).filter(lambda row: math.isfinite(row.max())),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([1e-4, 0.01, 0.5, 1, 2, 1e4, 1e20, 1e38]),
)
def test_no_token_that_can_win_is_passed_over(logits: Logits, seed: int, temperature: float) -> None:
    check_hopes(logits, seed, temperature)


def check_hopes(logits: Logits, seed: int, temperature: float) -> None:
    """Against every total that the draw could hold as its best: the likeliest token's own, and any larger one."""
    weighed = totals_of(logits, temperature, seed, 5)
    for best in np.unique(weighed[weighed >= weighed[logits.argmax()]])[-50:]:
        assert hopeful(logits, logits.max(), temperature, best, seed, 5)[weighed >= best].all()


def test_few_tokens_are_weighed() -> None:
    """What makes the draw quick: of a flat vocabulary, those near the winner only."""
    logits = np.random.default_rng(9).normal(0, 1, 49_152).astype(np.float32)
    for seed in range(20):
        weighed = totals_of(logits, 0.9, seed, 5)
        assert hopeful(logits, logits.max(), 0.9, weighed.max(), seed, 5).sum() < 20


def test_the_oracles_bound_for_greedy() -> None:
    assert sampling.GREEDY_BELOW == sampler.GREEDY_BELOW


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_with_a_nan_has_no_choice(params: dict[str, float]) -> None:
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        nan = np.array([bits], np.uint32).view(np.float32)
        for at in (0, 129, 299):
            logits = np.zeros((3, 300), np.float32)
            logits[1, at : at + 1] = nan
            logits[:, 7] = 50
            asked = [sequence(i, [0], **params) for i in range(3)]
            assert choose(logits, asked) == [7, sampling.NOT_A_NUMBER, 7]


def test_ties_go_to_the_lowest_id() -> None:
    greedy = sequence(0, [0], temperature=0)
    for tied in ([-0.0, 0.0], [0.0, -0.0], [3.0, 3.0], [math.inf, math.inf], [-math.inf, -math.inf]):
        logits = np.full((1, 400), -math.inf, np.float32)
        logits[0, [150, 300]] = tied
        assert choose(logits, [greedy]) == [150 if tied[0] > -math.inf else 0]
    for seed in range(50):
        kept = choose(np.zeros((1, 400), np.float32), [sequence(0, [0], seed=seed, top_k=3)])[0]
        assert kept in (0, 1, 2), "of equals, top_k keeps the lowest ids"


def test_equal_totals_go_where_the_oracles_do() -> None:
    """To the lowest id; among filtered tokens to the likelier. Temperatures are made so that the two largest totals are the same number."""
    logits, met = np.array([0.5, 1.0, -math.inf], np.float32), 0
    for seed in range(300):
        noise = sampler.noise(seed, 1, torch.arange(2)).numpy()
        if noise[0] > noise[1]:
            temperature = 0.5 / float(noise[0] - noise[1])
            totals = logits[:2].astype(np.float64) / temperature + noise
            met += totals[0] == totals[1]
            for top_k in (0, 2) if totals[0] == totals[1] else ():
                check(logits, sequence(0, [0], seed=seed, temperature=temperature, top_k=top_k))
    assert met > 10


def test_numbers_so_large_that_noise_or_differences_round_away() -> None:
    for seed in range(100):
        check_hopes(np.full(400, 2.0**53, np.float32), seed, 1.0)
        check(np.array([-3e38, 3e38, -3e38, 1], np.float32), sequence(0, [0], seed=seed, temperature=1e38))


def test_draws_follow_the_softmax() -> None:
    logits = np.tile(np.array([0.0, 1.0, 2.0, -math.inf], np.float32), (4000, 1))
    draws = Counter(choose(logits, [sequence(seed, [0], seed=seed, temperature=0.7) for seed in range(4000)]))
    wanted = np.exp(logits[0] / 0.7) / np.exp(logits[0] / 0.7).sum()
    for token in range(4):
        assert draws[token] / 4000 == pytest.approx(wanted[token], abs=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": -1.0}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 2.0}, {0}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.61}, {0, 1}),  # of 0.45 and 0.3, the first is 0.6
        ({"top_k": 2, "top_p": 0.59}, {0}),
        ({"top_k": 3, "top_p": 0.52, "min_p": 0.5}, {0, 1}),  # top_p is of all that top_k keeps, whatever min_p drops
    ],
    ids=str,
)
def test_filters_keep_what_they_should(params: dict[str, float], kept: set[int]) -> None:
    logits = np.tile(np.log(np.array([0.45, 0.3, 0.15, 0.1])).astype(np.float32), (300, 1))
    assert set(choose(logits, [sequence(seed, [0], seed=seed, **params) for seed in range(300)])) == kept


def test_threads_choose_what_one_would() -> None:
    logits = np.random.default_rng(3).normal(0, 1, (60, 3000)).astype(np.float32)
    asked = [sequence(row, [0], seed=row, top_p=0.9 if row % 2 else 1.0) for row in range(60)]
    alone = [choose(logits[row : row + 1], [asked[row]])[0] for row in range(60)]
    found: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda part=part: found.update({part: choose(logits, asked)})) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: alone, 1: alone}


class Watched(list[int]):
    """Remembers how many tokens were read from it at once."""

    read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        part = super().__getitem__(index)
        self.read += len(part) if isinstance(index, slice) else 1
        return part

    def __iter__(self):  # type: ignore[no-untyped-def,override]
        self.read += len(self)
        return super().__iter__()


def test_tallies_grow_with_the_reply() -> None:
    """Step by step as from scratch, past every capacity, and without reading the whole reply again each step."""
    random = np.random.default_rng(4)
    choices, vocab = Choices(500), 500
    asked = [
        sequence(0, [1, 2, 3, 1], presence_penalty=0.5, frequency_penalty=0.3),
        sequence(1, list(range(70)), repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={499: 1.5, 3: -2.0}),
        sequence(2, [5]),
    ]
    for each in asked:
        each.output = Watched()
    for step in range(200):
        logits = random.normal(0, 1, (3, vocab)).astype(np.float32)
        tokens = choose(logits, asked, choices)
        assert tokens == sampler.sample(torch.from_numpy(logits), [replace(each, output=each.output.copy()) for each in asked])
        for each in asked:
            assert isinstance(each.output, Watched)
            assert each.output.read <= step, "one token a step"
            each.output.append(int(random.integers(vocab)))


def test_a_sequence_that_left_is_forgotten_and_counted_afresh() -> None:
    choices = Choices(4)
    logits = np.array([[0.0, 3.0, 1.5, 0.0]], np.float32)
    asked, other = (sequence(id, [0], temperature=0, frequency_penalty=1.0) for id in range(2))
    asked.output = [1]
    assert choose(logits, [asked], choices) == [1]
    choices.prepare([other])
    assert list(choices._tallies) == [other], "nothing is kept of a sequence that is gone"
    asked.output = [1, 1]
    assert choose(logits, [asked], choices) == [2]
    asked.output = []
    assert choose(logits, [asked], choices) == [1], "a reply that shrank is another"


@pytest.mark.parametrize(
    ("sampling_params", "prompt", "output"),
    [({"logit_bias": {7: 1.0}}, [0], []), ({"repetition_penalty": 2.0}, [-1], []), ({"presence_penalty": 2.0}, [0], [7])],
    ids=str,
)
def test_tokens_outside_the_vocabulary_are_refused(sampling_params: dict[str, object], prompt: list[int], output: list[int]) -> None:
    asked = sequence(0, prompt, **sampling_params)
    asked.output = output
    with pytest.raises(ValueError, match="expected token ids of 0 to 6, got"):
        Choices(7).prepare([asked])


def test_no_rows() -> None:
    assert Choices(7).prepare([]).shape == (0, RECORD_BYTES // 8)


def test_choosing_needs_no_torch() -> None:
    code = "import engine.kernels.cpu.sampling, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
