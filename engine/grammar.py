"""Grammars: which tokens a reply may go on with, so that it spells what was asked for.

Owns: what is asked for, compiled (`Grammars`); how far each reply is in it (`Guides`); and the thread that works out masks over
the vocabulary while the model runs. Knows nothing of models, logits and steps. `llguidance` does the work, without the GIL: Earley's parser
over lexemes that are derivatives of regular expressions, with the vocabulary as a trie.

A grammar comes from anyone, so all that it can ask for is bounded: a mask takes a few milliseconds, or the reply ends with an error.
"""

from __future__ import annotations

import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt

from engine import core, grammar_bounds
from engine.core import Grammar, RequestError
from engine.tokenizer import Place, Tokenizer
from engine.tool_grammar import JSON_OPTIONS, CallGrammar, expression, held

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]  # [vocab]: tokens that are not allowed

KEPT_BYTES = 1024 * 1024  # of sources whose compiled grammars are kept; these are up to a hundred times as large
KEPT_LEAST = 4096  # a grammar counts as so many at least
STACK_BYTES = (
    256 * 1024 * 1024
)  # where grammars are compiled: the library recurses. Only what it uses is ever memory, and then not for long
TRIED = 128  # tokens of a reply that are tried out while a grammar is compiled, before it is accepted
# The library's own limits are for sources that are trusted. These let schemas of a few hundred properties, enumerations of ten thousand
# strings and the like through; hostile ones end within a fraction of a second, and a reply's lexer within some ten megabytes.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,  # ways to go on at one place
    "step_max_items": 20_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
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
        self._ends = np.array(sorted(eos_ids))
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
        if not isinstance(grammar, CallGrammar):
            _check(grammar)
            return self._built(grammar, lambda fault: _refused(grammar, fault))
        if grammar.answer:  # first alone: what is wrong with it is told as it is without tools
            self.compiled(grammar.answer)
        spelled, schemas = grammar.spelled()
        return self._built(spelled, lambda fault: _refused_calls(grammar, schemas, fault))

    def _built(self, grammar: Grammar, refused: Callable[[str], RequestError]) -> Any:
        """Raises: RequestError"""
        try:
            matcher = _with_deep_stack(lambda: self._tried(grammar))
        except BaseException as fault:  # a panic in the library is no Exception
            raise refused(str(fault) if isinstance(fault, ValueError) else f"{type(fault).__name__}: {fault}") from fault
        if matcher.is_error():
            raise refused(matcher.get_error())
        return matcher

    def _tried(self, grammar: Grammar) -> Any:
        """The matcher, after some replies were begun with it: what a reply would fail by is better known before it begins."""
        matcher = llguidance.LLMatcher(self._tokenizer, _spec(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            return matcher
        matcher.compute_bitmask()  # every copy begins with what was worked out for it
        for seed in range(2):
            chance, reply = random.Random(seed), matcher.deep_copy()
            for _ in range(TRIED):
                bits = np.frombuffer(reply.compute_bitmask(), np.uint8)
                if reply.is_error():
                    return reply
                allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(bits, bitorder="little")), self._ends, assume_unique=True)
                if not len(allowed) or not reply.consume_token(int(chance.choice(allowed))) or reply.is_stopped():
                    break
            if reply.is_error():
                return reply
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
    return max(KEPT_LEAST, grammar.size if isinstance(grammar, CallGrammar) else len(grammar.source))


def _spec(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(held(grammar.source, JSON_OPTIONS))
        case "regex":
            return llguidance.LLMatcher.grammar_from_lark(f"start: {expression(grammar.source)}")
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)


def _check(grammar: Grammar) -> None:
    """Raises: RequestError for what the library's own limits would let through."""
    try:
        grammar_bounds.check_size(grammar.source)
        if grammar.kind == "json_schema":
            grammar_bounds.check_schema(grammar.source)
            if not grammar.source.lstrip().startswith("{"):
                raise ValueError("expected a JSON object")
        elif grammar.kind == "regex":
            grammar_bounds.check_expression(grammar.source)
        elif grammar.kind == "lark":
            grammar_bounds.check_lark(grammar.source)
    except ValueError as fault:
        raise _refused(grammar, str(fault)) from fault


_stack_size = threading.Lock()


def _with_deep_stack(call: Callable[[], T]) -> T:
    """`call`, in a thread of its own, since the size of a stack is settled when a thread begins."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as fault:
            result.set_exception(fault)

    with _stack_size:  # who begins another thread meanwhile has a deep stack too, which costs nothing
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()


def _refused(grammar: Grammar, fault: str) -> RequestError:
    return RequestError(f"expected {NAMES[grammar.kind]} that replies can be held to: {_said(fault)}", "grammar", "invalid_grammar")


def _refused_calls(grammar: CallGrammar, schemas: dict[int, str], fault: str) -> RequestError:
    """In the grammar of calls only the schemas are a client's: it is told which one is at fault, not where in a text it has not seen."""
    place = re.match(r"(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?", fault)
    name = schemas.get(int(place[1])) if place else None
    said = _said(fault[place.end() :] if place and name is not None else fault)
    if name:
        return RequestError(f"{name}: expected a JSON schema that replies can be held to: {said}", "tools", "invalid_grammar")
    if grammar.answer and name == "":
        return _refused(grammar.answer, said)
    return RequestError(f"expected tools whose calls replies can be held to: {said}", "tools", "invalid_grammar")


def _said(fault: str) -> str:
    """What the library says, without the excerpts and the inner state that it adds."""
    first, *others = fault.strip().split("\n")
    said = " ".join([first, *(line for line in others if line.startswith("error: "))])
    return said if len(said) <= 300 else f"{said[:300]}..."
