"""Grammars that are after the process, or after everyone's time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import grammar_bounds
from engine.core import Grammar, RequestError, Tool
from engine.grammar import Grammars
from engine.tokenizer import Tokenizer
from engine.tool_grammar import required
from engine.weights.checkpoint import Checkpoint
from tests.engine.hostile_grammars import LINKS, chain, lark_chain


@pytest.mark.parametrize("bounds", ["bounded", "unbounded"])
def test_no_grammar_ends_the_process(tiny_checkpoint: Checkpoint, bounds: str) -> None:
    """Not even if there were no bounds to how deep references go: the stack is deep enough for all that a source can hold."""
    ids = ",".join(map(str, tiny_checkpoint.eos_ids))
    command = [sys.executable, "-m", "tests.engine.hostile_grammars", str(tiny_checkpoint.tokenizer_path), ids, bounds]
    root = Path(__file__).parents[2]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    lines = process.stdout.splitlines()
    assert (process.returncode, lines[-1]) == (0, "alive"), (lines[-1:], process.stderr[-500:])
    assert sum("accepted" in line for line in lines) > 20, "what is only large is no harm"


@pytest.fixture(scope="module")
def compiler(tiny_checkpoint: Checkpoint) -> Iterator[Grammars]:
    made = Grammars(Tokenizer(tiny_checkpoint.tokenizer_path, tiny_checkpoint.eos_ids), 300, tiny_checkpoint.eos_ids)
    yield made
    made.close()


@pytest.mark.parametrize("link", LINKS)
def test_references_are_followed_only_so_deep(link: str) -> None:
    grammar_bounds.check_schema(chain(200, LINKS[link]))
    with pytest.raises(ValueError, match=r"nest.* 2000 is the deepest"):
        grammar_bounds.check_schema(chain(2500, LINKS[link]))


def test_what_a_schema_refers_to_counts_wherever_it_stands() -> None:
    """A schema of many parts is not deep; one part that leads to all of them is as deep as they are together."""
    parts = ",".join(f'"p{at}":{{"$ref":"#/$defs/d"}}' for at in range(200))
    many = ",".join(f'"m{at}":{{"properties":{{{parts}}}}}' for at in range(20))
    grammar_bounds.check_schema(f'{{"$defs":{{"d":{{"type":"integer"}},{many}}}}}')
    ring = ",".join(f'"d{at}":{{"properties":{{"x":{{"$ref":"#/$defs/d{(at + 1) % 900}"}}}}}}' for at in range(900))
    with pytest.raises(ValueError, match="2000 is the deepest"):
        grammar_bounds.check_schema(f'{{"$ref":"#/$defs/d0","$defs":{{{ring}}}}}')
    hidden = chain(2500, LINKS["a reference"]).replace('"$ref"', '"\\u0024ref"')
    with pytest.raises(ValueError, match="2000 is the deepest"):
        grammar_bounds.check_schema(hidden)


def test_a_grammars_rules_are_counted_and_its_schemas_looked_at(compiler: Grammars) -> None:
    for source, says in (
        (lark_chain(5001, "T", '"a" {}'), "5000 is the most"),
        (f"start: %json {chain(2500, LINKS['items'])}", "2000 is the deepest"),
        ('start: T\nT: "&&&&&&&&&&&&&&&&&" & ' + " & ".join(["/a&&*/"] * 18), "18 times &"),
    ):
        with pytest.raises(RequestError, match=says):
            compiler.compiled(Grammar("lark", source))
    compiler.compiled(Grammar("lark", 'start: ("&&" | "&")+ // ' + "& " * 40))


def test_patterns_that_must_match_at_once_are_few() -> None:
    """Also where objects are merged; each for itself they may be many."""
    patterns = [{"pattern": f"a{{{at}}}"} for at in range(20)]
    for schema in (
        {"allOf": patterns},
        {"allOf": [{"properties": {"x": pattern}} for pattern in patterns]},
        {"patternProperties": {f"a{{{at}}}": True for at in range(20)}},
    ):
        with pytest.raises(ValueError, match="20 patterns at once"):
            grammar_bounds.check_schema(json.dumps(schema))
    properties = {f"p{at}": pattern for at, pattern in enumerate(patterns)}
    grammar_bounds.check_schema(json.dumps({"allOf": [{"properties": properties}], "anyOf": patterns}))


def beside(depth: int, form: str) -> dict[str, object]:
    """Each pattern has the next beside it."""
    schema: dict[str, object] = {"pattern": "a.*b"}
    for number in range(depth):
        schema = {"pattern": f"x{number}.*y", form: [schema]}
    return schema


def knotted(links: int, form: str) -> dict[str, object]:
    """Each refers to the next, which must hold beside a pattern, and to the one before."""
    schemas: dict[str, object] = {f"d{links}": {"type": "string", "pattern": "z"}}
    for number in reversed(range(links)):
        pattern, after = {"pattern": f"a{number}.*b"}, {"$ref": f"#/$defs/d{number + 1}"}
        both = {**pattern, **after} if form == "$ref" else {"allOf": [pattern, after]}
        schemas[f"d{number}"] = {**both, "properties": {f"x{number}": {"$ref": f"#/$defs/d{max(0, number - 1)}"}}}
    return {"$defs": schemas, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [beside(20, "anyOf"), beside(20, "oneOf"), beside(20, "allOf"), knotted(40, "$ref"), knotted(40, "allOf")],
    ids=["anyOf", "oneOf", "allOf", "knotted references", "knotted allOf"],
)
def test_patterns_beside_each_other_are_few(schema: dict[str, object]) -> None:
    """Each more may double what a step takes; with some more than these the process would run out of memory."""
    with pytest.raises(ValueError, match=r"pattern"):
        grammar_bounds.check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"price": {"multipleOf": 0.01}, "seconds": {"multipleOf": 3600}}},
        {"properties": {f"p{number}": {"anyOf": [{"pattern": "^a$"}, {"type": "null"}]} for number in range(40)}},
        {
            "$defs": {
                "node": {
                    "properties": {
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                        **{f"s{number}": {"type": "string", "pattern": "^[a-z]+$"} for number in range(30)},
                    }
                }
            },
            "$ref": "#/$defs/node",
        },
    ],
    ids=["numbers of two values", "nullable patterns", "a list of patterns"],
)
def test_what_people_write_is_within_the_bounds(compiler: Grammars, schema: dict[str, object]) -> None:
    compiler.compiled(Grammar("json_schema", json.dumps({"type": "object", **schema})))


def test_what_a_reply_would_fail_by_is_known_before_it_begins(compiler: Grammars) -> None:
    for source in ("(a{1,500}){1,500}", "((a{0,100}){0,100}){0,100}"):
        with pytest.raises(RequestError, match="too many expressions") as refused:
            compiler.compiled(Grammar("regex", source))
        assert refused.value.code == "invalid_grammar"


def test_a_tools_schema_is_named_when_it_is_at_fault(compiler: Grammars) -> None:
    good, wrong = Tool("f", "", '{"properties": {}}'), '{"properties": {"a": {"type": "strange"}}}'
    for bad, says in (
        (wrong, "strange"),
        (chain(2500, LINKS["items"]), "2000 is the deepest"),
        ('{"properties":{"a":' * 70 + "{}" + "}}" * 70, "nests deeper"),
        ('{"type": "array"}', "JSON Schema of an object"),
        ("{", "no JSON"),
        ('{"properties": {"a": {"type": "integer", "multipleOf": 1234567}}}', "multipleOf"),
    ):
        for grammar in (required([good, Tool("g", "", bad)], True), required([Tool("g", "", bad)], True, [1])):
            with pytest.raises(RequestError, match=rf"^tools\.1\.parameters: .*{says}") as refused:
                compiler.compiled(grammar)
            assert refused.value.param == "tools"
            assert "Lark" not in str(refused.value)
