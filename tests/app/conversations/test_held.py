"""Turns whose grammars are still to be compiled, which may take seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from app.conversations.errors import ClosingError
from app.conversations.service import Conversations
from app.conversations.turn import Turn
from app.store.valkey import ValkeyStore
from engine.batcher import Batcher, Session
from engine.core import Grammar, RequestError
from tests.app.conversations.asking import turn

pytestmark = pytest.mark.asyncio(loop_scope="module")


def held(asked: Turn) -> Turn:
    return replace(asked, sampling=replace(asked.sampling, grammar=Grammar("regex", "a+")))


async def test_a_turn_that_waits_for_its_grammar_does_not_hold_up_the_close(
    valkey: ValkeyStore, new_conversations: Callable[[object], Conversations], batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def compile(session: Session, grammar: Grammar) -> None:
        begun.set()
        await never.wait()

    monkeypatch.setattr(Session, "compile", compile)
    conversations = new_conversations(valkey)
    submitted = asyncio.create_task(conversations.submit(held(turn())))
    await begun.wait()
    async with asyncio.timeout(10):
        await conversations.close()
    with pytest.raises(ClosingError):
        await submitted
    assert not batcher._room._live


async def test_what_cannot_be_answered_is_not_compiled(
    conversations: Conversations, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes to nothing has no claim on that."""

    async def compile(session: Session, grammar: Grammar) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(Session, "compile", compile)
    with pytest.raises(RequestError):
        await conversations.submit(held(turn("too long " * 2000)))
    assert not batcher._room._live
