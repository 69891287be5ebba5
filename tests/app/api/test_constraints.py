"""What a request says of the form of its reply, read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.api import constraints as reading
from app.api.constraints import Constraints, FormatField, Function, ToolField, constraints
from app.api.errors import ApiError
from engine.core import Grammar, RequestError
from engine.tool_grammar import CallGrammar, auto, named, required

TOOLS = [ToolField("function", name=name) for name in ("f", "g", "h")]


def read(
    choice: Any = None, tools: list[ToolField] | None = TOOLS, parallel: bool | None = None, format: FormatField | None = None
) -> Constraints:
    return constraints(tools, choice, parallel, format, "text.format")


def refused(*args: Any, **fields: Any) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as caught:
        read(*args, **fields)
    refusal = caught.value.refusal
    return refusal.status, refusal.param, refusal.message


@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize("choice", [{"type": "function", "name": "g"}, {"type": "function", "function": {"name": "g"}}])
def test_a_named_tool_is_called_once(choice: Any, parallel: bool | None) -> None:
    form = read(choice, parallel=parallel)
    assert form.grammar == named(form.tools[1], 1)
    assert form.shown_choice == {"type": "function", "name": "g"}


def test_the_modes() -> None:
    form = read()
    assert form.grammar == auto(form.tools, True)
    assert read("required", parallel=False).grammar == required(form.tools, False)
    assert read("auto", tools=None).grammar is None
    assert read("none", tools=None).grammar is None
    for mode in ("auto", "none", "required"):
        assert read(mode).shown_choice == mode


def test_without_calls_the_tools_are_not_offered_and_cannot_be_called() -> None:
    form = read("none")
    assert form.tools == ()
    assert isinstance(form.grammar, CallGrammar)
    assert form.grammar.mode == "none"
    assert len(form.shown_tools) == 3
    schema = {"type": "object"}
    format = FormatField("json_schema", schema=schema)
    assert read("none", format=format).grammar == Grammar("json_schema", json.dumps(schema, separators=(",", ":")))


@pytest.mark.parametrize("mode", ["auto", "required", None])
@pytest.mark.parametrize("nested", [True, False])
def test_some_of_the_tools_are_allowed(mode: str | None, nested: bool) -> None:
    flat = [{"type": "function", "name": name} for name in ("h", "f")]
    inner: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": name}} for name in ("h", "f")] if nested else flat}
    inner |= {"mode": mode} if mode else {}
    form = read({"type": "allowed_tools", "allowed_tools": inner} if nested else {"type": "allowed_tools", **inner})
    usable = (form.tools[0], form.tools[2])
    assert form.grammar == (required(usable, True, (0, 2)) if mode == "required" else auto(usable, True, None, (0, 2)))
    assert len(form.tools) == 3, "the prompt stays the same"
    assert form.shown_choice == {"type": "allowed_tools", "mode": mode or "auto", "tools": flat}


DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "choice",
    [
        5,
        [],
        {},
        "any",
        {"type": "function"},
        {"type": "function", "name": 5},
        {"type": "function", "function": "f"},
        {"type": "function", "function": {"name": "x"}},
        {"type": "custom", "name": "f"},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "tools": None},
        {"type": "allowed_tools", "tools": 5},
        {"type": "allowed_tools", "tools": []},
        {"type": "allowed_tools", "tools": [5]},
        {"type": "allowed_tools", "tools": [None]},
        {"type": "allowed_tools", "tools": [{"function": "x"}]},
        {"type": "allowed_tools", "tools": [{"type": "function"}]},
        {"type": "allowed_tools", "tools": [{"type": "mcp", "name": "f"}]},
        {"type": "allowed_tools", "tools": [{"type": "function", "name": ["f"]}]},
        {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
        {"type": "allowed_tools", "mode": "none", "tools": [{"type": "function", "name": "f"}]},
        {"type": "allowed_tools", "mode": [], "tools": [{"type": "function", "name": "f"}]},
        {"type": "allowed_tools", "allowed_tools": None},
        {"type": "allowed_tools", "allowed_tools": 5},
        {"type": "allowed_tools", "allowed_tools": {"tools": 5}},
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": "x"}]}},
        {"type": "allowed_tools", "tools": DEEP},
        {"type": DEEP},
        DEEP,
    ],
)
def test_what_is_no_choice(choice: Any) -> None:
    status, param, message = refused(choice)
    assert (status, param) == (400, "tool_choice")
    assert "expected" in message


def test_a_choice_of_tools_needs_some() -> None:
    for choice in ("required", {"type": "function", "name": "f"}, {"type": "allowed_tools", "tools": [{"name": "f"}]}):
        assert refused(choice, tools=[])[:2] == (400, "tool_choice")


def test_schemas_are_only_so_large_and_so_deep() -> None:
    """And nothing else is found out about them here: the event loop waits."""
    half = {"type": "object", "description": "x" * 140_000}
    assert refused(tools=[ToolField("function", name=name, parameters=half) for name in ("f", "g")])[1] == "tools"
    whole = {"type": "object", "description": "x" * 270_000}
    assert refused(tools=[ToolField("function", function=Function("f", parameters=whole))])[1] == "tools.0.parameters"
    assert refused(tools=[], format=FormatField("json_schema", schema=whole))[1] == "text.format"
    for levels in (200, 900):
        deep: dict[str, Any] = {}
        for _ in range(levels):
            deep = {"items": deep}
        assert refused(tools=[ToolField("function", name="f", parameters=deep)])[1] == "tools.0.parameters"
        assert refused(tools=[], format=FormatField("json_schema", schema=deep))[1] == "text.format"
    assert refused(tools=TOOLS * 50)[1] == "tools"
    assert refused(tools=TOOLS * 2)[1] == "tools"


def test_schemas_are_not_looked_into_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    monkeypatch.setattr(json, "dumps", None)
    for choice in (None, "required", "none", {"type": "function", "name": "f"}):
        read(choice, tools=[ToolField("function", name="f", parameters={"type": "array"})])
    monkeypatch.undo()
    form = read("required", tools=[TOOLS[0], ToolField("function", name="x", parameters={"type": "array"})])
    assert isinstance(form.grammar, CallGrammar)
    with pytest.raises(RequestError, match=r"^tools\.1\.parameters: .*of an object"):
        form.grammar.spelled()


def test_parameters_are_shown_as_they_came() -> None:
    given = {"type": "object", "properties": {"a": {"enum": [1.5, None, "é"]}}}
    form = read(tools=[ToolField("function", name="f", parameters=given), TOOLS[1]])
    assert [tool["parameters"] for tool in form.shown_tools] == [given, {"type": "object", "properties": {}}]
    assert reading.MAX_SOURCE == 1 << 18
