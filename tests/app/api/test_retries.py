"""Which requests with one client message id, or idempotency key, are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.api import chat_completions
from app.api.responses.schema import read_create
from app.conversations.turn import Turn

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"a": "1", "b": "2"}}
RESPONSE: dict[str, Any] = {"input": "Hi", "metadata": {"a": "1", "b": "2"}}


def chat(body: dict[str, Any], key: str | None = "k") -> Turn:
    return chat_completions.read(json.dumps(body).encode()).turn("ana", "m", key)


def response(body: dict[str, Any], key: str | None = "k") -> Turn:
    return read_create(json.dumps(body)).turn("ana", "m", key)


@pytest.mark.parametrize(("read", "body"), [(chat, CHAT), (response, RESPONSE)])
def test_a_request_that_is_sent_again_is_the_same_however_its_reply_is_to_come(read: Callable[..., Turn], body: dict[str, Any]) -> None:
    digest = read(body).asked_digest
    assert len(digest) == 16
    again = ({}, {"metadata": {"b": "2", "a": "1"}}, {"stream": True}, {"stream_options": {}})
    others = ({"seed": 5}, {"temperature": 0}, {"metadata": {"a": "1"}}, {"top_p": 0.5}, {"model": "m"})
    assert {read(body | way).asked_digest for way in again} == {digest}, "what is drawn for it is no part of it"
    assert len({digest, *(read(body | other).asked_digest for other in others)}) == len(others) + 1
    assert read(body, None).asked_digest == b"", "without a key nothing is compared"


def test_what_a_protocol_alone_has_counts_too() -> None:
    says_more = {"messages": [*CHAT["messages"], {"role": "user", "content": "So?"}]}
    assert len({chat(CHAT | other).asked_digest for other in ({}, {"n": 2}, says_more, {"max_tokens": 5})}) == 4
    assert len({response(RESPONSE | other).asked_digest for other in ({}, {"input": "Ho"}, {"instructions": "x"})}) == 3
    on_a_lane = {"type": "response.create", "stream_id": "a"}
    assert response(RESPONSE | on_a_lane).asked_digest == response(RESPONSE | {"background": True}).asked_digest
    assert response(RESPONSE | on_a_lane).asked_digest == response(RESPONSE).asked_digest, "over HTTP, after a socket was lost"
