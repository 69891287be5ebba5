"""Grammars as `llguidance` compiles and follows them. Only processes that may end import this (`grammar_process.py`).

Owns what the library is asked for and within which limits: Earley's parser over lexemes that are derivatives of regular expressions, with
the vocabulary as a trie. Knows nothing of processes, of models and of requests.

A grammar comes from anyone, so all that it can ask for is bounded: a mask takes a few milliseconds, or the reply ends with an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np

from engine.core import Grammar, RequestError
from engine.grammar_wire import Answer, Go, Mask, grammar_of
from engine.tokenizer import Place, Tokenizer
from engine.tool_grammar import JSON_OPTIONS, expression, held

TRIED = 128  # tokens of a reply that are tried out before a grammar is accepted
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


class Library:
    """The library, knowing one model's tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        vocabulary: Any = _Vocabulary(tokenizer, vocab_size, eos_ids)
        self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=list(eos_ids))
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._ends = np.array(sorted(eos_ids))

    def matcher(self, grammar: Grammar) -> Any:
        """A matcher at its beginning. It may be in error."""
        matcher = llguidance.LLMatcher(self._tokenizer, _spec(grammar), log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # every copy begins with what was worked out for it
        return matcher

    def tried(self, grammar: Grammar) -> Answer:
        """Whether some replies can be begun with a grammar: what a reply would fail by is better known before it begins."""
        return _answered(lambda: self._tried(grammar))

    def _tried(self, grammar: Grammar) -> Answer:
        matcher = self.matcher(grammar)
        for seed in range(2):
            if matcher.is_error():
                break
            chance, reply = random.Random(seed), matcher.deep_copy()
            for _ in range(TRIED):
                bits = np.frombuffer(reply.compute_bitmask(), np.uint8)
                if reply.is_error():
                    break
                allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(bits, bitorder="little")), self._ends, assume_unique=True)
                if not len(allowed) or not reply.consume_token(int(chance.choice(allowed))) or reply.is_stopped():
                    break
            if reply.is_error():
                matcher = reply
        return Answer(_fault(matcher))


class Replies:
    """How far each reply is in its grammar, by its id; and the grammars they begin with, compiled, by their keys."""

    def __init__(self, library: Library, row: Callable[[int], Mask]) -> None:
        """row: where the mask of that number is to be written."""
        self._library = library
        self._row = row
        self._matchers: dict[int, Any] = {}
        self._compiled: dict[int, Any] = {}

    def compile(self, key: int, grammar: Grammar) -> Answer:
        """Any thread may call it, while another calls the rest."""
        return _answered(lambda: self._compile(key, grammar))

    def _compile(self, key: int, grammar: Grammar) -> Answer:
        matcher = self._library.matcher(grammar)
        if not (fault := _fault(matcher)):
            self._compiled[key] = matcher
        return Answer(fault)

    def take(self, go: Go) -> Answer:
        """Begin the reply, if it is new, and go on with the tokens that were chosen."""
        return _answered(lambda: self._take(go))

    def _take(self, go: Go) -> Answer:
        if go.source and (fault := self._compile(go.key, grammar_of(go.source)).fault):
            return Answer(fault)
        if go.key >= 0:
            self._matchers[go.id] = self._compiled[go.key].deep_copy()
        matcher = self._matchers[go.id]
        for token in go.tokens:
            if not matcher.consume_token(token):
                return Answer(_fault(matcher))
        return Answer(done=bool(go.tokens) and matcher.is_stopped())

    def mask(self, go: Go) -> Answer:
        """Which tokens may not come next, in the reply's row."""
        return _answered(lambda: self._mask(go))

    def _mask(self, go: Go) -> Answer:
        row, matcher = self._row(go.row), self._matchers[go.id]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        np.equal(np.unpackbits(bits, count=len(row), bitorder="little"), 0, out=row)
        return Answer(_fault(matcher))

    def end(self, id: int) -> None:
        self._matchers.pop(id, None)

    def forget(self, key: int) -> None:
        self._compiled.pop(key, None)


def _answered(call: Callable[[], Answer]) -> Answer:
    """A panic in the library is no Exception; and whatever it is, it is one grammar's alone. Want of memory is the whole process's."""
    try:
        return call()
    except MemoryError:
        raise
    except ValueError as fault:
        return Answer(str(fault) or "ValueError")
    except BaseException as fault:
        return Answer(f"{type(fault).__name__}: {fault}")


def _fault(matcher: Any) -> str:
    return (matcher.get_error() or "unknown") if matcher.is_error() else ""


def _spec(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(held(grammar.source, JSON_OPTIONS))
        case "regex":
            return llguidance.LLMatcher.grammar_from_lark(f"start: {expression(grammar.source)}")
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)
