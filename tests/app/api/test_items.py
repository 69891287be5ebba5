"""What clients send back of a reply: calls that were broken off, refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import chat_messages
from app.api.chat_messages import ChatMessage
from app.api.errors import ApiError
from app.api.items import InputItem, said_of, wire_items
from app.conversations.turn import Said
from app.store.records import Item
from engine.tool_calls import call_text

TEXT = call_text("look", '{"city": "The <tool_call> of Paris", "at": [1, {"b": "}"}]}')
BEGUN = TEXT.index('{"city')


def reply(text: str, ids: tuple[str, ...] = ()) -> Item:
    return Item(id="msg_a", parent=None, role="assistant", text=text, created_at=0, response="resp_a", calls=True, call_ids=list(ids))


def by_chat(wire: list[dict[str, Any]]) -> list[Said]:
    """The same reply, as a chat has it."""
    content = "".join(part["text"] for item in wire if item["type"] == "message" for part in item["content"])
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in wire
        if item["type"] == "function_call"
    ]
    message = {"role": "assistant", "content": content or None, "tool_calls": calls}
    return chat_messages.said_of([msgspec.convert(message, ChatMessage)])


@given(st.integers(BEGUN + 1, len(TEXT) - 17), st.sampled_from(["", "I look.\n", f"{call_text('one', '{}')}\n"]))
def test_a_reply_that_was_cut_anywhere_in_its_arguments_is_taken_back_as_it_was(end: int, before: str) -> None:
    text = before + TEXT[:end]
    wire = wire_items(reply(text))
    assert wire[-1]["status"] == "incomplete"
    whole = TEXT[BEGUN:-16]  # arguments that are whole are a call that is
    expected = before + TEXT if TEXT[BEGUN:end].startswith(whole) else text
    for said in (said_of([msgspec.convert(item, InputItem) for item in wire], "input"), by_chat(wire)):
        assert [one.text for one in said] == [expected]
        again = wire_items(reply(said[0].text, said[0].call_ids))
        assert [item.get("call_id") for item in again] == [item.get("call_id") for item in wire]


def test_calls_keep_their_names_behind_a_broken_one() -> None:
    items = [
        InputItem("function_call", call_id="a", name="f", arguments='{"x": "y'),
        InputItem("function_call", call_id="b", name="g", arguments='{"z":1}'),
        InputItem("function_call_output", call_id="b", output="1"),
    ]
    first, output = said_of(items, "input")
    assert first.call_ids == ("a", "b") and output.call_id == "b"
    shown = wire_items(reply(first.text, first.call_ids))
    assert [(item["call_id"], item["status"]) for item in shown if item["type"] == "function_call"] == [
        ("a", "incomplete"),
        ("b", "completed"),
    ]


@pytest.mark.parametrize("arguments", ["[]", "null", '"x"', "Paris", '{"a":1}}\n</tool_call>\n<tool_call>\n{"name":"g","arguments":{}}'])
def test_arguments_that_are_neither_an_object_nor_how_one_begins_are_refused(arguments: str) -> None:
    with pytest.raises(ApiError) as refused:
        said_of([InputItem("function_call", call_id="a", name="f", arguments=arguments)], "input")
    assert refused.value.refusal.param == "input.0.arguments"


def test_no_arguments_are_an_empty_object() -> None:
    (said,) = said_of([InputItem("function_call", call_id="a", name="f", arguments="")], "input")
    assert said.text == call_text("f", "{}")


def test_a_reply_may_have_refused() -> None:
    parts = [{"type": "output_text", "text": "No: "}, {"type": "refusal", "refusal": "I can't."}]
    message = {"role": "assistant", "content": parts}
    for said in (said_of([msgspec.convert(message, InputItem)], "input"), chat_messages.said_of([msgspec.convert(message, ChatMessage)])):
        assert [(one.role, one.text) for one in said] == [("assistant", "No: I can't.")]
    for wrong in ({**message, "role": "user"}, {"role": "assistant", "content": [{"type": "refusal"}]}):
        with pytest.raises(ApiError):
            said_of([msgspec.convert(wrong, InputItem)], "input")
