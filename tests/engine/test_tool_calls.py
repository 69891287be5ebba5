"""The text of calls: read back piece by piece, however it is cut; and enforced while it is generated."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import Grammar, RequestError, Tool
from engine.grammar import Compiled, Grammars
from engine.grammar_library import Library
from engine.tokenizer import Tokenizer
from engine.tool_calls import (
    CLOSE,
    MOST_CALLS,
    OPEN,
    Call,
    CallArguments,
    CallBegun,
    CallEnded,
    Piece,
    Said,
    ToolCallParser,
    call_text,
    is_object,
    merged,
    parse,
    said,
    whole_calls,
)
from engine.tool_grammar import CallGrammar, auto, named, required
from tests.engine.chats import bytes_tokenizer

HOSTILE = r'{"a": "</tool_call> \" } \\", "b": [1, -2.5e3, {}, [], true, null, "é\u00e9\n"], "": {"name": "x"}}'


def call(index: int, name: str, arguments: str, whole: bool = True) -> list[Piece]:
    return [CallBegun(index, name), CallArguments(index, arguments), CallEnded(index, whole)]


def streamed(parts: list[str]) -> list[Piece]:
    parser = ToolCallParser()
    return [*(piece for part in parts for piece in parser.feed(part)), *parser.end()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("plain < text", [Said("plain < text")]),
        (" \n kept as it is \n", [Said(" \n kept as it is \n")]),
        ("  ", [Said("  ")]),
        ("a <tool_cal", [Said("a <tool_cal")]),
        (call_text("x", HOSTILE), call(0, "x", HOSTILE)),
        (call_text("x", ""), call(0, "x", "{}")),
        (
            f"Hm.\n\n{call_text('x', '{}')}\n\n{call_text('y', '{}')}\n done \n",
            [Said("Hm."), *call(0, "x", "{}"), *call(1, "y", "{}"), Said("done")],
        ),
        (f'{OPEN}\t{{"name":"x" ,\n"arguments":{{"a":1}}\n}}{CLOSE}\n', call(0, "x", '{"a":1}')),
        (f'{OPEN}{{"name": "x", "parameters": {{}}}}{CLOSE}', call(0, "x", "{}")),
        (f'{OPEN}{{"arguments": {{"a": 1}}, "name": "x"}}{CLOSE}', call(0, "x", '{"a": 1}')),
        (f'{OPEN}{{"id": 7, "name": "x", "arguments": {{}}}}{CLOSE}', call(0, "x", "{}")),
        (f'{OPEN}{{"name": "x", "arguments": {{}}, "id": 7}}{CLOSE}', call(0, "x", "{}")),
        (f'{OPEN}{{"name": "x", "arguments": "{{\\"a\\": 1}}"}}{CLOSE}', call(0, "x", '{"a": 1}')),
        (f'{OPEN}{{"name": "x"}}{CLOSE}', call(0, "x", "{}")),
        (f'{OPEN}{{"name": "x", "arguments": {{}}}}', call(0, "x", "{}")),  # CLOSE is not missed
        (f'{OPEN}{{"name": "x", "arguments": {{}}}}</tool', call(0, "x", "{}")),
        (f'{OPEN}{{"name": "x", "arguments": {{}}}}</toll>', [*call(0, "x", "{}"), Said("</toll>")]),
        (f'{OPEN}{{"name": "x", "name": "y", "arguments": {{}}}}', call(0, "x", "{}")),  # the first counts
        (f'{OPEN}{{"arguments": {{}}, "name": "x", "arguments": {{"b": 1}}}}', call(0, "x", "{}")),
        # broken off
        (f'{OPEN}\n{{"name": "x", "arguments": {{"a": ', call(0, "x", '{"a": ', whole=False)),
        (f'{OPEN}\n{{"name": "x", "arguments": {{}}', call(0, "x", "{}", whole=False)),
        (f'{OPEN}{{"name": "x", "arguments": {{"a": tru}}}} so', [*call(0, "x", '{"a": tru', whole=False), Said("}} so")]),
        (f'{OPEN}{{"name": "x", "arguments": {{}}, ]', [*call(0, "x", "{}", whole=False), Said(", ]")]),
        (f'{OPEN}{{"name": "x", "arguments": {{{call_text("y", "{}")}', [*call(0, "x", "{", whole=False), *call(1, "y", "{}")]),
        # text
        (f"a {OPEN} b", [Said(f"a {OPEN} b")]),
        (f'a {OPEN}\n{{"name": "x', [Said(f'a {OPEN}\n{{"name": "x')]),
        (f'{OPEN}{{"name": 5, "arguments": {{}}}}{CLOSE}', [Said(f'{OPEN}{{"name": 5, "arguments": {{}}}}{CLOSE}')]),
        (f'{OPEN}{{"name": "", "arguments": {{}}}}', [Said(f'{OPEN}{{"name": "", "arguments": {{}}}}')]),
        (f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}', [Said(f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}')]),
        (f'{OPEN}{{"name": "x", "arguments": [1]}}', [Said(f'{OPEN}{{"name": "x", "arguments": [1]}}')]),
        (f'{OPEN}{{"name": "x", "arguments": "no"}}', [Said(f'{OPEN}{{"name": "x", "arguments": "no"}}')]),
        (f'{OPEN}{{"name": "x", "arguments": "{{no"}}', [Said(f'{OPEN}{{"name": "x", "arguments": "{{no"}}')]),
        (f"{OPEN}[] {OPEN} \n{call_text('x', '{}')}", [Said(f"{OPEN}[] {OPEN}"), *call(0, "x", "{}")]),
        (f"{call_text('x', '{}')}\n{OPEN} no", [*call(0, "x", "{}"), Said(f"{OPEN} no")]),
    ],
)
def test_calls_and_text_are_told_apart(text: str, expected: list[Piece]) -> None:
    assert parse(text) == expected
    assert merged(streamed(list(text))) == expected, "letter by letter"


PARTS = st.sampled_from(
    [
        *(
            OPEN,
            CLOSE,
            OPEN[:4],
            OPEN[4:],
            CLOSE[:3],
            "{",
            "}",
            '"',
            "\\",
            ",",
            ":",
            " ",
            "\n",
            "[",
            "]",
            "x",
            "é🙂",
            "1",
            "-",
            "tru",
            "true",
            "\\u0",
        ),
        *('{"name": "x"', ', "arguments": {', '"parameters":{}', '"a": "', "}}", '{"name": "x", "arguments": {"a": ["', "\x00"),
        *(call_text("f", "{}"), call_text("g", HOSTILE), f'{OPEN}{{"arguments": {{}}, "name": "x"}}'),
    ]
)


@given(parts=st.lists(PARTS, max_size=12), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_how_a_text_is_cut_changes_nothing(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cut = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    assert merged(streamed(cut)) == parse(text) == merged(streamed(list(text)))


@given(parts=st.lists(PARTS, max_size=12))
def test_nothing_is_lost(parts: list[str]) -> None:
    """What is said stands in the text, in order; without calls, it is the text. Whole arguments are objects."""
    text = "".join(parts)
    pieces = parse(text)
    at = 0
    for piece in pieces:
        if isinstance(piece, Said):
            at = text.index(piece.text, at) + len(piece.text)
    if not any(isinstance(piece, CallBegun) for piece in pieces):
        assert said(text) == text
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole_calls(text))
    begun = [piece.index for piece in pieces if isinstance(piece, CallBegun)]
    assert begun == [piece.index for piece in pieces if isinstance(piece, CallEnded)] == list(range(len(begun)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
    arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    plain=st.booleans(),
)
def test_a_call_is_read_as_it_was_written(name: str, arguments: dict[str, object], plain: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=not plain, indent=None if plain else 2)
    text = f"{call_text(name, written)}\n{call_text('other', '{}')}"
    assert whole_calls(text) == [Call(name, written), Call("other", "{}")] and said(text) == ""


@given(text=st.text('{}[]",:\\ tfn01.-e\n', max_size=20))
def test_objects_are_what_json_calls_so(text: str) -> None:
    try:
        expected = isinstance(json.loads(text), dict)
    except ValueError:
        expected = False
    assert is_object(text) == expected


def test_arguments_stream_as_they_come_and_text_waits_only_for_a_call() -> None:
    parser = ToolCallParser()
    assert parser.feed("Let me see") == [Said("Let me see")]
    assert parser.feed(" <") == [] and parser.feed("b>") == [Said(" <b>")]
    assert parser.feed(f'\n{OPEN}\n{{"name": "x", "arguments"') == []
    assert parser.feed(': {"a') == [CallBegun(0, "x"), CallArguments(0, '{"a')]
    assert parser.feed('": "b') == [CallArguments(0, '": "b')]
    assert parser.feed('"}') == [CallArguments(0, '"}')]
    assert parser.feed("}\n</tool_") == [CallEnded(0, True)] and parser.feed("call>") == [] and parser.end() == []


def test_what_nests_too_deep_is_no_call() -> None:
    assert whole_calls(call_text("x", '{"a": ' * 120 + "1" + "}" * 120))
    assert not whole_calls(call_text("x", '{"a": ' * 100_000 + "1" + "}" * 100_000))


@pytest.mark.parametrize(
    "unit", [OPEN, OPEN + '{"a": "', " ", OPEN + "{", "<tool_", call_text("x", "{}"), OPEN + '{"name": "x", "arguments": {"a": ']
)
def test_reading_takes_time_in_proportion(unit: str) -> None:
    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            parser, begun = ToolCallParser(), time.process_time()
            for _ in range(count):
                parser.feed(unit)
            parser.end()
            best = min(best, time.process_time() - begun)
        return best

    assert seconds(8_000) < 30 * seconds(1_000) + 0.1  # 64 times, were it the square


def test_importing_it_brings_in_nothing() -> None:
    code = "import sys; before = set(sys.modules); import engine.tool_calls; print(*(set(sys.modules) - before))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) == {"engine"}


# Grammars.
WEATHER = Tool(
    "get_weather", "d", '{"properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false}', True
)
CLOCK = Tool("a-b_C9", "d", "")
PARIS = call_text("get_weather", '{"city": "Paris"}')
TIME = call_text("a-b_C9", '{"x": [1, {"y": null}]}')


def spelled(grammar: Grammar) -> str:
    assert isinstance(grammar, CallGrammar)
    return grammar.spelled()[0].source


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("{", "what is no JSON"),
        ("[" * 100, "what is no JSON"),
        ("3", "got 3"),
        ('{"type": "string"}', 'the type "string"'),
        ('{"type": ["object", "null"]}', "the type"),
    ],
)
def test_parameters_that_are_no_schema_of_an_object_are_refused(parameters: str, expected: str) -> None:
    with pytest.raises(RequestError, match="'x' to be a JSON Schema of an object") as caught:
        spelled(named(Tool("x", "", parameters)))
    assert expected in str(caught.value) and caught.value.param == "tools"


def test_a_grammar_needs_tools() -> None:
    with pytest.raises(RequestError, match="at least one tool"):
        auto([], parallel=True)


class Enforcer:
    """What the engine makes of a grammar for a model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, vocab_size, sorted(tokenizer.eos_ids))
        self._library = Library(tokenizer, vocab_size, sorted(tokenizer.eos_ids))

    def refuses(self, grammar: Grammar) -> bool:
        try:
            self._grammars.compiled(grammar)
        except RequestError:
            return True
        return False

    def compiled(self, grammar: Grammar) -> Compiled:
        return self._grammars.compiled(grammar)

    def accepts(self, grammar: Grammar, reply: str | list[int]) -> bool:
        """`reply` may be generated, and be whole."""
        matcher = self._library.matcher(Grammar(*self._grammars.compiled(grammar).source))
        ids = self.tokenizer.encode_plain(reply) if isinstance(reply, str) else reply
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def enforcer() -> Enforcer:
    from engine.weights.convert import prepare

    checkpoint = prepare("default")
    return Enforcer(Tokenizer(checkpoint.tokenizer_path, checkpoint.eos_ids), checkpoint.config.vocab_size)


@pytest.mark.parametrize("described", ["", '%json {"', "\n// # /x/ <|im_end|> %ignore @a"])
def test_a_model_may_write_a_call_in_its_own_tokens(tmp_path: Path, described: str) -> None:
    tokenizer = bytes_tokenizer(tmp_path, user=(OPEN, CLOSE))
    enforcer = Enforcer(tokenizer, tokenizer.vocab_size)
    tool = Tool("x", described, json.dumps({"description": described, "properties": {described: {"const": 1}}, "required": [described]}))
    arguments = json.dumps({described: 1})
    inner = tokenizer.encode_plain(f'\n{{"name": "x", "arguments": {arguments}}}\n')
    own = [tokenizer.control[OPEN], *inner, tokenizer.control[CLOSE]]
    for grammar in (auto([tool], True), required([tool], True), named(tool)):
        assert enforcer.accepts(grammar, own) and enforcer.accepts(grammar, call_text("x", arguments))
        assert not enforcer.accepts(grammar, own[:-1]) and not enforcer.accepts(grammar, own[:1])
    assert enforcer.accepts(auto([tool], True), [*tokenizer.encode_plain("Hi "), *own])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_one_of_a_tool_there_is_and_nothing_else(enforcer: Enforcer, parallel: bool) -> None:
    grammar = required([WEATHER, CLOCK], parallel)
    for text in (PARIS, TIME, call_text("get_weather", '{"city": "</tool_call> \\"}"}')):
        assert enforcer.accepts(grammar, text) and len(whole_calls(text)) == 1
    for text in (
        "",
        "Hi",
        f"Hi {PARIS}",
        f"{PARIS} ",
        call_text("no", "{}"),
        call_text("get_weather", '{"town": "x"}'),
        call_text("get_weather", "{}"),
        call_text("a-b_C9", "[]"),
        PARIS[:-1],
    ):
        assert not enforcer.accepts(grammar, text), text
    assert enforcer.accepts(grammar, f"{PARIS}\n{TIME}") == parallel
    assert enforcer.accepts(grammar, "\n".join([TIME] * MOST_CALLS)) == parallel
    assert not enforcer.accepts(grammar, "\n".join([TIME] * (MOST_CALLS + 1)))


@pytest.mark.slow
def test_a_named_call_is_exactly_one_of_that_tool(enforcer: Enforcer) -> None:
    assert enforcer.accepts(named(WEATHER), PARIS)
    assert not any(enforcer.accepts(named(WEATHER), text) for text in ("", "Hi", TIME, f"{PARIS}\n{PARIS}"))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_of_the_models_own_choice_is_well_formed(enforcer: Enforcer, parallel: bool) -> None:
    grammar = auto([WEATHER, CLOCK], parallel)
    free = ["", "Hi!", "a < b <tool <tool_cal> </tool_call> <tool_call", "日本語 🙂\n\n\ttabs", '{}[]"\\ %json /x/ <|im_end|>', "x" * 2000]
    for text in (*free, *(f"{text}{PARIS}" for text in free), TIME):
        assert enforcer.accepts(grammar, text), text
    for text in (
        OPEN,
        f"Hi {OPEN}",
        f"Hi {OPEN} there",
        call_text("no", "{}"),
        call_text("get_weather", "{}"),
        f"{PARIS} so",
        f"{PARIS}\n",
        f"{PARIS}\nso",
    ):
        assert not enforcer.accepts(grammar, text), text
    assert enforcer.accepts(grammar, f"Hi\n{PARIS}\n{TIME}") == parallel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "spelled"),
    [(Grammar("json_schema", '{"type": "object"}'), '{"a": [1]}'), (Grammar("regex", r"a/b\/c\\\d+\n?"), "a/b/c\\12")],
)
def test_beside_tools_a_reply_is_calls_or_what_its_format_says(enforcer: Enforcer, answer: Grammar, spelled: str) -> None:
    grammar = auto([WEATHER, CLOCK], True, answer)
    for text in (spelled, PARIS, f"{PARIS}\n{TIME}"):
        assert enforcer.accepts(grammar, text), text
    for text in ("Hello", f"{spelled}{PARIS}", f"Hm. {PARIS}", "<tool_call>"):
        assert not enforcer.accepts(grammar, text), text


def test_a_grammar_of_its_own_cannot_stand_beside_tools() -> None:
    with pytest.raises(RequestError, match="beside tools"):
        auto([Tool("x", "", "{}")], True, Grammar("lark", "start: /a/"))


@pytest.mark.slow
def test_schemas_that_cannot_be_enforced_are_refused_of_strict_tools_alone(enforcer: Enforcer) -> None:
    for member in (
        {"type": "string", "pattern": "^(?=a)b"},
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"(a)\1"}]},
        {"not": {"type": "string"}},
        {"uniqueItems": True},
        {"type": "string", "format": "unheard-of"},
    ):
        parameters = json.dumps({"type": "object", "properties": {"a": member}, "required": ["a"]})
        assert not enforcer.refuses(auto([Tool("x", "", parameters)], True))
        assert enforcer.refuses(auto([Tool("x", "", parameters, strict=True)], True)), member
        assert not enforcer.accepts(named(Tool("x", "", parameters)), call_text("x", '{"b": 1}'))
    constant = '{"properties": {"pattern": {"const": {"pattern": "(?=a)"}}}, "required": ["pattern"]}'
    assert enforcer.accepts(named(Tool("x", "", constant)), call_text("x", '{"pattern": {"pattern": "(?=a)"}}'))
    assert not enforcer.accepts(named(Tool("x", "", constant)), call_text("x", '{"pattern": {}}'))
    for parameters in ('{"$ref": "#/nowhere"}', '{"properties": {"a": {"type": "strin"}}}'):
        assert enforcer.refuses(auto([Tool("x", "", parameters)], True))
    referred = '{"$ref": "#/$defs/q", "$defs": {"q": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}}'
    assert enforcer.accepts(named(Tool("x", "", referred)), call_text("x", '{"a": 1, "b": "é"}'))
    assert not enforcer.accepts(named(Tool("x", "", referred)), call_text("x", "{}"))
