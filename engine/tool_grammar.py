"""Grammars of a model's calls of tools: how what it writes is held to the form that `tool_calls.py` reads, and to the tools' schemas.

Owns what each choice of tools lets a reply spell. A grammar is told in few words here, and spelled out by whoever compiles it: schemas
are as large as clients make them. Knows nothing of models, templates or protocols. Pure: the standard library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine import grammar_bounds
from engine.core import Grammar, RequestError, Tool
from engine.tool_calls import MOST_CALLS, OPEN, call_text, parameters_of

# Blanks between JSON's tokens: models like to indent what they write, so there may be some; but not without end, or a small model that has
# lost its way writes nothing else until its last token. What a schema asks of these options for itself is overruled.
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{1,16}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
# A call's arguments: in one line, as Python writes JSON, so that no reply is lost in blanks.
CALL_OPTIONS = JSON_OPTIONS | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9k]")
_ANY = r"/(.|\n)*/"


@dataclass(slots=True, frozen=True)
class CallGrammar(Grammar):
    """What a reply may spell where there are tools: `kind` and `source` say nothing, `spelled` does."""

    mode: Literal["required", "auto", "none"] = "auto"
    tools: tuple[Tool, ...] = ()
    places: tuple[int, ...] = ()  # of the tools, among those of the request
    parallel: bool = True
    answer: Grammar | None = None  # what is not a call

    @property
    def size(self) -> int:
        return sum(len(tool.parameters) for tool in self.tools) + (len(self.answer.source) if self.answer else 0)

    def spelled(self) -> tuple[Grammar, dict[int, str]]:
        """As one grammar, and whose schema stands in which of its lines. Takes time in proportion to the schemas.

        Raises: RequestError for a schema that is none, or too much of one
        """
        lines = ["%llguidance {}", *self._start()]
        schemas: dict[int, str] = {}
        if self.answer and self.mode == "auto":
            lines.append(f"answer: {_spelled(self.answer)}")
            schemas[len(lines)] = ""
        if self.tools:
            lines.append(f"call: {_quoted(OPEN)} called")
            lines.append("called: " + " | ".join(f"called_{place}" for place in self.places))
        for place, tool in zip(self.places, self.tools, strict=True):
            before, after = call_text(tool.name, "\0").removeprefix(OPEN).split("\0")
            lines.append(f"called_{place}: {_quoted(before)} arguments_{place} {_quoted(after)}")
            lines.append(f"arguments_{place}: %json {_escaped(_enforced(tool, place))}")
            schemas[len(lines)] = f"tools.{place}.parameters"
        return Grammar("lark", "\n".join(lines) + "\n"), schemas

    def _start(self) -> list[str]:
        more = f' ("\\n" call){{0,{MOST_CALLS - 1}}}' if self.parallel else ""
        match self.mode:
            case "required":
                return [f"start: call{more}"]
            case "none":
                text = _spelled(self.answer) if self.answer else _ANY
                return ["start: TEXT", f"TEXT: {text} & ~CALLING", f"CALLING: {_ANY} {_quoted(OPEN)} {_ANY}"]
            case "auto" if self.answer:
                return [f"start: call{more} | answer"]
        return [f"start: TEXT | opened called{more}", f"TEXT: {_ANY}", f"opened[lazy]: TEXT {_quoted(OPEN)}"]


def required(tools: Sequence[Tool], parallel: bool, places: Sequence[int] = ()) -> Grammar:
    """At least one call, and nothing else; unless `parallel` exactly one. `places`: of the tools in the request, if these are not all."""
    return _of("required", tools, parallel, places)


def named(tool: Tool, place: int = 0) -> Grammar:
    """Exactly one call, of this tool."""
    return _of("required", [tool], False, [place])


def auto(tools: Sequence[Tool], parallel: bool, answer: Grammar | None = None, places: Sequence[int] = ()) -> Grammar:
    """Any text; but what begins as a call is one, of a tool there is, and after it come only others (none, unless `parallel`).

    With `answer`, either calls or what that grammar spells. Raises: RequestError for a grammar that cannot stand beside another
    """
    if answer and answer.kind == "lark":
        raise RequestError("expected a format of json_object, json_schema or regex beside tools, got a grammar", "tools")
    return _of("auto", tools, parallel, places, answer)


def none(answer: Grammar | None = None) -> Grammar:
    """No call. A reply that is JSON spells none, and a client's own grammar what it says."""
    if answer and answer.kind != "regex":
        return answer
    return CallGrammar("lark", "", "none", answer=answer)


def _of(
    mode: Literal["required", "auto"], tools: Sequence[Tool], parallel: bool, places: Sequence[int], answer: Grammar | None = None
) -> Grammar:
    if not tools:
        raise RequestError("expected at least one tool to call, got none", "tools")
    return CallGrammar("lark", "", mode, tuple(tools), tuple(places or range(len(tools))), parallel, answer)


def held(source: str, options: dict[str, Any]) -> str:
    """A schema, as JSON text, with how its values are written, whatever it says of that itself. `source` is an object."""
    inside = source.strip()[:-1].rstrip()
    return f'{inside}{"" if inside == "{" else ","}"x-guidance":{json.dumps(options)}}}'


def _spelled(answer: Grammar) -> str:
    if answer.kind == "json_schema":
        return f"%json {_escaped(held(answer.source, JSON_OPTIONS))}"
    return expression(answer.source)


def expression(source: str) -> str:
    """A regular expression as Lark writes it. `source` does not end inside an escape."""
    escaped = re.sub(r"\\\n|(\\.)|/", lambda found: found[1] or (r"\n" if found[0] != "/" else r"\/"), source)
    return f"/{escaped or '(?:)'}/"


def _enforced(tool: Tool, place: int) -> str:
    """A tool's schema. If the tool is not strict, what cannot be enforced is left out of account."""
    try:
        grammar_bounds.check_size(tool.parameters)
        if grammar_bounds.nesting(tool.parameters) > grammar_bounds.MOST_NESTED:
            raise ValueError(f"its JSON nests deeper than {grammar_bounds.MOST_NESTED}")
        schema = parameters_of(tool)
        source = json.dumps(schema if tool.strict else _without_patterns(schema))
        grammar_bounds.check_schema(source)
    except ValueError as fault:
        raise RequestError(
            f"tools.{place}.parameters: expected a JSON schema that replies can be held to: {fault}", "tools", "invalid_grammar"
        ) from fault
    except RequestError as fault:
        raise RequestError(f"tools.{place}.parameters: {fault}", "tools", fault.code) from fault
    return held(source, CALL_OPTIONS | {"lenient": not tool.strict})


def _without_patterns(schema: Any) -> Any:
    """A schema without the patterns that look around or back, which no automaton can follow; llguidance leaves out the rest itself."""
    match schema:
        case dict():
            return {
                key: value if key in ("const", "enum", "default", "examples") else _without_patterns(value)
                for key, value in schema.items()
                if not (key == "pattern" and isinstance(value, str) and _LOOKS_AROUND.search(value))
            }
        case list():
            return [_without_patterns(item) for item in schema]
    return schema


def _escaped(schema: str) -> str:
    """JSON in which no text looks like the grammar's own `%json`, and that stays in its line."""
    return schema.replace("%", r"\u0025").replace("\n", " ").replace("\r", " ")


def _quoted(text: str) -> str:
    return json.dumps(text)
