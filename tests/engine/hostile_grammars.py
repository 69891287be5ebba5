"""Grammars that nest, refer and repeat without measure. Run as a program, it compiles them all and begins replies with those accepted, in
a process of its own: what they are after is its death."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]


def chain(links: int, link: Callable[[Schema], Schema]) -> str:
    """$defs, each of which refers to the next."""
    defs = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(links)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {"type": "integer"}}}, separators=(",", ":"))


def nested(levels: int, before: str, after: str) -> str:
    return before * levels + '{"type":"integer"}' + after * levels


LINKS: dict[str, Callable[[Schema], Schema]] = {
    "a reference": lambda next: next,
    "a property": lambda next: {"type": "object", "properties": {"a": next}, "required": ["a"]},
    "properties in properties": lambda next: {"properties": {"a": {"properties": {"a": {"properties": {"a": next}}}}}},
    "items": lambda next: {"type": "array", "items": next},
    "prefixItems": lambda next: {"type": "array", "prefixItems": [next]},
    "allOf": lambda next: {"allOf": [next]},
    "allOf and more": lambda next: {"allOf": [next, {"minimum": 0}]},
    "anyOf": lambda next: {"anyOf": [next, {"type": "null"}]},
    "oneOf": lambda next: {"oneOf": [next, {"type": "null"}]},
    "additionalProperties": lambda next: {"type": "object", "additionalProperties": next},
    "patternProperties": lambda next: {"type": "object", "patternProperties": {"^a$": next}},
    "a reference and more": lambda next: {**next, "minimum": 1},
}
NESTED = {
    "items": ('{"type":"array","items":', "}"),
    "properties": ('{"properties":{"a":', "}}"),
    "allOf": ('{"allOf":[{"minimum":0},', "]}"),
    "anyOf": ('{"anyOf":[{"type":"null"},', "]}"),
    "const": ('{"const":[', "]}"),
    "patternProperties": ('{"type":"object","patternProperties":{"^a$":', "}}"),
}


def lark_chain(links: int, name: str, rule: str) -> str:
    lines = [f"{name}{at}: {rule.format(f'{name}{at + 1}')}" for at in range(links)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{links}: "b"'])


def at(size: int) -> Iterator[tuple[str, str, str]]:
    """Name, kind and source of each."""
    for name, link in LINKS.items():
        yield f"a chain by {name}", "json_schema", chain(size, link)
        yield f"a chain in a grammar by {name}", "lark", f"start: %json {chain(size, link)}"
    anchored = {f"d{at}": {"$anchor": f"a{at}", "properties": {"x": {"$ref": f"#a{at + 1}"}}} for at in range(size)}
    yield "a chain by anchors", "json_schema", json.dumps({"$ref": "#a0", "$defs": {**anchored, "end": {"$anchor": f"a{size}"}}})
    escaped = {f"d/{at}~": {"properties": {"x": {"$ref": f"#/$defs/d~1{at + 1}%7E0"}}} for at in range(size)}
    yield "a chain by escapes", "json_schema", json.dumps({"$ref": "#/$defs/d~10~0", "$defs": {**escaped, f"d/{size}~": {}}})
    ring = {f"d{at}": {"properties": {"x": {"$ref": f"#/$defs/d{(at + 1) % size}"}}} for at in range(size)}
    yield "a ring", "json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": ring})
    for name, (before, after) in NESTED.items():
        yield f"nested {name}", "json_schema", nested(size, before, after)
        yield f"nested {name} in a grammar", "lark", f"start: %json {nested(size, before, after)}"
    yield "an enumeration", "json_schema", json.dumps({"enum": [f"v{at}" for at in range(size)]})
    patterns = [{"type": "string", "pattern": f"a{{{at}}}"} for at in range(size)]
    yield "patterns together", "json_schema", json.dumps({"allOf": patterns})
    yield "patterns of names", "json_schema", json.dumps({"patternProperties": {f"a{{{at}}}": {} for at in range(size)}})
    linked = {f"d{at}": {"pattern": f"a{{{at}}}", "$ref": f"#/$defs/d{at + 1}"} for at in range(min(size, 400))}
    yield "patterns by references", "json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": linked | {f"d{len(linked)}": {}}})
    for kind, before, after in (("groups", "(", ")"), ("options", "(a|", "b)?"), ("classes", "[", "]")):
        yield f"{kind} in an expression", "regex", f"{before * size}a{after * size}"
        yield f"{kind} in a pattern", "json_schema", json.dumps({"type": "string", "pattern": f"{before * size}a{after * size}"})
        yield f"{kind} in a grammar's expression", "lark", f"start: /{before * size}a{after * size}/"
    yield "alternatives", "regex", "|".join(f"x{at}" for at in range(size))
    yield "options", "regex", "a?" * size
    yield "repetitions", "regex", f"(ab?){{0,{size}}}"
    for name, rule in (
        ("r", '"a" {}'),
        ("r", "{}"),
        ("r", "{}?"),
        ("T", '"a" {}'),
        ("T", "{}"),
        ("T", '("a" {})?'),
        ("T", "/[a-z]+/ & ~{}"),
    ):
        yield f"a chain of {name}: {rule}", "lark", lark_chain(size, name, rule)
    yield "rules around", "lark", "start: r0\n" + "\n".join(f'r{at}: r{(at + 1) % size} "a" | "b"' for at in range(size))
    for before, after in (("(", ")"), ('["b" ', "]"), ('("b" ', ")?"), ("~", "")):
        yield f"brackets {before}", "lark", f'start: {before * size}"a"{after * size}'
        yield f"brackets {before} in a terminal", "lark", f'start: T\nT: {before * size}"a"{after * size}'
    yield "grammars in a grammar", "lark", "start: %lark {\n" * size + 'start: "a"' + "\n}\n" * size
    yield "all at once", "lark", "start: T\nT: " + " & ".join(f"/(.|\\n)*a{{{at}}}(.|\\n)*/" for at in range(size))


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(tokenizer_path: Path, eos_ids: list[int], unbounded: bool) -> None:
    from engine import grammar, grammar_bounds
    from engine.core import Grammar, RequestError, Tool
    from engine.grammar_guides import Guides
    from engine.tokenizer import Tokenizer
    from engine.tool_grammar import required
    from tests.engine.guiding import Walk

    if unbounded:
        grammar_bounds.MOST_LEVELS = grammar_bounds.MOST_RULES = 10**9
    compiler = grammar.Grammars(Tokenizer(tokenizer_path, eos_ids), 300, eos_ids)
    accepted: list[grammar.Compiled] = []
    for size in (100, 1000, 5000):
        for name, kind, source in at(size):
            say(f"\n{size} {name}: ")
            asked = [Grammar(kind, source)]  # type: ignore[arg-type]
            if kind == "json_schema":
                asked.append(required([Tool("f", "", source)], True))
            for one in asked:
                try:
                    accepted.append(compiler.compiled(one))
                    say("accepted ")
                except RequestError as refused:
                    say(f"{str(refused)[:160]} ")

    guides = Guides(compiler)
    for compiled in accepted:
        walk = Walk(guides, compiled)
        for _ in range(40):
            mask = walk.mask()
            if mask is None or walk.done:
                break
            walk.take(int((~mask).nonzero()[0][-1]))
    compiler.close()
    say("\nalive\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(id) for id in sys.argv[2].split(",")], sys.argv[3] == "unbounded")
