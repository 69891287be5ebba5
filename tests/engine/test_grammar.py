"""Replies that are held to a grammar, on tiny models."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import grammar as grammars
from engine.batcher import Batcher
from engine.core import Delta, FinishReason, Grammar, NotReadyError, RequestError, Sequence
from engine.engine import Engine
from engine.grammar import Compiled, Grammars, Guide
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import Checkpoint
from tests.engine import tiny
from tests.engine.batching import batcher, collect, greedy, options, until
from tests.engine.test_engine import ask, ids_of, run

__all__ = ["batcher"]

NewEngine = Callable[..., Engine]

REGEX = Grammar("regex", r"(red|green|b[a-f]{2,6}) [0-9]{1,4}!")
LARK = Grammar("lark", 'start: "[" item ("," item){1,4} "]"\nitem: /[a-z]{1,3}/ | "(" item ")"')
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 3, "maximum": 99},
        "word": {"enum": ["hello", "world", "you"]},
        "name": {"type": "string", "maxLength": 6},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["count", "word", "name"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
AMBIGUOUS = Grammar("lark", 'start: s\ns: s s | s s s | "a" | ""')  # what there is to know of it grows and grows
PROMPT = random.Random(3).choices(range(3, 300), k=20)


def guided(id: int, grammar: Grammar, max_tokens: int = 300, prompt: list[int] = PROMPT, **sampling: Any) -> Sequence:
    given: dict[str, Any] = {"temperature": 1.5, "seed": id, "logit_bias": {}, "ignore_eos": False, "grammar": grammar}
    return ask(id, prompt, max_tokens, **(given | sampling))


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def is_json(text: str) -> bool:
    value = json.loads(text)
    assert list(value) in (["count", "word", "name"], ["count", "word", "name", "flags"])
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    flags = value.get("flags", [])
    assert len(flags) <= 3
    assert all(flag in (True, False) for flag in flags)
    return 3 <= value["count"] <= 99 and value["word"] in ("hello", "world", "you")


def is_lark(text: str) -> bool:
    items = text.removeprefix("[").removesuffix("]").split(",")
    bare = [item.strip("()") for item in items]
    return f"[{','.join(items)}]" == text and 2 <= len(items) <= 5 and all(re.fullmatch("[a-z]{1,3}", item) for item in bare)


@pytest.fixture(scope="module")
def compiler(tiny_checkpoint: Checkpoint) -> Grammars:
    return Grammars(Tokenizer(tiny_checkpoint.tokenizer_path, tiny_checkpoint.eos_ids), 300, tiny_checkpoint.eos_ids)


# What it is for


@pytest.mark.parametrize(
    ("grammar", "spells"),
    [(REGEX, lambda text: re.fullmatch(REGEX.source, text)), (JSON, is_json), (LARK, is_lark)],
    ids=["regex", "json", "lark"],
)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_replies_spell_what_their_grammar_says(
    quantised: Checkpoint, new_engine: NewEngine, grammar: Grammar, spells: Callable[[str], object], kernels: str
) -> None:
    """From random weights, which are as likely as not to write anything at all, at 50 seeds."""
    engine = new_engine(quantised, kernels=kernels, max_batch_size=50, max_total_tokens=20_000)
    ways: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}, {"frequency_penalty": 2.0, "repetition_penalty": 1.5}]
    replies = run(engine, {0: [guided(i, grammar, **ways[i % 4]) for i in range(50)]})
    assert len({text_of(deltas) for deltas in replies.values()}) > 25
    for deltas in replies.values():
        assert deltas[-1].finish is FinishReason.STOP, text_of(deltas)
        assert spells(text_of(deltas)), text_of(deltas)
    assert len(engine.guides) == 0


def test_a_reply_ends_with_its_grammar(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    """Where nothing can follow, without another step; where something could, by the token that ends replies, `ignore_eos` or not."""
    engine = new_engine(tiny_checkpoint)
    for ignore_eos in (False, True):
        last = run(engine, {0: [guided(0, Grammar("regex", "hello"), ignore_eos=ignore_eos)]})[0][-1]
        assert (last.finish, last.text[-1], bool(last.ids)) == (FinishReason.STOP, "o", True)
        bias = {tiny.EOS: 100.0}
        deltas = run(engine, {0: [guided(1, Grammar("regex", "[ab]{2,9}"), ignore_eos=ignore_eos, logit_bias=bias)]})[1]
        assert (len(text_of(deltas)), deltas[-1].finish, deltas[-1].ids) == (2, FinishReason.STOP, ())
    steps = len(engine.steps)
    assert run(engine, {0: [guided(2, Grammar("regex", "h"), max_tokens=1)]})[2][-1].finish is FinishReason.STOP, "not for want of tokens"
    assert len(engine.steps) == steps + 1
    assert run(engine, {0: [guided(3, Grammar("regex", ""))]})[3][-1].finish is FinishReason.STOP
    assert run(engine, {0: [guided(4, Grammar("regex", "[ab]{9}"), max_tokens=1)]})[4][-1].finish is FinishReason.LENGTH


def test_the_mask_is_worked_out_while_the_model_runs(
    tiny_checkpoint: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(tiny_checkpoint)
    decoder = engine.runner.decoder
    running, masking = threading.Event(), threading.Event()
    forward, mask = decoder.forward, Guide.mask
    threads = []

    def watched_mask(guide: Guide, vocab_size: int) -> Any:
        threads.append(threading.current_thread())
        masking.set()
        assert running.wait(30)
        return mask(guide, vocab_size)

    def watched_forward(batch: Any) -> Any:
        running.set()
        assert masking.wait(30)
        return forward(batch)

    monkeypatch.setattr(Guide, "mask", watched_mask)
    monkeypatch.setattr(decoder, "forward", watched_forward)
    assert text_of(run(engine, {0: [guided(0, Grammar("regex", "you!"))]})[0]) == "you!"
    assert threads
    assert all(thread is not threading.current_thread() for thread in threads)


def test_other_steps_stay_in_one_call(tiny_checkpoint: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(tiny_checkpoint)
    monkeypatch.setattr(engine.runner.decoder, "pick", None)
    assert run(engine, {0: [ask(0, PROMPT)]})[0][-1].finish is FinishReason.LENGTH


# Whatever else happens


def crowd(first: int) -> list[Sequence]:
    """Guided and free ones."""
    kinds: list[dict[str, Any]] = [
        {"grammar": REGEX},
        {"grammar": None, "ignore_eos": True},
        {"grammar": JSON, "top_p": 0.8},
        {"grammar": LARK},
    ]
    return [guided(first + i, prompt=PROMPT[: 5 + i], max_tokens=60, **({"grammar": None} | kinds[i % 4])) for i in range(8)]


def test_a_reply_is_the_same_alone_and_in_a_crowd(quantised: Checkpoint, new_engine: NewEngine) -> None:
    """E12: those with a grammar, and those beside them."""
    engine = new_engine(quantised)
    alone = [ids_of(run(engine, {0: [sequence]})[sequence.id]) for sequence in crowd(0)]
    fresh = new_engine(quantised, max_step_tokens=24)
    together = run(fresh, {2 * i: [sequence] for i, sequence in enumerate(crowd(0))})
    assert [ids_of(together[i]) for i in range(8)] == alone
    again = run(fresh, {0: crowd(0)})  # everything is cached
    assert [ids_of(again[i]) for i in range(8)] == alone


def test_a_reply_is_the_reference_engines(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    one, other = (run(new_engine(tiny_checkpoint, **kind), {0: crowd(0)}) for kind in ({"exact": True}, {"kernels": "reference"}))
    assert {id: ids_of(deltas) for id, deltas in one.items()} == {id: ids_of(deltas) for id, deltas in other.items()}


def test_a_preempted_reply_goes_on_in_its_grammar(quantised: Checkpoint, new_engine: NewEngine) -> None:
    def asked() -> list[Sequence]:
        return [guided(i, Grammar("regex", "([a-f]{5}-){7}!"), prompt=[*PROMPT, 5 + i]) for i in range(4)]

    alone = {sequence.id: ids_of(run(new_engine(quantised), {0: [sequence]})[sequence.id]) for sequence in asked()}
    tight = asked()
    replies = run(new_engine(quantised, max_total_tokens=128, max_step_tokens=32), {0: tight})
    assert sum(sequence.preemptions for sequence in tight) > 1
    assert {id: ids_of(deltas) for id, deltas in replies.items()} == alone


def test_a_cancelled_reply_is_forgotten(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    engine = new_engine(tiny_checkpoint)
    one, other = guided(0, LARK), guided(1, REGEX)
    replies = run(engine, {0: [one, other]}, {3: [one]})
    assert replies[0][-1].finish is FinishReason.CANCELLED
    assert re.fullmatch(REGEX.source, text_of(replies[1]))
    assert len(engine.guides) == 0


def test_a_step_that_fails_leaves_other_matchers_where_they_were(
    tiny_checkpoint: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was preempted in the middle of its reply is not in the step that fails, and goes on."""
    engine = new_engine(tiny_checkpoint, max_batch_size=1)
    background = guided(0, REGEX)
    background.priority = 1
    alone = ids_of(run(engine, {0: [guided(0, REGEX)]})[0])
    forward, ran = engine.runner.decoder.forward, []

    def failing(batch: Any) -> Any:
        ran.append(len(batch.tokens))
        if len(ran) == 5:
            raise OSError("no memory")
        return forward(batch)

    monkeypatch.setattr(engine.runner.decoder, "forward", failing)
    replies = run(engine, {0: [background], 3: [guided(1, LARK)]})
    assert replies[1][-1].finish is FinishReason.ERROR
    assert "OSError" in str(replies[1][-1].error)
    assert background.preemptions == 1
    assert ids_of(replies[0]) == alone
    assert len(engine.guides) == 0


def test_a_grammar_that_becomes_too_much_ends_its_own_reply(quantised: Checkpoint, new_engine: NewEngine) -> None:
    engine = new_engine(quantised)
    other = run(engine, {0: [guided(1, REGEX)]})[1]
    deltas = run(engine, {0: [guided(0, AMBIGUOUS, 400, logit_bias=dict.fromkeys(engine.checkpoint.eos_ids, -100.0)), guided(1, REGEX)]})
    assert deltas[0][-1].finish is FinishReason.ERROR
    assert re.search("held to its grammar.*(many items|row has)", str(deltas[0][-1].error))
    assert set(text_of(deltas[0])) == {"a"}
    assert ids_of(deltas[1]) == ids_of(other)
    assert deltas[1][-1].finish is FinishReason.STOP


class Panic(BaseException):
    """As the library's own."""


@pytest.mark.parametrize("where", ["deep_copy", "compute_bitmask", "consume_token"])
def test_a_panic_in_the_library_ends_its_own_reply(tiny_checkpoint: Checkpoint, new_engine: NewEngine, where: str) -> None:
    class Panicking:
        def __init__(self, matcher: Any) -> None:
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            def panic(*_: object) -> None:
                raise Panic("out of bounds")

            return panic if name == where else getattr(self.matcher, name)

        def deep_copy(self) -> Panicking:
            if where == "deep_copy":
                raise Panic("out of bounds")
            return self

    engine = new_engine(tiny_checkpoint)
    broken = guided(0, Grammar("regex", "hello!"))
    broken.compiled = Compiled(Panicking(engine.grammars.compiled(Grammar("regex", "hello!")).matcher()))
    replies = run(engine, {0: [broken, guided(1, REGEX)]})
    assert replies[0][-1].finish is FinishReason.ERROR
    assert "Panic: out of bounds" in str(replies[0][-1].error)
    assert re.fullmatch(REGEX.source, text_of(replies[1]))


def test_where_nothing_that_is_allowed_is_left_the_reply_ends_with_an_error(tiny_checkpoint: Checkpoint, new_engine: NewEngine) -> None:
    """A bias that leaves none of the tokens that the grammar does."""
    engine = new_engine(tiny_checkpoint)
    letters = [id for id, text in enumerate(tiny.vocabulary()) if set(text) <= {"a", "b"}]
    never = guided(0, Grammar("regex", "[ab]{5}"), logit_bias=dict.fromkeys(letters, -np.inf))
    replies = run(engine, {0: [never, guided(1, REGEX)]})
    assert (replies[0][-1].finish, ids_of(replies[0])) == (FinishReason.ERROR, [])
    assert "held to its grammar" in str(replies[0][-1].error)
    assert re.fullmatch(REGEX.source, text_of(replies[1]))


def test_a_mask_hides_no_number_that_is_none(tiny_checkpoint: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(tiny_checkpoint)
    forward = engine.runner.decoder.forward

    def spoilt(batch: Any) -> Any:
        logits = forward(batch)
        logits[0, 299] = np.nan
        return logits

    monkeypatch.setattr(engine.runner.decoder, "forward", spoilt)
    replies = run(engine, {0: [guided(0, Grammar("regex", "h+!")), guided(1, REGEX)]})
    assert "numbers that are none" in str(replies[0][-1].error)
    assert [deltas[-1].finish for deltas in replies.values()] == [FinishReason.ERROR] * 2, "the second is first once it is alone"


# What is no grammar, or too much of one


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


def integers(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}, "additionalProperties": False}


LONG = "x" * (grammars.SOURCE_BYTES + 1)


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("json_schema", "{", "expected a JSON schema.*expected JSON.*line 1"),
        ("json_schema", "[1]", "object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
        ("json_schema", '{"type": "string", "pattern": "("}', "group"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "nsatisfiable"),
        ("json_schema", json.dumps(nested(400)), "recursion"),
        ("json_schema", '{"a":' * 40_000, "recursion"),
        ("json_schema", '{"type": "integer", "multipleOf": 1234567}', "multipleOf.*1234567"),
        ("json_schema", '{"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}', "multipleOf.*1022117"),
        ("json_schema", '{"type": "number", "multipleOf": 0.0000123, "multipleOf": 1}', "multipleOf.*least common multiple"),
        ("json_schema", json.dumps(integers(241)), "241 properties"),
        ("json_schema", json.dumps({"enum": [LONG]}), "262144"),
        ("regex", "(a", "expected a regular expression.*unclosed group"),
        ("regex", "a(?=b)", "look-around"),
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
def test_a_nasty_expression_has_small_masks_or_an_error(compiler: Grammars, source: str) -> None:
    """Its lexer's states are counted, and when there are too many the reply ends."""
    guide = Guide(compiler.compiled(Grammar("regex", source)))
    chance = random.Random(0)
    for _ in range(400):
        mask = guide.mask(300)
        if mask is None:
            assert guide.fault
            return
        allowed = [int(token) for token in np.flatnonzero(~mask) if token != tiny.EOS]
        guide.take(chance.choice(allowed))
        if guide.done:
            return


def test_ordinary_grammars_fit_the_limits(compiler: Grammars) -> None:
    for schema in (
        nested(30),
        {"enum": [f"value number {i}" for i in range(10_000)]},
        integers(240),
        integers(900) | {"required": [f"p{i}" for i in range(900)]},
        {"type": "number", "multipleOf": 0.01},
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
    ):
        guide = Guide(compiler.compiled(Grammar("json_schema", json.dumps(schema))))
        for _ in range(20):
            mask = guide.mask(300)
            assert mask is not None, guide.fault
            guide.take(int(np.flatnonzero(~mask)[-1]))
            if guide.done:
                break


def test_blanks_in_json_are_few(compiler: Grammars) -> None:
    """And a schema cannot ask for others."""
    source = json.dumps(SCHEMA | {"x-guidance": {"whitespace_pattern": " +", "item_separator": "x"}})
    guide = Guide(compiler.compiled(Grammar("json_schema", source)))
    space, brace = tiny.vocabulary().index("Ġ"), tiny.vocabulary().index("{")
    for allowed, token in [(True, brace), *[(True, space)] * 16, (False, space)]:
        mask = guide.mask(300)
        assert mask is not None
        assert bool(mask[token]) is not allowed
        guide.take(token)
    assert guide.fault


def test_control_tokens_are_no_text(compiler: Grammars) -> None:
    """`<|im_end|>` typed in a reply is letters; as a token it ends it, or is what a grammar names."""
    guide = Guide(compiler.compiled(Grammar("regex", r".+")))
    mask = guide.mask(300)
    assert mask is not None
    assert mask[:3].all()
    guide = Guide(compiler.compiled(Grammar("lark", "start: <|im_start|> /x/")))
    mask = guide.mask(300)
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
    await batcher.compile(REGEX)
    with pytest.raises(RequestError, match="unclosed") as refused:
        await batcher.compile(Grammar("regex", "("))
    assert refused.value.code == "invalid_grammar"
    for grammar in (REGEX, Grammar("regex", "hello!?")):  # the second was not asked about before
        deltas = await collect(batcher.session(b"a").generate([3, 4], greedy(60, grammar=grammar)))
        assert re.fullmatch(grammar.source, text_of(deltas))
        assert deltas[-1].finish is FinishReason.STOP
    assert len(threads) == 3
    assert all(name.startswith("tokeniser") for name in threads)
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
    await batcher.compile(LARK)
    assert batcher.live == 0
    assert not batcher._arrivals
    assert len(batcher._engine.steps) == 0


async def test_nothing_is_compiled_before_the_model_is_there(tiny_folder: Path) -> None:
    with pytest.raises(NotReadyError):
        await Batcher(options(tiny_folder)).compile(REGEX)


def test_the_socket_side_imports_no_grammars() -> None:
    code = "import sys, engine.batcher; sys.exit(bool({'llguidance', 'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
