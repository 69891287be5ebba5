"""E16: a conversation that outgrows the context is refused, or goes on without its oldest turns; either way it ends."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Said, Turn
from app.store.memory import MemoryStore
from engine.batcher import Batcher
from engine.core import RequestError
from engine.tokenizer import Place, Tokenizer
from tests.app.conversations.asking import text_of, turn
from tests.app.conversations.hostile import CONTEXT, prompt_of, ran

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = 45


@pytest.fixture
def batcher(hostile_batcher: Batcher) -> Batcher:
    return hostile_batcher


@pytest_asyncio.fixture(loop_scope="module")
async def conversations(batcher: Batcher) -> AsyncIterator[Conversations]:
    made = Conversations(MemoryStore(), batcher, lambda owner: owner.encode())
    yield made
    await made.close()


async def done(conversations: Conversations, asked: Turn) -> Run:
    run = await conversations.submit(asked)
    await run.done()
    assert run.response.status == "incomplete", run.response.error
    return run


def numbered(number: int) -> str:
    return f"#{number}: " + "what do you say? " * (number % 4)


def asking(number: int, **fields: Any) -> Turn:
    asked = turn(numbered(number), max_tokens=8 + number * 7 % 30, truncation="auto", **fields)
    return replace(asked, sampling=replace(asked.sampling, temperature=1.0, seed=number))


def seen(batcher: Batcher, run: Run) -> list[int]:
    """The numbers of the user messages in a run's prompt."""
    assert batcher._engine
    text = batcher._engine.tokenizer.decode(prompt_of(run))
    assert text.startswith("system\nBe kind.\nuser\n#"), "the instructions and whole turns"
    return [int(number) for number in re.findall(r"user\n#(\d+): ", text)]


def settled(batcher: Batcher, runs: list[Run]) -> int:
    """How often the window moved; whenever it did not, a prompt begins with all that was run before."""
    moves = 0
    for last, run in itertools.pairwise(runs):
        shown, before = seen(batcher, run), seen(batcher, last)
        assert len(prompt_of(run)) < CONTEXT
        assert shown == list(range(shown[0], before[-1] + 2)), "whole turns, up to the newest"
        assert shown[0] >= before[0]
        if shown[0] == before[0]:
            assert prompt_of(run)[: len(ran(last))] == ran(last)
        else:
            moves += 1
    return moves


async def followed(conversations: Conversations) -> list[Run]:
    """A conversation whose turns each follow the one before."""
    runs: list[Run] = []
    for number in range(TURNS):
        previous = runs[-1].id if runs else None
        runs.append(await done(conversations, asking(number, previous=previous, instructions="Be kind.")))
    return runs


async def test_a_long_conversation_goes_on_and_the_front_of_its_prompt_stays_put(conversations: Conversations, batcher: Batcher) -> None:
    runs = await followed(conversations)
    moves = settled(batcher, runs)
    assert 3 <= moves <= TURNS / 5, "it moved, and seldom"
    assert max(len(prompt_of(run)) for run in runs) > 0.6 * CONTEXT, "the context is used"


@pytest.mark.parametrize("altered", [False, True])
async def test_a_client_that_sends_everything_gets_the_same_windows(conversations: Conversations, batcher: Batcher, altered: bool) -> None:
    """Also one whose replies come back altered, and so are never known by their tokens."""
    whole: list[Said] = [Said("system", "Be kind.")]
    runs = []
    for number in range(TURNS):
        whole.append(Said("user", numbered(number)))
        runs.append(await done(conversations, replace(asking(number, stored=False), items=list(whole))))
        whole.append(Said("assistant", f"{await text_of(runs[-1])}!" if altered else await text_of(runs[-1])))
    if altered:
        starts = [seen(batcher, run)[0] for run in runs]
        assert starts == sorted(starts)
        assert 3 <= len(set(starts)) <= TURNS / 5
    else:
        settled(batcher, runs)
        assert [seen(batcher, run) for run in runs] == [seen(batcher, run) for run in await followed(conversations)]


async def test_disabled_is_an_error_once_the_chat_does_not_fit(conversations: Conversations, batcher: Batcher) -> None:
    previous = None
    for number in range(TURNS):
        asked = asking(number, previous=previous)
        try:
            previous = (await done(conversations, replace(asked, truncation="disabled"))).id
        except RequestError as refused:
            assert refused.code == "context_length_exceeded"
            break
    else:
        pytest.fail("it fitted")
    after = await done(conversations, asked)
    assert len(prompt_of(after)) < CONTEXT


@pytest.mark.parametrize("letters", [CONTEXT, 100 * CONTEXT])
async def test_the_newest_input_alone_must_fit(conversations: Conversations, letters: int) -> None:
    first = await done(conversations, asking(0))
    long = replace(asking(1, previous=first.id), items=[Said("user", "x" * letters)])
    with pytest.raises(RequestError) as refused:
        await conversations.submit(long)
    assert refused.value.code == "context_length_exceeded"
    both = replace(long, items=[Said("user", "y" * (CONTEXT // 2)), Said("user", "x" * (CONTEXT // 2))])
    with pytest.raises(RequestError):
        await conversations.submit(both)
    fits = await done(conversations, replace(long, items=[Said("user", "x" * (CONTEXT - 40))]))
    assert fits.response.reason == "max_output_tokens"


async def test_an_old_message_that_could_never_fit_is_left_out_unread(
    conversations: Conversations, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, real = [], Tokenizer.encode_plain

    def watched(self: Tokenizer, text: str, place: Place) -> list[int]:
        encoded.append(text)
        return real(self, text, place)

    monkeypatch.setattr(Tokenizer, "encode_plain", watched)
    whole: list[Said] = [Said("system", "Be kind."), Said("user", "x" * 100 * CONTEXT), Said("assistant", "!"), Said("user", "#1: ")]
    assert seen(batcher, await done(conversations, replace(asking(1), items=whole))) == [1]
    assert encoded and max(map(len, encoded)) < CONTEXT


@pytest.mark.parametrize(("max_tokens", "room"), [(0, CONTEXT // 4), (20, CONTEXT // 8), (600, CONTEXT // 2)])
async def test_room_is_left_for_the_reply(conversations: Conversations, batcher: Batcher, max_tokens: int, room: int) -> None:
    """As many messages as fit, each a few tokens long."""
    lengths = set()
    for count in range(90, 110):
        whole: list[Said] = [Said("system", "Be kind.")]
        for number in range(count):
            whole += [Said("user", f"#{number}: "), Said("assistant", "a")]
        asked = replace(asking(count, stored=False), items=[*whole, Said("user", f"#{count}: ")])
        run = await conversations.submit(replace(asked, sampling=replace(asked.sampling, max_tokens=max_tokens)))
        run.cancel()
        await run.done()
        lengths.add(len(prompt_of(run)))
    assert CONTEXT - room - 40 < max(lengths) <= CONTEXT - room
