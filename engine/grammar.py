"""Grammars: what a reply must spell, compiled before it begins.

Owns what is asked for, found good or refused in words, and which grammars are kept (`Grammars`). The compiling is done by processes that
may end (`grammar_process.py`), so that no grammar can end this one: whatever a grammar does to the process that tries it out, it is
refused, and nobody else notices. Knows nothing of models and replies.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import grammar_bounds
from engine.core import Grammar, RequestError
from engine.grammar_client import Keeper, MaskProcess, MaskProcesses, tried
from engine.grammar_wire import Rows, Source
from engine.tokenizer import Tokenizer
from engine.tool_grammar import CallGrammar

KEPT_BYTES = 1024 * 1024  # of sources whose compiled grammars are kept; these are up to a hundred times as large
REFUSED_SECONDS = 60.0  # in which it is not found out again that a grammar is bad
KEPT_LEAST = 4096  # a grammar counts as so many at least
NAMES = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a Lark grammar"}


class Compiled:
    """A grammar that was found good, and by which key the processes know it."""

    __slots__ = ("__weakref__", "key", "source")

    def __init__(self, key: int, source: Source) -> None:
        self.key = key
        self.source = source


class _UnsureError(RequestError):
    """Of a grammar that was found good when it was tried out: another time it may be."""


@dataclass(slots=True, frozen=True)
class _Refused:
    """What was said of a grammar that was refused. Not the error itself: who catches that may write into it."""

    message: str
    param: str | None
    code: str
    when: float


class Grammars:
    """Compiles grammars for one model, and keeps those last used. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._keeper = Keeper(tokenizer, vocab_size, eos_ids)
        self.rows = Rows.make(vocab_size)
        self.processes = MaskProcesses(self._keeper, self.rows)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._refused: OrderedDict[Grammar, _Refused] = OrderedDict()
        self._forgotten: list[int] = []  # keys that nobody asks for any more

    def close(self) -> None:
        self._keeper.close()

    def known(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def check(self, grammar: Grammar) -> None:
        """Raises: RequestError for one that was refused a moment ago: to find that out again would take as long"""
        with self._lock:
            refused = self._refused.get(grammar)
        if refused and time.monotonic() < refused.when + REFUSED_SECONDS:
            raise RequestError(refused.message, refused.param, refused.code)

    def compiled(self, grammar: Grammar) -> Compiled:
        """Takes up to a fraction of a second, seconds for what is refused. Raises: RequestError, EngineError"""
        if known := self.known(grammar):
            return known
        self.check(grammar)
        try:
            compiled = self._compile(grammar)
        except _UnsureError:
            raise
        except RequestError as fault:
            with self._lock:
                self._refused.pop(grammar, None)
                self._refused[grammar] = _Refused(str(fault), fault.param, fault.code, time.monotonic())
                while sum(map(_weight, self._refused)) > KEPT_BYTES:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._refused.pop(grammar, None)
            self._kept[grammar] = compiled
            while len(self._kept) > 1 and sum(map(_weight, self._kept)) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return compiled

    def forgotten(self, process: MaskProcess) -> list[int]:
        """The grammars in a process that nobody asks for any more, to be told once."""
        with self._lock:  # finalizers append to it at any time
            keys = self._forgotten.copy()
            del self._forgotten[: len(keys)]
        found = process.known.intersection(keys)
        process.known -= found
        return [*found]

    def _compile(self, grammar: Grammar) -> Compiled:
        if not isinstance(grammar, CallGrammar):
            _check(grammar)
            return self._built(grammar, lambda fault: _refused(grammar, fault))
        if grammar.answer:  # first alone: what is wrong with it is told as it is without tools
            self.compiled(grammar.answer)
        spelled, schemas = grammar.spelled()
        return self._built(spelled, lambda fault: _refused_calls(grammar, schemas, fault))

    def _built(self, grammar: Grammar, refused: Callable[[str], RequestError]) -> Compiled:
        """Raises: RequestError, EngineError"""
        source = (grammar.kind, grammar.source)
        if fault := tried(self._keeper, source):
            raise refused(fault)
        key, fault = self.processes.compile(source, self.forgotten)
        if fault:
            told = refused(fault)
            raise _UnsureError(str(told), told.param, told.code)
        compiled = Compiled(key, source)
        weakref.finalize(compiled, self._forgotten.append, key).atexit = False
        return compiled


def _weight(grammar: Grammar) -> int:
    return max(KEPT_LEAST, grammar.size if isinstance(grammar, CallGrammar) else len(grammar.source))


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


def _refused(grammar: Grammar, fault: str) -> RequestError:
    return RequestError(f"expected {NAMES[grammar.kind]} that replies can be held to: {said(fault)}", "grammar", "invalid_grammar")


def _refused_calls(grammar: CallGrammar, schemas: dict[int, str], fault: str) -> RequestError:
    """In the grammar of calls only the schemas are a client's: it is told which one is at fault, not where in a text it has not seen."""
    place = re.match(r"(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?", fault)
    name = schemas.get(int(place[1])) if place else None
    reason = said(fault[place.end() :] if place and name is not None else fault)
    if name:
        return RequestError(f"{name}: expected a JSON schema that replies can be held to: {reason}", "tools", "invalid_grammar")
    if grammar.answer and name == "":
        return _refused(grammar.answer, reason)
    return RequestError(f"expected tools whose calls replies can be held to: {reason}", "tools", "invalid_grammar")


def said(fault: str) -> str:
    """What the library says, without the excerpts and the inner state that it adds."""
    first, *others = fault.strip().split("\n")
    said = " ".join([first, *(line for line in others if line.startswith("error: "))])
    return said if len(said) <= 300 else f"{said[:300]}..."
