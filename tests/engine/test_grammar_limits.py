"""What no reply can be held to, and the compiling of the rest: on tiny models."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import grammar as grammars
from engine import grammar_bounds
from engine.batcher import COMPILED_AT_ONCE, Batcher
from engine.core import BusyError, FinishReason, Grammar, NotReadyError, RequestError
from engine.grammar import Compiled, Grammars
from engine.grammar_guides import Guides
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import Checkpoint
from tests.engine import tiny
from tests.engine.batching import batcher, collect, greedy, options, until
from tests.engine.guiding import Walk
from tests.engine.test_grammar import LARK, REGEX, SCHEMA, text_of

__all__ = ["batcher"]


@pytest.fixture(scope="module")
def compiler(tiny_checkpoint: Checkpoint) -> Iterator[Grammars]:
    made = Grammars(Tokenizer(tiny_checkpoint.tokenizer_path, tiny_checkpoint.eos_ids), 300, tiny_checkpoint.eos_ids)
    yield made
    made.close()


@pytest.fixture(scope="module")
def guides(compiler: Grammars) -> Guides:
    return Guides(compiler)


# What is no grammar, or too much of one


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


def integers(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}, "additionalProperties": False}


LONG = "x" * (grammar_bounds.SOURCE_BYTES + 1)


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("json_schema", "{", "expected a JSON schema.*expected JSON.*line 1"),
        ("json_schema", "[1]", "object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
        ("json_schema", '{"type": "string", "pattern": "("}', "group"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "nsatisfiable"),
        ("json_schema", json.dumps(nested(400)), "nests 401 deep"),
        ("json_schema", '{"a":' * 40_000, "nests 40000 deep"),
        ("json_schema", '{"type": "integer", "multipleOf": 1234567}', "multipleOf.*1234567"),
        ("json_schema", '{"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}', "multipleOf.*1022117"),
        ("json_schema", '{"type": "number", "multipleOf": 0.0000123, "multipleOf": 1}', "multipleOf.*least common multiple"),
        (
            "json_schema",
            json.dumps({"properties": {str(at): {"multipleOf": 30_011 + 2 * at} for at in range(4)}}),
            "multipleOf come to 120056",
        ),
        ("json_schema", json.dumps(integers(241)), "241 properties"),
        ("json_schema", json.dumps({"enum": [LONG]}), "262144"),
        ("regex", "(a", "expected a regular expression.*unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "a\\", "ends with a backslash"),
        ("regex", "\ud800", "Unicode"),
        ("regex", LONG, "262145 bytes"),
        ("lark", "start: foo", "expected a Lark grammar.*foo"),
        ("lark", "", "Empty"),
        ("lark", "start: start", "NoExtension"),
        ("lark", "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"', "too big"),
        ("lark", 'start: %json {"type": "integer", "multipl\\u0065Of": 1234567}', "multipleOf"),
        ("lark", 'start: %json {"type"', "JSON"),
        ("lark", 'start: "x" <|no_such_token|>', "no_such_token"),
    ],
)
def test_what_no_reply_can_be_held_to_is_refused(compiler: Grammars, kind: Any, source: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        compiler.compiled(Grammar(kind, source))
    assert (refused.value.param, refused.value.code) == ("grammar", "invalid_grammar")
    assert len(str(refused.value)) < 500
    assert compiler.known(Grammar(kind, source)) is None


@pytest.mark.parametrize(
    "source",
    [
        r"(.*a.{200}b)|(.*b.{300}c)",
        r"((a{0,100}){0,100}){0,100}",
        r"(a|a)*(a|aa)*(.*a.{20})",
        r"(\p{L}{1,500}\w{0,500}){0,50}",
    ],
)
def test_a_nasty_expression_has_small_masks_or_an_error(guides: Guides, source: str) -> None:
    """Its lexer's states are counted, and when there are too many the reply ends."""
    try:
        walk = Walk(guides, guides.grammars.compiled(Grammar("regex", source)))
    except RequestError as refused:  # better still: before the reply
        assert "too many" in str(refused)
        return
    chance = random.Random(0)
    for _ in range(400):
        mask = walk.mask()
        if mask is None:
            assert walk.fault
            return
        allowed = [int(token) for token in np.flatnonzero(~mask) if token != tiny.EOS]
        walk.take(chance.choice(allowed))
        if walk.done:
            return


def test_ordinary_grammars_fit_the_limits(guides: Guides) -> None:
    for schema in (
        nested(30),
        {"enum": [f"value number {i}" for i in range(10_000)]},
        integers(240),
        integers(900) | {"required": [f"p{i}" for i in range(900)]},
        {"type": "number", "multipleOf": 0.01},
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
    ):
        walk = Walk(guides, guides.grammars.compiled(Grammar("json_schema", json.dumps(schema))))
        for _ in range(20):
            mask = walk.mask()
            assert mask is not None, walk.fault
            walk.take(int(np.flatnonzero(~mask)[-1]))
            if walk.done:
                break


def test_blanks_in_json_are_few(guides: Guides) -> None:
    """And a schema cannot ask for others."""
    source = json.dumps(SCHEMA | {"x-guidance": {"whitespace_pattern": " +", "item_separator": "x"}})
    walk = Walk(guides, guides.grammars.compiled(Grammar("json_schema", source)))
    space, brace = tiny.vocabulary().index("Ġ"), tiny.vocabulary().index("{")
    for allowed, token in [(True, brace), *[(True, space)] * 16, (False, space)]:
        mask = walk.mask()
        assert mask is not None
        assert bool(mask[token]) is not allowed
        walk.take(token)
    assert walk.fault


def test_control_tokens_are_no_text(guides: Guides) -> None:
    """`<|im_end|>` typed in a reply is letters; as a token it ends it, or is what a grammar names."""
    walk = Walk(guides, guides.grammars.compiled(Grammar("regex", r".+")))
    mask = walk.mask()
    assert mask is not None
    assert mask[:3].all()
    walk = Walk(guides, guides.grammars.compiled(Grammar("lark", "start: <|im_start|> /x/")))
    mask = walk.mask()
    assert mask is not None
    assert np.flatnonzero(~mask).tolist() == [tiny.BOS]


def test_those_last_used_are_kept(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "KEPT_BYTES", 5 * grammars.KEPT_LEAST)
    asked = [Grammar("regex", f"kept{i}") for i in range(8)]
    first = compiler.compiled(asked[0])
    for grammar in asked:
        assert compiler.compiled(asked[0]) is first
        compiler.compiled(grammar)
    assert [compiler.known(grammar) is not None for grammar in asked] == [True, False, False, False, True, True, True, True]
    large = Grammar("lark", f"// {'x' * 6 * grammars.KEPT_LEAST}\nstart: /a/")
    compiler.compiled(large)
    assert compiler.known(large), "at least the last"
    assert compiler.known(asked[0]) is None


# The door


async def test_a_batcher_compiles_off_the_loop(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    threads = []
    real = batcher._engine.grammars._compile

    def watched(grammar: Grammar) -> Any:
        threads.append(threading.current_thread().name)
        return real(grammar)

    monkeypatch.setattr(batcher._engine.grammars, "_compile", watched)
    await batcher.session(b"a").compile(REGEX)
    with pytest.raises(RequestError, match="unclosed") as refused:
        await batcher.session(b"a").compile(Grammar("regex", "("))
    assert refused.value.code == "invalid_grammar"
    for grammar in (REGEX, Grammar("regex", "hello!?")):  # the second was not asked about before
        deltas = await collect(batcher.session(b"a").generate([3, 4], greedy(60, grammar=grammar)))
        assert re.fullmatch(grammar.source, text_of(deltas))
        assert deltas[-1].finish is FinishReason.STOP
    assert len(threads) == 3
    assert all(name.startswith("grammar") for name in threads)
    last = (await collect(batcher.session(b"a").generate([3, 4], greedy(grammar=Grammar("regex", ")")))))[-1]
    assert last.finish is FinishReason.ERROR
    assert "expected a regular expression" in str(last.error)
    assert batcher.live == 0


async def test_a_reply_can_be_cancelled_while_its_grammar_is_compiled(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    begun, release = threading.Event(), threading.Event()
    real = batcher._engine.grammars.compiled

    def slow(grammar: Grammar) -> Compiled:
        begun.set()
        assert release.wait(30)
        return real(grammar)

    monkeypatch.setattr(batcher._engine.grammars, "compiled", slow)
    generation = batcher.session(b"a").generate([3, 4], greedy(grammar=REGEX))
    await until(begun.is_set)
    generation.cancel()
    generation.cancel()
    assert [delta.finish for delta in await collect(generation)] == [FinishReason.CANCELLED]
    release.set()
    await batcher.session(b"a").compile(LARK)
    assert batcher.live == 0
    assert not batcher._arrivals
    assert len(batcher._engine.steps) == 0


async def test_no_prompt_waits_for_grammars(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    release = threading.Event()
    monkeypatch.setattr(batcher._engine.grammars, "compiled", lambda _: release.wait(30))
    slow = [asyncio.ensure_future(batcher.session(b"a").compile(Grammar("regex", f"{number}"))) for number in range(4)]
    await asyncio.sleep(0)
    assert await batcher.encode("hello")
    assert not any(compiling.done() for compiling in slow)
    release.set()
    await asyncio.gather(*slow)


async def test_an_owner_with_many_slow_grammars_lets_others_go_first(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    order: list[str] = []
    release = threading.Event()

    def slow(grammar: Grammar) -> None:
        assert release.wait(30)
        order.append(grammar.source)

    monkeypatch.setattr(batcher._engine.grammars, "compiled", slow)
    flood = [asyncio.ensure_future(batcher.session(b"a").compile(Grammar("regex", f"a{number}"))) for number in range(9)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(batcher.session(b"b").compile(Grammar("regex", "b")))
    await asyncio.sleep(0)
    gone = flood.pop()
    gone.cancel()
    release.set()
    await asyncio.gather(*flood, other)
    assert order.index("b") <= COMPILED_AT_ONCE + 1
    assert "a8" not in order, "nobody waits for it any more"


async def test_a_bad_grammar_is_found_out_once(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    grammars, asked = batcher._engine.grammars, []
    real = grammars._compile

    def watched(grammar: Grammar) -> Compiled:
        asked.append(grammar)
        return real(grammar)

    monkeypatch.setattr(grammars, "_compile", watched)
    said = set()
    for _ in range(3):
        with pytest.raises(RequestError) as refused:
            await batcher.session(b"a").compile(Grammar("regex", "(a"))
        said.add((str(refused.value), refused.value.param, refused.value.code))
        refused.value.param = "as a client knows it"
    assert len(asked) == len(said) == 1
    monkeypatch.setattr("engine.grammar.REFUSED_SECONDS", 0.0)
    with pytest.raises(RequestError):
        await batcher.session(b"a").compile(Grammar("regex", "(a"))
    assert len(asked) == 2, "but not for ever"


async def test_what_may_be_good_another_time_is_found_out_again(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good when it was tried out, and then the process ended that was to follow it."""
    assert batcher._engine
    with monkeypatch.context() as context:
        context.setattr(batcher._engine.grammars.processes, "compile", lambda *_: (7, "it was too much"))
        with pytest.raises(RequestError, match="too much"):
            await batcher.session(b"a").compile(REGEX)
    await batcher.session(b"a").compile(REGEX)


async def test_one_owner_has_only_so_many_grammars_wait(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batcher._engine
    monkeypatch.setattr("engine.batcher.MOST_COMPILES", 3)
    release = threading.Event()
    monkeypatch.setattr(batcher._engine.grammars, "compiled", lambda _: release.wait(30))
    fits = [asyncio.ensure_future(batcher.session(b"a").compile(Grammar("regex", f"a{number}"))) for number in range(COMPILED_AT_ONCE + 3)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="3 grammars of yours wait"):
        await batcher.session(b"a").compile(Grammar("regex", "one more"))
    other = asyncio.ensure_future(batcher.session(b"b").compile(Grammar("regex", "b")))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*fits, other)


async def test_nothing_is_compiled_before_the_model_is_there(tiny_folder: Path) -> None:
    with pytest.raises(NotReadyError):
        await Batcher(options(tiny_folder)).session(b"a").compile(REGEX)


def test_the_socket_side_imports_no_grammars() -> None:
    code = "import sys, engine.batcher; sys.exit(bool({'llguidance', 'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
