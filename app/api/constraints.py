"""What a request says of the form of its reply: tools and which to call, and structured output. All protocols share these.

Owns the reading of tools, tool choices and formats, and the one grammar that follows from them. The engine enforces it.
(OpenAI API reference: function calling, structured outputs)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app.api.decoding import shown
from app.api.errors import ApiError
from engine import tool_calls
from engine.core import Grammar, Tool

MAX_TOOLS = 128
MAX_SOURCE = 1 << 18  # characters of a schema, an expression or a grammar

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
    """Raises: ApiError for what cannot be honoured; a schema is looked into when the grammar is compiled"""
    offered = [_tool(tool, f"tools.{at}") for at, tool in enumerate(tools or ())]
    if len(offered) > MAX_TOOLS:
        raise ApiError(f"expected at most {MAX_TOOLS} tools, got {len(offered)}", "tools")
    if len({tool.name for tool in offered}) < len(offered):
        raise ApiError("expected tools of different names, got one twice", "tools")
    mode, usable = _chosen(choice, offered)
    answer, shown_format = _format(format, format_param)
    grammar = answer
    if mode == "required":
        grammar = tool_calls.required(usable, parallel is not False)
    elif mode == "auto" and usable:
        grammar = tool_calls.auto(usable, parallel is not False, answer)
    return Constraints(
        tools=tuple(offered) if mode != "none" else (),
        grammar=grammar,
        shown_tools=[_shown_tool(tool) for tool in offered],
        shown_choice=_shown_choice(choice),
        shown_format=shown_format,
    )


def _tool(field: ToolField, where: str) -> Tool:
    if field.type != "function":
        raise ApiError(f"expected tools of type function, got {shown(field.type)} in {where}", where, "unsupported_tool")
    function = field.function
    if function is None:
        flat = {"name": field.name, "description": field.description, "parameters": field.parameters, "strict": field.strict}
        try:
            function = msgspec.convert(flat, Function)
        except msgspec.ValidationError as fault:
            raise ApiError(f"expected a tool with a name of 1 to 64 letters, digits, _ or -: {fault} in {where}", where) from None
    parameters = msgspec.json.encode(function.parameters or {"type": "object", "properties": {}}).decode()
    if len(parameters) > MAX_SOURCE:
        raise ApiError(f"expected parameters of at most {MAX_SOURCE} characters, got {len(parameters)} in {where}", f"{where}.parameters")
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def _chosen(choice: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """auto, none or required, and of which tools."""
    match choice:
        case None | "auto":
            return "auto", tools
        case "none":
            return "none", []
        case "required" if tools:
            return "required", tools
        case {"type": "function", "name": str(name)} | {"type": "function", "function": {"name": str(name)}}:
            named = [tool for tool in tools if tool.name == name]
            if not named:
                raise ApiError(f"expected tool_choice to name one of the tools, got {shown(name)}", "tool_choice")
            return "required", named
        case {"type": "allowed_tools"} as allowed:
            inner = allowed.get("allowed_tools", allowed)
            names = [_name_of(one) for one in inner.get("tools", ())] if isinstance(inner, dict) else []
            subset = [tool for tool in tools if tool.name in names]
            if not subset or len(subset) != len(set(names)) or inner.get("mode", "auto") not in ("auto", "required"):
                raise ApiError("expected allowed_tools to have a mode of auto or required and to name some of the tools", "tool_choice")
            return inner.get("mode", "auto"), subset
        case "required":
            raise ApiError("expected tools with tool_choice: required, got none", "tool_choice")
    raise ApiError(f"expected tool_choice auto, none, required or a function that is one of the tools, got {shown(choice)}", "tool_choice")


def _name_of(tool: Any) -> str | None:
    return tool.get("name") or (tool.get("function") or {}).get("name") if isinstance(tool, dict) else None


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
            source = msgspec.json.encode(given.schema).decode()
            if len(source) > MAX_SOURCE:
                raise ApiError(f"expected a schema of at most {MAX_SOURCE} characters in {param}, got {len(source)}", param)
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


def _shown_tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": msgspec.json.decode(tool.parameters),
        "strict": tool.strict,
    }


def _shown_choice(choice: Any) -> Any:
    match choice:
        case None:
            return "auto"
        case {"type": "function", "function": {"name": name}}:
            return {"type": "function", "name": name}
    return choice
