"""What a request says of the form of its reply: tools and which to call, and structured output. All protocols share these.

Owns the reading of tools, tool choices and formats, and the one grammar that follows from them. The engine enforces it.
(OpenAI API reference: function calling, structured outputs)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.api.decoding import shown
from app.api.errors import ApiError
from engine import grammar_bounds, tool_grammar
from engine.core import Grammar, Tool

MAX_TOOLS = 128
MAX_SOURCE = 1 << 18  # characters of a schema, an expression or a grammar; and of all tools' schemas together

T = TypeVar("T")
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Source = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE)]


class Function(msgspec.Struct):
    name: Name
    description: Annotated[str, Meta(max_length=MAX_SOURCE)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct):
    """A tool as Responses and Realtime have it (flat), or as chat completions do (under `function`)."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    function: Function | None = None


class SchemaField(msgspec.Struct):
    """What chat completions have under `json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class FormatField(msgspec.Struct):
    """`text.format`, or chat completions' `response_format`. regex and grammar are extensions."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    json_schema: SchemaField | None = None  # chat completions
    regex: Source | None = None
    grammar: Source | None = None


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """One of the tools, in a choice of them: flat, or as chat completions have it."""

    type: Literal["function"] = "function"
    name: str | None = None
    function: FunctionName | None = None

    @property
    def named(self) -> str | None:
        return self.function.name if self.function else self.name


class AllowedTools(msgspec.Struct):
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class NestedAllowedTools(msgspec.Struct):
    """What chat completions have."""

    allowed_tools: AllowedTools


@dataclass(slots=True, frozen=True)
class Choice:
    mode: Literal["auto", "none", "required", "named"]
    names: tuple[str, ...] | None  # of the tools that may be called; None: all
    shown: Any  # as Responses shows it


@dataclass(slots=True, frozen=True)
class Constraints:
    tools: tuple[Tool, ...] = ()  # that the prompt offers
    grammar: Grammar | None = None
    shown_tools: list[dict[str, Any]] = field(default_factory=list)  # as Responses shows them, as the rest
    shown_choice: Any = "auto"
    shown_format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})


def constraints(
    tools: list[ToolField] | None,
    choice: Any,
    parallel: bool | None,
    format: FormatField | None,
    format_param: str,
) -> Constraints:
    """Raises: ApiError for what cannot be honoured; a schema is looked into when the grammar is compiled, off the event loop"""
    if tools and len(tools) > MAX_TOOLS:
        raise ApiError(f"expected at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    read = _tools(tools or [])
    offered = [tool for tool, _ in read]
    chosen = _chosen(choice)
    places = [at for at, tool in enumerate(offered) if chosen.names is None or tool.name in chosen.names]
    if chosen.names is not None and len(places) < len(set(chosen.names)):
        missing = next(name for name in chosen.names if all(tool.name != name for tool in offered))
        raise ApiError(f"expected tool_choice to name the tools there are, got {shown(missing)}", "tool_choice")
    if chosen.mode == "required" and not places:
        raise ApiError("expected tools with tool_choice: required, got none", "tool_choice")
    answer, shown_format = _format(format, format_param)
    return Constraints(
        tools=tuple(offered) if chosen.mode != "none" else (),
        grammar=_grammar(chosen.mode, offered, places, parallel is not False, answer),
        shown_tools=list(itertools.starmap(_shown_tool, read)),
        shown_choice=chosen.shown,
        shown_format=shown_format,
    )


def _grammar(mode: str, offered: list[Tool], places: list[int], parallel: bool, answer: Grammar | None) -> Grammar | None:
    usable = [offered[at] for at in places]
    match mode:
        case "named":
            return tool_grammar.named(usable[0], places[0])
        case "required":
            return tool_grammar.required(usable, parallel, places)
        case "auto" if usable:
            return tool_grammar.auto(usable, parallel, answer, places)
        case "none" if offered:
            return tool_grammar.none(answer)
    return answer


def _tools(fields: list[ToolField]) -> list[tuple[Tool, dict[str, Any]]]:
    """Each with its parameters as they came."""
    read: list[tuple[Tool, dict[str, Any]]] = []
    room = MAX_SOURCE
    for at, given in enumerate(fields):
        read.append(_tool(given, f"tools.{at}"))
        room -= len(read[-1][0].parameters)
        if room < 0:
            raise ApiError(f"expected parameters of at most {MAX_SOURCE} characters in all tools together, got more by tools.{at}", "tools")
    if len({tool.name for tool, _ in read}) < len(read):
        raise ApiError("expected tools of different names, got one twice", "tools")
    return read


def _tool(field: ToolField, where: str) -> tuple[Tool, dict[str, Any]]:
    if field.type != "function":
        raise ApiError(f"expected tools of type function, got {shown(field.type)} in {where}", where, "unsupported_tool")
    function = field.function
    if function is None:
        flat = {"name": field.name, "description": field.description, "parameters": field.parameters, "strict": field.strict}
        try:
            function = msgspec.convert(flat, Function)
        except msgspec.ValidationError as fault:
            raise ApiError(f"expected a tool with a name of 1 to 64 letters, digits, _ or -: {fault} in {where}", where) from None
    parameters = function.parameters or {"type": "object", "properties": {}}
    source = _source(parameters, f"{where}.parameters")
    return Tool(function.name, function.description or "", source, bool(function.strict)), parameters


def _source(schema: dict[str, Any], where: str) -> str:
    """A schema as text. Raises: ApiError when it is too large or too deep to be one"""
    try:
        source = msgspec.json.encode(schema).decode()
    except RecursionError:
        raise ApiError(f"expected a schema in {where}, got one nested too deeply", where) from None
    if len(source) > MAX_SOURCE:
        raise ApiError(f"expected a schema of at most {MAX_SOURCE} characters in {where}, got {len(source)}", where)
    if (levels := grammar_bounds.nesting(source)) > grammar_bounds.MOST_NESTED:
        message = f"expected a schema nested at most {grammar_bounds.MOST_NESTED} deep in {where}, got {levels}"
        raise ApiError(message, where)
    return source


def _chosen(choice: Any) -> Choice:
    match choice:
        case None:
            return Choice("auto", None, "auto")
        case "auto" | "none" | "required":
            return Choice(choice, None, choice)
        case {"type": "function"}:
            name = _read(choice, NamedTool).named
            if name:
                return Choice("named", (name,), {"type": "function", "name": name})
        case {"type": "allowed_tools"}:
            allowed = _read(choice, NestedAllowedTools).allowed_tools if "allowed_tools" in choice else _read(choice, AllowedTools)
            names = tuple(tool.named or "" for tool in allowed.tools)
            tools = [{"type": "function", "name": name} for name in names]
            return Choice(allowed.mode, names, {"type": "allowed_tools", "mode": allowed.mode, "tools": tools})
    got = shown(choice) if isinstance(choice, str) else "something else"
    raise ApiError(f"expected tool_choice auto, none, required, or an object of type function or allowed_tools, got {got}", "tool_choice")


def _read(choice: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as fault:
        wanted = "expected a function by its name, or allowed_tools with a mode of auto or required and a list of functions"
        raise ApiError(f"{wanted}, got another form of tool_choice: {fault}", "tool_choice") from None


def _format(field: FormatField | None, param: str) -> tuple[Grammar | None, dict[str, Any]]:
    match field.type if field else "text":
        case "text":
            return None, {"type": "text"}
        case "json_object":
            return Grammar("json_schema", '{"type":"object"}'), {"type": "json_object"}
        case "json_schema":
            assert field
            given = field.json_schema or field
            if given.schema is None:
                raise ApiError(f"expected a schema in {param}, got json_schema without one", param)
            source = _source(given.schema, param)
            echo = {"name": given.name or "schema", "description": given.description, "schema": given.schema, "strict": bool(given.strict)}
            return Grammar("json_schema", source), {"type": "json_schema", **echo}
        case "regex" if field and field.regex:
            return Grammar("regex", field.regex), {"type": "regex", "regex": field.regex}
        case "grammar" if field and field.grammar:
            return Grammar("lark", field.grammar), {"type": "grammar", "grammar": field.grammar}
        case kind:
            raise ApiError(
                f"expected a format of type text, json_object, json_schema, regex (with regex) or grammar (with grammar), "
                f"got {shown(kind)} in {param}",
                param,
            )


def _shown_tool(tool: Tool, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": parameters,
        "strict": tool.strict,
    }
