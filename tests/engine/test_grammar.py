"""Replies that are held to a grammar, on tiny models."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.core import Delta, FinishReason, Grammar, Sequence
from engine.engine import Engine
from engine.weights.checkpoint import Checkpoint
from tests.engine import tiny
from tests.engine.batching import batcher
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
    """Asked for before, waited for after; and after the first token, as soon as the token before is known."""
    engine = new_engine(tiny_checkpoint)
    decoder, guides = engine.runner.decoder, engine.guides
    forward, asked = decoder.forward, guides.masks
    happened: list[str] = []

    def watched_forward(batch: Any) -> Any:
        guide = next(iter(guides._guides.values()))
        assert guide.asked
        until(lambda: guides._rows.row(guide.row).any())
        happened.append("forward")
        return forward(batch)

    def watched_masks(sequences: Any) -> Any:
        found = asked(sequences)
        happened.append("asked")

        def waited() -> Any:
            happened.append("waited")
            return found()

        return waited

    monkeypatch.setattr(decoder, "forward", watched_forward)
    monkeypatch.setattr(guides, "masks", watched_masks)
    assert text_of(run(engine, {0: [guided(0, Grammar("regex", "you!"))]})[0]) == "you!"
    assert happened == ["asked", "forward", "waited"] * (len(happened) // 3)


def until(condition: Callable[[], object]) -> None:
    """For what another process does and tells nobody."""
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it never came to be")


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
    assert deltas[0][-1].error_code == "invalid_grammar"
    assert set(text_of(deltas[0])) == {"a"}
    assert ids_of(deltas[1]) == ids_of(other)
    assert deltas[1][-1].finish is FinishReason.STOP


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
