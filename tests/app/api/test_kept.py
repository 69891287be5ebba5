"""What a person deleted, or cut, of a reply is not told again: by events, by objects, with log probabilities or without."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from app.api import chat_reply
from app.api.choices import Choices
from app.api.kept import kept
from app.api.responses.events import follow, response_object
from app.conversations.run import Run
from app.conversations.turn import Turn
from app.store.records import Asked, Entry, Item, Logprob, Response
from engine.core import SamplingParams
from tests.app.wire import Event, check_event, check_numbers, text_of

WORDS = ("One ", "two", " thrée")
ENTRIES = [Entry([1], word, logprobs=[Logprob(word.encode(), -0.5)]) for word in WORDS]


def run_of(text: str | None, logprobs: bool = False) -> Run:
    """A run whose reply holds `text` by now; None: it was deleted."""
    request = Asked(model="m", shows_logprobs=logprobs)
    response = Response(
        id="resp_1", owner="ana", conversation="conv_1", previous=None, input=[], output="msg_1", created_at=1, request=request
    )
    reply = Item(id="msg_1", parent=None, role="assistant", text=text or "", created_at=1, response="resp_1", deleted=text is None)
    run = Run(replace(response, status="completed", completed_at=2), reply, ENTRIES)
    run.reply = replace(reply, status="completed")
    return run


async def events_of(run: Run) -> list[Event]:
    events = [event async for event in follow(run)]
    for event in events:
        check_event(event)
    check_numbers(events)
    return events


@pytest.mark.asyncio
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_deleted_reply_is_told_no_more(logprobs: bool) -> None:
    run = run_of(None, logprobs)
    events = await events_of(run)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert events[-1]["response"] == response_object(run) and response_object(run)["output"] == []
    assert not any(word.strip() in str(events) for word in WORDS)


@pytest.mark.asyncio
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("text", ["One tw", "One two", "O", "", "One two thr"])
async def test_a_cut_reply_is_told_as_it_was_cut(text: str, logprobs: bool) -> None:
    run = run_of(text, logprobs)
    events = await events_of(run)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert text_of(events) == part["text"] == text
    assert response_object(run) == events[-1]["response"]
    told = b"".join(bytes(token["bytes"]) for token in part["logprobs"])
    assert text.encode().startswith(told), "no token goes beyond what is left"
    whole = [word for at, word in enumerate(WORDS) if text.startswith("".join(WORDS[: at + 1]))]
    assert told.decode() == ("".join(whole) if logprobs else "")


def test_a_whole_reply_is_told_from_its_log() -> None:
    run = run_of("".join(WORDS))
    assert kept(run) is run.logged


@pytest.mark.asyncio
async def test_a_chat_that_is_asked_for_again_neither() -> None:
    turn = Turn(owner="ana", items=[], sampling=SamplingParams(max_tokens=1))
    for text in (None, "One tw"):
        conversations: Any = None
        choices = Choices(conversations, [turn], 1, {})
        choices.runs[0] = run_of(text)
        assert chat_reply.completion(choices)["choices"][0]["message"]["content"] == (text or "")
        chunks = [chunk async for chunk in chat_reply.chunks(choices, False)]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == (text or "")
