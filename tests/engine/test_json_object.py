"""A whole call is read at once, and comes to the same as reading it character by character."""

from __future__ import annotations

from random import Random

import pytest

from engine.json_object import DEEPEST, end_of_object
from engine.tool_calls import CallArguments, CallBegun, CallEnded, Piece, ToolCallParser, call_text, merged, parse

SCALARS = ["1", "-0.5e3", '"a\\"b"', '"\\u00e9}"', "true", "null", "NaN", "01", '"\x01"', '""', "Infinity", "-", '"\\x"']


def slowly(text: str) -> list[Piece]:
    parser = ToolCallParser()
    return merged([*(piece for character in text for piece in parser.feed(character)), *parser.end()])


def value(random: Random, depth: int = 0) -> str:
    kind = random.randrange(7)
    if depth > 3 or not kind:
        return random.choice(SCALARS)
    if kind < 3:
        return f"[{random.choice([', ', ',', ' ,']).join(value(random, depth + 1) for _ in range(random.randrange(4)))}]"
    members = (f'"{random.choice(["a", "b", "}", "{", "a"])}": {value(random, depth + 1)}' for _ in range(random.randrange(3)))
    return "{" + ",".join(members) + random.choice(["}", "}", "} ", ""])


def test_both_ways_of_reading_agree() -> None:
    random, whole = Random(5), 0
    for _ in range(5000):
        end = random.choice(["}", "}\n</tool_call>", " } ", ',"x":1}', "]"]) + random.choice(["", " so"])
        name = random.choice(['"x"', '"x"', '"\\u0078"', '""', '"\\ud800"', "1"])
        text = f'<tool_call>\n{{"name": {name}, "{random.choice(["arguments", "parameters", "other"])}": {value(random)}{end}'
        told = parse(text)
        assert told == slowly(text), text
        whole += any(isinstance(piece, CallEnded) and piece.whole for piece in told)
    assert whole > 500


@pytest.mark.parametrize("depth", [DEEPEST - 2, DEEPEST - 1, DEEPEST, DEEPEST + 1, 5000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_what_nests_too_deep_is_so_both_ways(depth: int, brackets: str) -> None:
    opened, closed = brackets[:-1], brackets[-1]
    inside = f"{opened * (depth - 1)}{'1' if opened != '[' else ''}{closed * (depth - 1)}"
    text = call_text("x", f'{{"a": {inside}}}')
    assert parse(text) == slowly(text)
    assert bool(end_of_object(f'{{"a": {inside}}}', 0)) == (depth < DEEPEST)


def test_a_long_call_is_read_in_few_pieces() -> None:
    arguments = f'{{"a": [{", ".join(["[]"] * 50_000)}]}}'
    assert parse(call_text("x", arguments)) == [CallBegun(0, "x"), CallArguments(0, arguments), CallEnded(0, True)]
