"""A reply's text to output items and events, whatever pieces it comes in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from app.api.items import ledger_id, wire_items
from app.api.telling import Teller
from app.store.records import Item, Logprob
from engine.tool_calls import call_text

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

CALL = call_text("look", '{"at": [1, "}"]}')
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"at": [1, '


def reply(text: str = "", calls: bool = True, status: str = "completed") -> Item:
    return Item(id="msg_ab", parent=None, role="assistant", text=text, created_at=0, response="resp_1", calls=calls, status=status)  # type: ignore[arg-type]


def told(pieces: list[str], calls: bool = True, status: str = "completed") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    teller = Teller(reply(calls=calls))
    events = teller.begin()
    for piece in pieces:
        events += teller.tell(piece)
    return events + teller.end(status), teller.items


def joined(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == kind)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", ["message"]),
        ("Hello", ["message"]),
        (CALL, ["function_call"]),
        (f"Let me look.\n{CALL}", ["message", "function_call"]),
        (f"{CALL}\n{CALL}", ["function_call"] * 2),
        (f"Hm.{CALL}\nSo?", ["message", "function_call", "message"]),
        (BROKEN, ["function_call"]),
        ("<tool_call> is a tag", ["message"]),
    ],
)
def test_each_text_is_told_as_the_items_it_is(text: str, kinds: list[str]) -> None:
    events, items = told([text])
    assert [item["type"] for item in items] == kinds
    assert len({item["id"] for item in items}) == len(items)
    assert {ledger_id(item["id"]) for item in items} == {"msg_ab"}
    assert items == wire_items(reply(text)), "a stream and a look afterwards show the same"
    for item in items:
        ITEM.validate_python(item)
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})


def test_a_reply_without_tools_is_one_message_whatever_it_says() -> None:
    events, items = told([CALL], calls=False)
    assert [item["content"][0]["text"] for item in items] == [CALL]
    assert events[0]["type"] == "response.output_item.added", "it is there before its first word"


@given(st.lists(st.sampled_from([CALL, BROKEN, "Hi ", "\n", "<tool", "_call>", "{", '"', "}", "é"]), max_size=6), st.data())
def test_what_is_told_does_not_hang_on_the_pieces(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole_events, whole_items = told([text])
    events, items = told(pieces)
    assert items == whole_items
    for kind in ("response.output_text.delta", "response.function_call_arguments.delta"):
        assert joined(events, kind) == joined(whole_events, kind)


@given(st.lists(st.sampled_from([CALL, BROKEN, "Hi ", "\n", "there"]), max_size=6))
def test_every_item_begins_grows_and_ends_in_order(parts: list[str]) -> None:
    events, items = told(parts)
    open_item: str | None = None
    ended = []
    grown = ""
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert open_item is None
                open_item, grown = event["item"]["id"], ""
                assert event["output_index"] == len(ended)
            case "response.output_item.done":
                assert event["item"]["id"] == open_item
                item = event["item"]
                assert grown == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
                ended.append(item)
                open_item = None
            case kind:
                assert event["item_id"] == open_item
                grown += event["delta"] if kind.endswith(".delta") else ""
    assert open_item is None
    assert ended == items


def test_a_reply_cut_short_shows_in_its_last_item() -> None:
    assert told(["Hel"], status="incomplete")[1][0]["status"] == "incomplete"
    assert told([BROKEN], status="incomplete")[1][0]["status"] == "incomplete"
    assert [item["status"] for item in told([f"Hm.{CALL}"], status="incomplete")[1]] == ["completed", "completed"]


def test_log_probabilities_are_told_with_the_text_they_belong_to() -> None:
    teller = Teller(reply(calls=False))
    teller.begin()
    (first,) = teller.tell("é", [Logprob(b"\xc3", -0.5, [Logprob(b"a", -0.25)]), Logprob(b"\xa9", -1.0)])
    assert first["logprobs"][0] == {
        "token": "�",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
    }
    teller.tell("!", [Logprob(b"!", -2.0)])
    done, part, _ = teller.end("completed")
    assert [one["logprob"] for one in done["logprobs"]] == [-0.5, -1.0, -2.0]
    assert part["part"]["logprobs"] == done["logprobs"]
