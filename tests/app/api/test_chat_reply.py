"""Chat replies told in parts: whatever the cuts, they come to the same."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.api import chat_messages
from app.api.chat_messages import CalledFunction, ChatMessage, ToolCall
from app.api.chat_reply import ChatTeller
from app.conversations.calls import as_told
from app.store.records import Item, Logprob
from engine.tool_calls import call_text

CALL = call_text("weather", '{"city": "Paris </tool_call>"}')
REPLIES = [
    "plain",
    f"Let me see.\n{CALL}\n{CALL}",
    CALL,
    f"  a <tool_ {CALL} between {CALL} after",
    f"{CALL[:-30]}",
    "<tool_call>no call</tool_call> ",
]


PARTS = [
    "",
    " ",
    "\n\n",
    "\t",
    "Let me see.",
    "<tool_",
    CALL,
    CALL.removesuffix("\n</tool_call>"),
    CALL.replace("\n", " "),
    CALL[:-30],
    CALL[:25],
]


def reply(calls: bool, text: str = "") -> Item:
    return Item(id="msg_7", parent=None, role="assistant", text=text, created_at=0, response="resp_7", calls=calls)


def told(pieces: list[str]) -> tuple[str, list[list[Any]], list[bytes]]:
    """What a client that puts the deltas together has: text, calls, the tokens of which it knows log probabilities."""
    teller = ChatTeller(reply(calls=True))
    parts = [part for piece in pieces for part in teller.tell(piece, [Logprob(piece.encode(), -1.0)])] + teller.end()
    text, calls, tokens = "", list[list[Any]](), list[bytes]()
    for delta, logprobs in parts:
        text += delta.get("content", "")
        tokens += [logprob.piece for logprob in logprobs]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
    assert teller.called == bool(calls)
    return text, calls, tokens


@given(st.sampled_from(REPLIES), st.lists(st.integers(0, 200), max_size=12))
def test_the_cuts_do_not_matter(text: str, cuts: list[int]) -> None:
    at = [0, *sorted({cut for cut in cuts if cut < len(text)} - {0}), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(at)]
    assert told(pieces)[:2] == told([text])[:2]


@given(st.lists(st.sampled_from(PARTS), max_size=6).map("".join))
def test_what_a_client_sends_back_is_known_again(text: str) -> None:
    """Whatever blanks its calls stood between, and wherever it was cut."""
    content, calls, _ = told([text])
    message = ChatMessage("assistant", content or None, [ToolCall(id, CalledFunction(name, arguments)) for id, name, arguments in calls])
    (said,) = chat_messages.said_of([message])
    assert said.text == as_told(reply(True, text))
    assert said.call_ids == tuple(id for id, _, _ in calls)
    if not calls:
        assert said.text == text
    again = Item(
        id="m", parent=None, role="assistant", text=said.text, created_at=0, response="r", calls=bool(calls), call_ids=[*said.call_ids]
    )
    assert as_told(again) == said.text


def test_what_is_said_and_called() -> None:
    arguments = '{"city": "Paris </tool_call>"}'
    text, calls, _ = told([f"Let me see.\n{CALL}\n{CALL} Done."])
    assert text == "Let me see.\nDone."
    assert calls == [["call_7_0", "weather", arguments], ["call_7_1", "weather", arguments]]
    assert told([CALL.partition(" </tool")[0]])[1][0][2] == '{"city": "Paris', "as far as it came"


def test_log_probabilities_are_those_of_what_is_said() -> None:
    assert told(["Let", " me", " ", "see", " <", "tool", " >"])[2] == [b"Let", b" me", b" ", b"see", b" <", b"tool", b" >"]
    text, calls, tokens = told(["Hi", " ", *CALL, "\n", "there"])
    assert (text, len(calls), tokens) == ("Hi\nthere", 1, [b"Hi", b"there"])


def test_without_tools_markup_is_text() -> None:
    teller = ChatTeller(reply(calls=False))
    assert teller.tell(CALL) == [({"content": CALL}, [])]
    assert teller.end() == [] and not teller.called
