"""What a grammar may ask for, found out before the library that compiles it sees it.

Owns: the bounds that the library does not have itself. It recurses natively along references, which no exception ends; its lexer
multiplies what must hold together; and it has a state for each remainder of a number. Everything here walks without recursion.
Pure: the standard library alone.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

SOURCE_BYTES = 256 * 1024
MOST_NESTED = 120  # objects and arrays in each other: the library reads no more than 127
MOST_LEVELS = 2000  # of nesting and references, one in the other; each takes the library up to 5 kB of stack
MOST_RULES = 5000  # of a Lark grammar, for the same reason
MOST_TOGETHER = 16  # expressions that a text has to match all at once: a lexer's step may take 2 to the power of these
MOST_BESIDE = 8  # patterns with alternatives or references beside them, in the whole of a schema: these hold together in ways hard to count
MOST_REMAINDERS = 100_000  # that numbers are told apart by: a lexer has a state for each, and no limit of its own
MOST_OPTIONAL = 240  # properties of one object that may be left out: any may come next, so they are ways to go on, four each

_NAMES_OF_PLACES = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_JOINING = {*_REFERENCES, "allOf", "anyOf", "oneOf"}  # what they lead to holds together with what stands beside them
_LEADING = {*_JOINING, "patternProperties"}  # a schema without these is no graph, and a text has one pattern
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKET = re.compile(r"[^][{}]+")
_ALIKE = bytes.maketrans(b"[]{}", b"()()")
_STEPS = [(byte in b"(") - (byte in b")") for byte in range(256)]
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>')


def check_size(source: str) -> None:
    """Raises: ValueError"""
    try:
        size = len(source.encode())
    except UnicodeEncodeError as fault:
        raise ValueError("it is not Unicode text") from fault
    if size > SOURCE_BYTES:
        raise ValueError(f"it has {size} bytes, and {SOURCE_BYTES} is the most that one may have")


def check_schema(source: str) -> None:
    """Raises: ValueError for what the library's own limits would let through, or what is no JSON"""
    _check_schemas([source])


def check_expression(source: str) -> None:
    """Raises: ValueError for a regular expression that, written in a grammar, would not end where it ends"""
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise ValueError("it ends with a backslash that nothing follows")


def check_lark(source: str) -> None:
    """As `check_schema`, of a whole grammar and the schemas in it."""
    rules = sum(":" in line for line in source.splitlines())
    if rules > MOST_RULES:
        raise ValueError(f"it has {rules} rules, terminals and other lines with a colon, and {MOST_RULES} is the most")
    if (together := _LARK_TEXT.sub("", source).count("&")) > MOST_TOGETHER:
        raise ValueError(f"it has {together} times &, and {MOST_TOGETHER} is the most")
    reader, schemas = json.JSONDecoder(), []
    for place in re.finditer(r"%json\s*(?=\{)", source):
        try:
            schemas.append(source[place.end() : reader.raw_decode(source, place.end())[1]])
        except RecursionError as fault:
            raise ValueError("one of its schemas nests too deep") from fault
        except ValueError as fault:
            raise ValueError(f"expected JSON: {fault}") from fault
    _check_schemas(schemas)


def _check_schemas(sources: Sequence[str]) -> None:
    divisors: list[list[Fraction]] = []  # of each value
    names: set[str] = set()
    optional = beside = 0

    def seen(pairs: list[tuple[str, Any]]) -> int:
        """Of every object in the JSON, names that stand there twice included; what contains it sees how many it had."""
        nonlocal optional, beside
        own = {name for name, _ in pairs}
        names.update(own & _LEADING)
        beside += bool(own & {"pattern", "patternProperties"} and own & _JOINING)
        numbers = (value for name, value in pairs if name == "multipleOf" and type(value) in (int, float))
        divisors.append([Fraction(repr(value)) for value in numbers if 0 < value < math.inf])
        required = sum(len(value) for name, value in pairs if name == "required" and isinstance(value, list))
        optional = max([optional, *(value - required for name, value in pairs if name == "properties" and isinstance(value, int))])
        return len(pairs)

    for source in sources:
        if (levels := nesting(source)) > MOST_NESTED:
            raise ValueError(f"its JSON nests {levels} deep, and {MOST_NESTED} is the deepest")
        try:
            schema = json.loads(source)
            json.JSONDecoder(object_pairs_hook=seen).decode(source)
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"expected JSON: {fault}") from fault
        if isinstance(schema, dict) and names:
            _Schema(schema).check()
    if beside > MOST_BESIDE:
        raise ValueError(
            f"{beside} of its objects have a pattern and, beside it, allOf, anyOf, oneOf or a reference, and {MOST_BESIDE} is the most"
        )
    if optional > MOST_OPTIONAL:
        raise ValueError(f"one of its objects has {optional} properties that are not required, and {MOST_OPTIONAL} is the most")
    if names & _JOINING:
        divisors = [list(itertools.chain(*divisors))]  # they may be of one value
    if (remainders := sum(map(_remainders, filter(None, divisors)))) > MOST_REMAINDERS:
        message = f"its values of multipleOf come to {remainders} (in units of their last digit; of one value, their least common multiple)"
        raise ValueError(f"{message}, and {MOST_REMAINDERS} is the most")


def nesting(source: str) -> int:
    """How deep JSON's objects and arrays stand in each other, at most."""
    brackets = _NO_BRACKET.sub("", _STRING.sub("", source)).encode()
    levels = 0
    brackets = brackets.translate(_ALIKE)
    while levels < 8 and b"()" in brackets:  # mostly enough, and quicker
        brackets = brackets.replace(b"()", b"")
        levels += 1
    return levels + max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _remainders(divisors: list[Fraction]) -> int:
    unit = math.lcm(*{divisor.denominator for divisor in divisors})
    return math.lcm(*{int(divisor * unit) for divisor in divisors})


class _Schema:
    """A schema as a graph: its objects and arrays, and what stands in them or is referred to by them."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._nodes: list[Any] = [root]
        self._index = {id(root): 0}
        self._sums: set[int] = set()  # arrays of what must hold all at once
        for node in self._nodes:  # they become more on the way
            for name, member in node.items() if isinstance(node, dict) else enumerate(node):
                if isinstance(member, dict | list):
                    self._index[id(member)] = len(self._nodes)
                    if name == "allOf" and isinstance(node, dict) and isinstance(member, list):
                        self._sums.add(len(self._nodes))
                    self._nodes.append(member)
        self._unknown = False  # there is a reference that only the library can follow
        self._references = [self._references_of(node) for node in self._nodes]
        self._edges = [self._edges_of(at, node) for at, node in enumerate(self._nodes)]

    def check(self) -> None:
        if self._unknown and len(self._nodes) > MOST_LEVELS:
            message = f"it refers to its parts by their ids or anchors, and has {len(self._nodes)} objects and arrays"
            raise ValueError(f"{message}: then {MOST_LEVELS} is the most")
        levels, together = self._levels()
        if levels > MOST_LEVELS:
            raise ValueError(f"its references and what they refer to nest {levels} deep, and {MOST_LEVELS} is the deepest")
        if together > MOST_TOGETHER:
            raise ValueError(f"a text in it would have to match {together} patterns at once, and {MOST_TOGETHER} is the most")

    def _edges_of(self, at: int, node: Any) -> list[int]:
        members = node.values() if isinstance(node, dict) else node
        edges = [self._index[id(member)] for member in members if isinstance(member, dict | list)]
        if isinstance(node, dict):
            self._unknown |= at > 0 and any(isinstance(node.get(name), str) for name in _NAMES_OF_PLACES)
        return edges + self._references[at]

    def _references_of(self, node: Any) -> list[int]:
        references = [node.get(name) for name in _REFERENCES] if isinstance(node, dict) else []
        return [to for reference in references if isinstance(reference, str) for to in self._referred(reference)]

    def _referred(self, reference: str) -> list[int]:
        at: Any = self._root
        pointer = unquote(reference.removeprefix("#")).strip("/")
        if not reference.startswith("#"):
            self._unknown = True
            return []
        for name in pointer.split("/") if pointer else ():
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and name in at:
                at = at[name]
            elif isinstance(at, list) and name.isdecimal() and len(name) < 9 and int(name) < len(at):
                at = at[int(name)]
            else:
                self._unknown = True
                return []
        return [self._index[id(at)]] if isinstance(at, dict | list) else []

    def _levels(self) -> tuple[int, int]:
        """The longest way along the graph, in nodes, each knot of nodes that lead to each other counted whole; and how many patterns
        may have to match at once. (Tarjan's algorithm: a knot is done after all that it leads to.)"""
        count = len(self._nodes)
        met, low = [0] * count, [0] * count  # when each was first met, counting from 1; the earliest that it leads back to
        levels, together = [0] * count, [0] * count
        knots: list[int] = []
        path: list[tuple[int, Iterator[int]]] = []
        clock = 0
        to: int | None = 0
        while True:
            if to is not None and not met[to]:
                clock += 1
                met[to] = low[to] = clock
                knots.append(to)
                path.append((to, iter(self._edges[to])))
            elif to is not None and not levels[to]:
                low[path[-1][0]] = min(low[path[-1][0]], met[to])
            elif to is None:
                node, _ = path.pop()
                if low[node] == met[node]:
                    members = [knots.pop()]
                    while members[-1] != node:
                        members.append(knots.pop())
                    longest = max(levels[to] for member in members for to in (member, *self._edges[member]))
                    knotted = self._together_in(members, together) if len(members) > 1 else 0
                    for member in members:
                        together[member] = max(knotted, self._together(member, together))
                        levels[member] = longest + len(members)
                if not path:
                    return max(levels), max(together)
                low[path[-1][0]] = min(low[path[-1][0]], low[node])
            to = next(path[-1][1], None)

    def _together_in(self, knot: list[int], known: list[int]) -> int:
        """As many as may match at once where schemas lead to each other: all there are, if any of them hold together."""
        if not self._sums.intersection(knot):
            return 0
        outside = {to for at in knot for to in self._edges[at]}.difference(knot)
        own = sum(isinstance(node, dict) and isinstance(node.get("pattern"), str) for node in (self._nodes[at] for at in knot))
        return own + sum(known[to] for to in outside)

    def _together(self, at: int, known: list[int]) -> int:
        node, inner = self._nodes[at], self._edges[at]
        if at in self._sums:
            return sum(known[to] for to in inner)
        if not isinstance(node, dict):
            return max((known[to] for to in inner), default=0)
        several = node.get("patternProperties")
        conjoined = [*self._references[at], *(to for to in inner if to in self._sums)]
        alone = isinstance(node.get("pattern"), str) + sum(known[to] for to in conjoined)
        others = max((known[to] for to in inner if to not in self._sums), default=0)
        return max(len(several) if isinstance(several, dict) else 0, alone, others)
