"""What the sampling kernels need to know of each row, as plain records.

Owns: the layout of a record, and each sequence's tally of the tokens that its penalties see, kept from step to step so that a step
costs O(1) of Python a row. Knows no logits and no kernel, and imports no compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.core import Sequence

Records = npt.NDArray[np.int64]

# A record is 16 words of 8 bytes: WORD_* of int64, REAL_* of float64.
RECORD_WORDS = 16
RECORD_BYTES = 8 * RECORD_WORDS
(
    WORD_SEED,  # two's complement
    WORD_POSITION,  # of the token to choose: the sequence's length
    WORD_TOP_K,  # <= 0: off
    WORD_SEEN,  # how many distinct tokens the penalties see; 0: no penalty applies
    WORD_SEEN_TOKENS,  # address of their ids, int64
    WORD_SEEN_TIMES,  # address of how often each is in the reply, int64
    WORD_BIASES,  # how many tokens have a bias
    WORD_BIAS_TOKENS,  # address of their ids, int64
    WORD_BIAS_VALUES,  # address of what is added to each, float32
    REAL_TEMPERATURE,
    REAL_TOP_P,
    REAL_MIN_P,
    REAL_PRESENCE,
    REAL_FREQUENCY,
    REAL_REPETITION,
    _SPARE,
) = range(RECORD_WORDS)
_RECORD = struct.Struct("=Qqqqqqqqqddddddq")

_64_BITS = 2**64 - 1
_NO_LIMIT = 2**62  # more than any vocabulary
_FIRST_CAPACITY = 64
_NOTHING = (0, 0, 0, 0, 0, 0)


class Choices:
    """Turns the sequences that a step samples for into records; remembers tallies of those that were in the last step.

    A sequence that leaves for a step is forgotten and counted afresh when it is back. One `Choices` serves one engine thread.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._tallies: dict[Sequence, _Tally] = {}

    def prepare(self, sequences: Iterable[Sequence]) -> Records:
        """Records [rows, RECORD_WORDS], a row for each sequence; they hold addresses that are good until the next
        call and while this object lives.

        Raises ValueError if a penalty or a bias names a token outside the vocabulary.
        """
        listed = list(sequences)
        records = np.empty((len(listed), RECORD_WORDS), np.int64)
        packed = records.data
        tallies: dict[Sequence, _Tally] = {}
        for row, sequence in enumerate(listed):
            params = sequence.sampling
            addresses = _NOTHING
            if params.logit_bias or params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
                tally = self._tallies.get(sequence)
                if tally is None or tally.counted > len(sequence.output):
                    tally = _Tally(sequence, self.vocab)
                tally.count(sequence.output)
                tallies[sequence] = tally
                addresses = tally.addresses
            _RECORD.pack_into(
                packed,
                row * RECORD_BYTES,
                params.seed & _64_BITS,
                len(sequence.prompt) + len(sequence.output),
                min(params.top_k, _NO_LIMIT),
                *addresses,
                params.temperature,
                params.top_p,
                params.min_p,
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
                0,
            )
        self._tallies = tallies
        return records


class _Tally:
    """The distinct tokens that one sequence's penalties see, how often each is in its reply, and its biases."""

    __slots__ = ("_bias_tokens", "_bias_values", "_penalised", "_seen", "_slots", "_vocab", "addresses", "counted")

    addresses: tuple[int, int, int, int, int, int]  # words WORD_SEEN to WORD_BIAS_VALUES

    def __init__(self, sequence: Sequence, vocab: int) -> None:
        params = sequence.sampling
        self._vocab = vocab
        self._bias_tokens = np.array(list(params.logit_bias), np.int64)
        with np.errstate(over="ignore"):  # as torch has it: too large for float32 is infinite
            self._bias_values = np.array(list(params.logit_bias.values()), np.float64).astype(np.float32)
        self._penalised = bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
        # Only the repetition penalty looks at the prompt.
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(sequence.prompt if params.repetition_penalty != 1 else ()))}
        self._check(params.logit_bias)
        self._check(self._slots)
        self._seen = np.zeros((2, max(_FIRST_CAPACITY, 2 * len(self._slots))), np.int64)  # ids, then times
        self._seen[0, : len(self._slots)] = list(self._slots)
        self.counted = 0  # tokens of the reply
        self._place()

    def count(self, output: list[int]) -> None:
        """Take in what the reply has grown by."""
        if not self._penalised or self.counted == len(output):
            return
        new = output[self.counted :]
        self._check(new)
        for token in new:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == self._seen.shape[1]:
                self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)], axis=1)
                self._place()
            self._seen[0, slot] = token
            self._seen[1, slot] += 1
        self.counted = len(output)
        self.addresses = (len(self._slots), *self.addresses[1:])

    def _check(self, tokens: Iterable[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self._vocab), None)
        if wrong is not None:
            raise ValueError(f"expected token ids of 0 to {self._vocab - 1}, got {wrong}")

    def _place(self) -> None:
        """Say where the arrays are."""
        seen = self._seen.ctypes.data
        times = seen + self._seen.strides[0]
        self.addresses = (
            len(self._slots),
            seen,
            times,
            len(self._bias_tokens),
            self._bias_tokens.ctypes.data,
            self._bias_values.ctypes.data,
        )
