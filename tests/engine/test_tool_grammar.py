"""Grammars of calls, on the default model's tokenizer. (slow)"""

from __future__ import annotations

import json

import pytest

from engine.core import Grammar, RequestError, Tool
from engine.tool_grammar import auto, named, none, required
from tests.engine.test_tool_calls import PARIS, TIME, WEATHER, Enforcer, enforcer

__all__ = ["enforcer"]

pytestmark = pytest.mark.slow


def test_where_no_tool_is_to_be_called_nothing_begins_a_call(enforcer: Enforcer) -> None:
    for text in (
        "",
        "Hi!",
        "a < b <tool_cal> </tool_call> <tool_call",
        "日本語 🙂\n\n\ttabs",
        '{"name": "x", "arguments": {}}',
        "x" * 2000,
    ):
        assert enforcer.accepts(none(), text), text
    for text in ("<tool_call>", PARIS, f"Hi\n{PARIS} so", f"<<tool_call>{PARIS}"):
        assert not enforcer.accepts(none(), text), text
    held = none(Grammar("regex", "(.|\\n)*/"))
    assert enforcer.accepts(held, "a/")
    assert not any(enforcer.accepts(held, text) for text in ("a", f"{PARIS}/"))
    answer = Grammar("json_schema", '{"type": "object"}')
    assert none(answer) is answer, "JSON spells no call"


def test_a_named_tool_is_called_once_whatever_is_said_of_several(enforcer: Enforcer) -> None:
    assert enforcer.accepts(named(WEATHER, 3), PARIS)
    assert not enforcer.accepts(named(WEATHER, 3), f"{PARIS}\n{PARIS}")
    assert enforcer.accepts(required([WEATHER], True, [3]), f"{PARIS}\n{PARIS}")


@pytest.mark.parametrize(
    "source",
    [
        '{"type": "object", "x-guidance": {"whitespace_pattern": " +", "item_separator": "x", "lenient": true}}',
        ' { "x-guidance" : {"whitespace_flexible": false}, "type": "object", "title": "%json {" } ',
        "{}",
    ],
)
def test_an_answer_is_held_to_its_schema_beside_tools_as_alone(enforcer: Enforcer, source: str) -> None:
    answer = Grammar("json_schema", source)
    for grammar in (answer, auto([WEATHER], True, answer)):
        for text, good in (
            ('{"a":1,"b":2}', True),
            ('{ "a": 1,\n"b" :2}', True),
            (f'{{{" " * 16}"a":1}}', True),
            (f'{{{" " * 17}"a":1}}', False),
            ('{"a":1x"b":2}', False),
        ):
            assert enforcer.accepts(grammar, text) == good, text
    assert enforcer.accepts(auto([WEATHER], True, answer), PARIS)


@pytest.mark.parametrize(
    "answer",
    [
        Grammar("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'),
        Grammar("json_schema", '{"type": "object"}\nTEXT: /x/'),
        Grammar("json_schema", json.dumps({"type": "string", "multipleOf": 1234567})),
        Grammar("regex", "a\\"),
        Grammar("regex", "("),
    ],
)
def test_what_is_refused_alone_is_refused_beside_tools_in_the_same_words(enforcer: Enforcer, answer: Grammar) -> None:
    said = []
    for grammar in (answer, auto([WEATHER], True, answer), none(answer)):
        with pytest.raises(RequestError) as refused:
            enforcer.compiled(grammar)
        assert (refused.value.param, refused.value.code) == ("grammar", "invalid_grammar")
        said.append(str(refused.value))
    assert len(set(said)) == 1


@pytest.mark.parametrize("source", ["(?x)a # one / two\nb", "a/b\\/c", "/", "//", "[/]", "\\\\/", "a\\\nb: /x/", ""])
def test_an_expression_means_beside_tools_what_it_means_alone(enforcer: Enforcer, source: str) -> None:
    answer = Grammar("regex", source)
    for text in ("ab", "a/b/c", "/", "//", "\\/", "a", "a # one / two\nb", "a\nb: /x/", ""):
        assert enforcer.accepts(auto([WEATHER], True, answer), text) == enforcer.accepts(answer, text), text


def test_what_a_tool_says_of_itself_is_no_grammar(enforcer: Enforcer) -> None:
    """Nor is it looked into as one."""
    described = '%json {"multipleOf": 1234567} & & & & & & & & & & & & & & & & & & \n%json {'
    tool = Tool("get_weather", described, json.dumps({"description": described, "type": "object"}))
    assert enforcer.accepts(required([tool], False), PARIS)


def test_objects_of_many_members_that_may_be_left_out(enforcer: Enforcer) -> None:
    """What is accepted is held to until the reply's end."""
    for kind in ("string", "integer"):
        for count in (100, 160, 240):
            properties = {f"property_{at}": {"type": kind} for at in range(count)}
            schema = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
            value = dict.fromkeys([*properties][::7], "text" if kind == "string" else 12)
            assert enforcer.accepts(Grammar("json_schema", schema), json.dumps(value))
            call = TIME.replace('{"x": [1, {"y": null}]}', json.dumps(value))
            assert enforcer.accepts(named(Tool("a-b_C9", "", schema)), call)


def test_expressions_that_grow_without_measure_are_refused_before_the_reply(enforcer: Enforcer) -> None:
    assert enforcer.refuses(Grammar("regex", "(a{1,500}){1,500}"))
    assert not enforcer.refuses(Grammar("regex", "(a{1,50} ){1,50}"))
