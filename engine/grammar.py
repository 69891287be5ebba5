"""Grammars: which tokens a reply may go on with, so that it spells what was asked for.

Owns: what is asked for, compiled (`Grammars`); how far each reply is in it (`Guides`); and the thread that works out masks over
the vocabulary while the model runs. Knows nothing of models, logits and steps. `llguidance` does the work, without the GIL: Earley's parser
over lexemes that are derivatives of regular expressions, with the vocabulary as a trie.

A grammar comes from anyone, so all that it can ask for is bounded: a mask takes a few milliseconds, or the reply ends with an error.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from engine import core
from engine.core import Grammar, RequestError
from engine.tokenizer import Place, Tokenizer

Mask = npt.NDArray[np.bool_]  # [vocab]: tokens that are not allowed

SOURCE_BYTES = 256 * 1024
KEPT_BYTES = 1024 * 1024  # of sources whose compiled grammars are kept; these are up to a hundred times as large
KEPT_LEAST = 4096  # a grammar counts as so many at least
MOST_REMAINDERS = 100_000  # that numbers are told apart by: a lexer has a state for each, and no limit of its own
MOST_OPTIONAL = 240  # properties of one object that may be left out: any may come next, so they are ways to go on, four each
# The library's own limits are for sources that are trusted. These let schemas of a few hundred properties, enumerations of ten thousand
# strings and the like through; hostile ones end within a fraction of a second, and a reply's lexer within some ten megabytes.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,  # ways to go on at one place
    "step_max_items": 4000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}
# Blanks between JSON's tokens: models like to indent what they write, so there may be some; but not without end, or a small model that has
# lost its way writes nothing else until its last token. What a schema asks of these options for itself is overruled.
JSON_OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{1,16}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
NAMES = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a Lark grammar"}


class _Vocabulary:
    """A model's tokens as the library wants to know them: the exact bytes of each, control tokens apart."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> list[int]:
        """How the model would have read a text that a grammar leaves no choice about."""
        try:
            ids = self._tokenizer.encode_plain(text, Place.INSIDE)
        except RequestError:
            return self._spelled(text)
        return ids if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode() else self._spelled(text)

    def _spelled(self, text: str) -> list[int]:
        by_bytes = {token: id for id, token in enumerate(self.tokens) if len(token) == 1 and id not in self._tokenizer.special_ids}
        return [by_bytes[byte] for byte in (bytes([value]) for value in text.encode()) if byte in by_bytes]


class Compiled:
    """A grammar that was found good. Every reply has a copy of its matcher, made when its first token is to be chosen."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def matcher(self) -> Any:
        return self._matcher.deep_copy()


class Grammars:
    """Compiles grammars for one model, and keeps those last used. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Takes a tenth of a second with the GIL held: not to be put off until somebody streams."""
        vocabulary: Any = _Vocabulary(tokenizer, vocab_size, eos_ids)
        self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=list(eos_ids))
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()

    def known(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def compiled(self, grammar: Grammar) -> Compiled:
        """Takes up to a fraction of a second. Raises: RequestError"""
        if known := self.known(grammar):
            return known
        compiled = Compiled(self._compile(grammar))
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > 1 and sum(map(_weight, self._kept)) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Any:
        _check(grammar)
        try:
            spec = _spec(grammar)
        except ValueError as fault:
            raise _refused(grammar, str(fault)) from fault
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, spec, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some faults show only here; and every copy begins with what was worked out for it
        except BaseException as fault:  # a panic in the library is no Exception
            raise _refused(grammar, f"{type(fault).__name__}: {fault}") from fault
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher


class Guide:
    """How far one reply is in its grammar."""

    __slots__ = ("_compiled", "_matcher", "done", "fault")

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._matcher: Any = None
        self.done = False  # nothing can follow
        self.fault = ""  # why the reply cannot go on

    def mask(self, vocab_size: int) -> Mask | None:
        """Which tokens may not come next; None if that cannot be found out. In the worker's thread."""
        try:
            if self._matcher is None:
                self._matcher = self._compiled.matcher()
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        except BaseException as fault:  # a panic in the library is no Exception, and whatever it is, it is this reply's alone
            self.fault = f"{type(fault).__name__}: {fault}"
        if self.fault or self._faulty():
            return None
        forbidden: Mask = np.unpackbits(bits, count=vocab_size, bitorder="little") == 0
        return forbidden

    def take(self, token: int) -> None:
        """Go on with the token that was chosen."""
        if self.fault:
            return
        try:
            taken = self._matcher.consume_token(token)
            self.done = taken and self._matcher.is_stopped()
        except BaseException as fault:  # as above
            self.fault = f"{type(fault).__name__}: {fault}"
            return
        if not taken:
            self._faulty()

    def _faulty(self) -> bool:
        if self._matcher.is_error():
            self.fault = _said(self._matcher.get_error())
        return bool(self.fault)


class Guides:
    """The guides of all replies that have a grammar, by their sequences' ids; and the thread that works out their masks.

    Between `masks` and the result of what it returns nothing else may be called: the engine thread waits for it, whatever comes between.
    """

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._guides: dict[int, Guide] = {}
        self._worker = ThreadPoolExecutor(1, "masks")

    def __len__(self) -> int:
        return len(self._guides)

    def add(self, sequence: core.Sequence) -> Guide | None:
        """The guide of a new sequence, if it has a grammar. Raises: RequestError if that was not compiled before, and is not good"""
        if not (grammar := sequence.sampling.grammar):
            return None
        compiled = sequence.compiled or self._grammars.compiled(grammar)
        assert isinstance(compiled, Compiled)
        guide = self._guides[sequence.id] = Guide(compiled)
        return guide

    def drop(self, sequence: core.Sequence) -> None:
        self._guides.pop(sequence.id, None)

    def of(self, sequence: core.Sequence) -> Guide | None:
        return self._guides.get(sequence.id)

    def masks(self, sequences: Iterable[core.Sequence]) -> Future[list[Mask | None]]:
        """For each sequence, which tokens may not come next; None for any."""
        guides = [self.of(sequence) for sequence in sequences]
        return self._worker.submit(lambda: [guide.mask(self._vocab_size) if guide else None for guide in guides])

    def close(self) -> None:
        self._worker.shutdown(wait=False)


def _weight(grammar: Grammar) -> int:
    return max(KEPT_LEAST, len(grammar.source))


def _spec(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_OPTIONS)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)


def _check(grammar: Grammar) -> None:
    """Raises: RequestError for what the library's own limits would let through."""
    try:
        size = len(grammar.source.encode())
    except UnicodeEncodeError as fault:
        raise _refused(grammar, "it is not Unicode text") from fault
    if size > SOURCE_BYTES:
        raise _refused(grammar, f"it has {size} bytes, and {SOURCE_BYTES} is the most that one may have")
    divisors: list[Fraction] = []
    optional = 0

    def seen(pairs: list[tuple[str, Any]]) -> int:
        """Of every object in the JSON, names that stand there twice included; what contains it sees how many it had."""
        nonlocal optional
        numbers = (value for name, value in pairs if name == "multipleOf" and type(value) in (int, float))
        divisors.extend(Fraction(repr(value)) for value in numbers if 0 < value < math.inf)
        required = sum(len(value) for name, value in pairs if name == "required" and isinstance(value, list))
        optional = max([optional, *(value - required for name, value in pairs if name == "properties" and isinstance(value, int))])
        return len(pairs)

    reader = json.JSONDecoder(object_pairs_hook=seen)
    try:
        if grammar.kind == "json_schema":
            reader.decode(grammar.source)
        elif grammar.kind == "lark":
            for place in re.finditer(r"%json\s*(?=\{)", grammar.source):
                reader.raw_decode(grammar.source, place.end())
    except (ValueError, RecursionError) as fault:
        raise _refused(grammar, f"expected JSON: {fault}") from fault
    if optional > MOST_OPTIONAL:
        raise _refused(grammar, f"one of its objects has {optional} properties that are not required, and {MOST_OPTIONAL} is the most")
    if (remainders := _remainders(divisors)) > MOST_REMAINDERS:
        message = f"its values of multipleOf have {remainders} as their least common multiple (in units of their last digit)"
        raise _refused(grammar, f"{message}, and {MOST_REMAINDERS} is the most")


def _remainders(divisors: list[Fraction]) -> int:
    unit = math.lcm(*{divisor.denominator for divisor in divisors})
    return math.lcm(*{int(divisor * unit) for divisor in divisors})


def _refused(grammar: Grammar, fault: str) -> RequestError:
    return RequestError(f"expected {NAMES[grammar.kind]} that replies can be held to: {_said(fault)}", "grammar", "invalid_grammar")


def _said(fault: str) -> str:
    """What the library says, without the excerpts and the inner state that it adds."""
    first, *others = fault.strip().split("\n")
    said = " ".join([first, *(line for line in others if line.startswith("error: "))])
    return said if len(said) <= 300 else f"{said[:300]}..."
