"""That what nobody asked for never becomes objects, however much of it is sent: told by the memory that reading takes, not by time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.api import chat_completions, completions, generate
from app.api.errors import ApiError
from app.api.items import InputItem, said_of
from app.api.realtime.schema import read_event
from app.api.responses.schema import read_create
from app.api.sizes import MOST_BYTES

LISTS = b"[" + b",".join([b"[]"] * 300_000) + b"]"  # a megabyte, and twenty of them once it is objects
NAMES = b"{" + b",".join(b'"%d":1' % at for at in range(80_000)) + b"}"
PEAK = 3 * len(LISTS)  # the body is one, as it is put together


def taken(read: Callable[[], Any]) -> tuple[int, ApiError | None]:
    """The most memory that reading took, and how it was refused."""
    fault = None
    tracemalloc.start()
    try:
        outcome = read()
        if isinstance(outcome, tuple) and isinstance(outcome[0], ApiError):
            fault = outcome[0]
    except ApiError as caught:
        fault = caught
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, fault


CHAT = b'{"messages":[{"role":"user","content":"hi"}],%s}'
PROMPT = b'{"prompt":"hi",%s}'
READERS = {"chat": (chat_completions.read, CHAT), "completions": (completions.read, PROMPT), "generate": (generate.read, PROMPT)}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("junk", [LISTS, NAMES], ids=["lists", "names"])
def test_unknown_fields_are_passed_over(name: str, junk: bytes) -> None:
    read, body = READERS[name]
    read(body % b'"junk":1')
    for data in (body % (b'"junk":' + junk), b"{" + junk[1:-1] + b"," + (body % b'"x":1')[1:] if junk is NAMES else body % b'"x":1'):
        peak, fault = taken(lambda data=data: read(data))  # type: ignore[misc]
        assert fault is None and peak < PEAK


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("junk", [LISTS, NAMES], ids=["lists", "names"])
@pytest.mark.parametrize("field", ["guided_json", "logit_bias", "stop"])
def test_known_fields_that_are_too_long_are_refused_as_they_stand(name: str, junk: bytes, field: str) -> None:
    read, body = READERS[name]
    peak, fault = taken(lambda: read(body % (b'"%s":' % field.encode() + junk)))
    assert fault and fault.refusal.param == field and peak < PEAK


def test_nested_sampling_params_too() -> None:
    peak, fault = taken(lambda: generate.read(PROMPT % (b'"sampling_params":{"guided_json":%s}' % LISTS)))
    assert fault and fault.refusal.param == "guided_json" and peak < PEAK


@pytest.mark.parametrize("field", ["metadata", "tools", "tool_choice", "include", "prompt", "image", "text", "context_management"])
def test_responses(field: str) -> None:
    given = b'{"format":{"schema":%s}}' % NAMES if field == "text" else LISTS
    peak, fault = taken(lambda: read_create(b'{"input":"hi","%s":%s}' % (field.encode(), given)))
    assert fault and (fault.refusal.param or "").startswith(field) and peak < PEAK
    assert "got" in str(fault)


@pytest.mark.parametrize("place", ["session", "response"])
def test_realtime(place: str) -> None:
    kind = {"session": "session.update", "response": "response.create"}[place]
    frame = b'{"type":"%s","%s":{"voice":%s}}' % (kind.encode(), place.encode(), LISTS)
    peak, fault = taken(lambda: read_event(frame))
    assert fault and fault.refusal.param == f"{place}.voice" and peak < PEAK


def test_a_large_body_that_is_wrong_is_not_decoded_to_say_so() -> None:
    peak, fault = taken(lambda: read_create(b'{"input":5,"tools":[],"junk":%s}' % LISTS))
    assert fault and fault.refusal.param in ("input", "junk") and peak < PEAK
    peak, fault = taken(lambda: chat_completions.read(b'{"messages":[{"role":5}],"junk":%s}' % LISTS))
    assert fault and fault.refusal.param == "messages.0.role" and peak < PEAK


@pytest.mark.parametrize("unit", [b"[]", b'""', b"[1]"])
def test_prompts_that_are_too_many(unit: bytes) -> None:
    asked = completions.read(b'{"prompt":[%s]}' % b",".join([unit] * 100_000))
    _, fault = taken(asked.prompts)
    assert fault and fault.refusal.param == "prompt" and "100000 prompts" in str(fault)


def test_what_may_be_long_is_taken() -> None:
    text = "word, " * (MOST_BYTES // 3)
    many = [{"role": "user", "content": [{"type": "text", "text": text}]}, {"role": "user", "content": "x"}] * 3
    assert len(chat_completions.read(msgspec.json.encode({"messages": many})).messages) == 6
    parts = {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 10_000}
    assert read_create(msgspec.json.encode({"input": [parts], "instructions": text})).instructions == text
    ids = [*range(100_000)]
    assert completions.read(msgspec.json.encode({"prompt": ids})).prompts() == [tuple(ids)]
    assert generate.read(msgspec.json.encode({"input_ids": ids})).input_ids == ids
    event, _ = read_event(msgspec.json.encode({"type": "conversation.item.create", "item": parts}))
    assert not isinstance(event, ApiError)
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(6000)}}
    format = {"type": "json_schema", "name": "x", "schema": schema}
    assert read_create(msgspec.json.encode({"input": "hi", "text": {"format": format}})).text


def test_arguments_are_looked_at_without_being_made() -> None:
    arguments = '{"a":' + LISTS.decode() + "}"
    item = InputItem("function_call", call_id="a", name="f", arguments=arguments)
    peak, fault = taken(lambda: said_of([item], "input"))
    assert fault is None and peak < 3 * PEAK, "the text, put together; as objects it would be more"


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"input":"hi","temprature":1}', "temprature"),
        (b'{"input":"hi","reasoning":{"effort":5}}', "reasoning.effort"),
        (b'{"input":"hi","%s":1}' % (b"x" * 5000), "x" * 80 + "..."),
    ],
)
def test_a_field_that_is_unknown_is_named(data: bytes, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_create(data)
    assert refused.value.refusal.param == param and len(str(refused.value)) < 300
