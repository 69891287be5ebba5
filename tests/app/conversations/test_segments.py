"""Clients that send their whole chat again: what was run is run as it was, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from app.conversations import ledger
from app.conversations.run import Run
from app.conversations.segments import ENTRY_TOKENS, Segments
from app.conversations.service import Conversations
from app.conversations.turn import Said as NewItem
from app.conversations.turn import Turn
from app.store.memory import MemoryStore
from app.store.records import Item, Role
from engine.batcher import Batcher
from engine.core import Ending
from engine.tool_calls import call_text
from tests.app.conversations.asking import text_of, turn
from tests.app.conversations.hostile import NEWLINE, NEWLINES, prompt_of, ran

in_module = pytest.mark.asyncio(loop_scope="module")

Said = tuple[Role, str]


# The memory by itself.
def items(said: Iterable[Said]) -> list[Item]:
    return [Item(id=text, parent=None, role=role, text=text, created_at=0, response="") for role, text in said]


def reply(text: str, *ids: int, lead: Iterable[int] = (9,)) -> Item:
    return Item(
        id=text,
        parent=None,
        role="assistant",
        text=text,
        created_at=0,
        response="",
        lead_ids=list(lead),
        lead_digest=b"digest",
        ids=list(ids),
        fingerprint="f",
    )


HELLO: list[Said] = [("user", "hello")]


def say(segments: Segments, chat: list[Said], answer: Item, owner: str = "ana", fingerprint: str = "f", **fields: Any) -> list[Item]:
    """A whole chat is sent, run and answered. Returns its items as they were run."""
    new = items(chat)
    segments.keep(segments.recall(owner, fingerprint, fields.get("instructions"), [], new), answer)
    return new


def known(segments: Segments, chat: list[Said], owner: str = "ana", fingerprint: str = "f", instructions: str | None = None) -> list[Any]:
    """The tokens by which each message of a chat is known."""
    new = items(chat)
    segments.recall(owner, fingerprint, instructions, [], new)
    return [item.ids for item in new]


def test_a_reply_is_known_by_what_was_said_up_to_it() -> None:
    segments = Segments()
    say(segments, HELLO, reply("hi", 1, 2, lead=(7, 8)))
    new = items([*HELLO, ("assistant", "hi"), ("user", "more")])
    segments.recall("ana", "f", None, [], new)
    found = ledger.messages(None, new, "f")[1]
    assert (found.lead_ids, found.lead_digest, found.ids) == ((7, 8), b"digest", (1, 2))


@pytest.mark.parametrize(
    ("chat", "settings"),
    [
        ([*HELLO, ("assistant", "hi ")], {}),
        ([*HELLO, ("assistant", "h")], {}),
        ([*HELLO, ("user", "hi")], {}),
        ([("user", "hell"), ("assistant", "ohi")], {}),
        ([("user", "other"), ("assistant", "hi")], {}),
        ([("system", "hello"), ("assistant", "hi")], {}),
        ([("assistant", "hi")], {}),
        ([("user", "hello"), ("user", "?"), ("assistant", "hi")], {}),
        ([*HELLO, ("assistant", "hi")], {"owner": "ben"}),
        ([*HELLO, ("assistant", "hi")], {"fingerprint": "another"}),
        ([*HELLO, ("assistant", "hi")], {"instructions": "be kind"}),
        ([*HELLO, ("assistant", "hi")], {"owner": "anaf", "fingerprint": ""}),
    ],
)
def test_what_was_said_otherwise_or_by_someone_else_is_not_known(chat: list[Said], settings: dict[str, str]) -> None:
    segments = Segments()
    say(segments, HELLO, reply("hi", 1, 2))
    assert known(segments, [*HELLO, ("assistant", "hi")])[1] == [1, 2]
    assert known(segments, chat, **settings)[-1] is None


def test_text_that_reads_like_several_messages_is_one() -> None:
    segments = Segments()
    say(segments, [*HELLO, ("assistant", "hi"), ("user", "more")], reply("yes", 1))
    assert known(segments, [("user", "helloassistanthiusermore"), ("assistant", "yes")])[-1] is None
    assert known(segments, [*HELLO, ("assistant", "hi"), ("user", "more"), ("assistant", "yes")])[-1] == [1]


def test_instructions_are_a_system_message_and_messages_without_text_are_none() -> None:
    segments = Segments()
    say(segments, HELLO, reply("hi", 1), instructions="be kind")
    assert known(segments, [("system", "be kind"), ("assistant", ""), *HELLO, ("assistant", "hi")])[-1] == [1]


def test_the_same_words_in_another_chat_are_another_reply() -> None:
    segments = Segments()
    for number in range(3):
        say(segments, [("user", str(number))], reply("yes", number))
    for number in range(3):
        assert known(segments, [("user", str(number)), ("assistant", "yes")])[1] == [number]


def test_what_turn_n_ran_is_not_changed_by_what_others_say_meanwhile() -> None:
    """A reply that was unknown, and so run as text, is text in the next turn too, though its very words were generated since."""
    segments = Segments()
    opened: list[Said] = [*HELLO, ("assistant", "hi"), ("user", "more")]
    say(segments, opened, reply("yes", 5))
    say(segments, HELLO, reply("hi", 1, 2))
    assert known(segments, opened)[1] == [1, 2]
    assert known(segments, [*opened, ("assistant", "yes"), ("user", "?")]) == [None, None, None, [5], None]


def test_the_first_tokens_of_a_reply_stay() -> None:
    segments = Segments()
    say(segments, HELLO, reply("hi", 1, 2))
    say(segments, HELLO, reply("hi", 3))
    assert known(segments, [*HELLO, ("assistant", "hi")])[1] == [1, 2]


def test_a_reply_without_text_or_tokens_is_not_kept() -> None:
    segments = Segments()
    say(segments, HELLO, reply("", 1))
    unknown = reply("hi")
    unknown.ids = None
    say(segments, HELLO, unknown)
    assert known(segments, [*HELLO, ("assistant", "hi")])[1] is None
    say(segments, HELLO, reply("hi", 1))
    assert known(segments, [*HELLO, ("assistant", ""), ("assistant", "hi")])[-1] == [1]


def test_what_the_ledger_has_is_left_as_it_is_and_kept_with_the_reply() -> None:
    """A conversation that was stored before this process began, gone on with, then sent whole."""
    segments = Segments()
    say(segments, [*HELLO, ("assistant", "hi"), ("user", "more")], reply("text", 7))
    path = [*items(HELLO), reply("hi", 1, 2), *items([("user", "more")]), *items([("assistant", "text")])]
    new = items([("user", "?")])
    chat = segments.recall("ana", "f", None, path, new)
    assert [item.ids for item in path] == [None, [1, 2], None, None]
    segments.keep(chat, reply("yes", 3))
    said: list[Said] = [(item.role, item.text) for item in [*path, *new]]
    assert known(segments, [*said, ("assistant", "yes")]) == [None, [1, 2], None, None, None, [3]]
    path[1].fingerprint = "another"
    segments = Segments()
    segments.keep(segments.recall("ana", "f", None, path, new), reply("yes", 3))
    assert known(segments, [*said, ("assistant", "yes")]) == [None, None, None, None, None, [3]]


def test_a_reply_with_calls_is_known_by_what_it_says_and_calls() -> None:
    """A client is not told which blanks were between the two."""
    segments, call = Segments(), call_text("look", "{}")
    made = reply(f"\nI look. \n\n{call}", 1, 2)
    made.calls = True
    say(segments, HELLO, made)
    back = items([*HELLO, ("assistant", f"\nI look.\n{call}")])
    back[1].calls, back[1].call_ids = True, ["c"]
    segments.recall("ana", "f", None, [], back)
    assert back[1].ids == [1, 2]
    path = [*items(HELLO), made]  # in the ledger it has its blanks, and what follows it is known by the same chat
    following = items([("user", "so")])
    segments.keep(segments.recall("ana", "f", None, path, following), reply("yes", 3))
    whole = [*back, *items([("user", "so"), ("assistant", "yes")])]
    segments.recall("ana", "f", None, [], whole)
    assert whole[-1].ids == [3]


def test_it_is_bounded_in_tokens_and_forgets_the_end_of_what_was_not_used_longest() -> None:
    each = ENTRY_TOKENS + 10
    segments = Segments(5 * each)
    chats: dict[str, list[Said]] = {}
    for name in "ab":
        chats[name] = [("user", name)]
        for number in (1, 2):
            say(segments, chats[name], reply(f"yes {number}", *[number] * 9))
            chats[name] += [("assistant", f"yes {number}"), ("user", "more")]
    assert known(segments, chats["a"])[1::2] == [[1] * 9, [2] * 9]  # used last now
    say(segments, [("user", "c")], reply("yes", *[3] * 9))
    say(segments, [("user", "d")], reply("yes", *[4] * 9))
    assert known(segments, chats["b"])[1::2] == [[1] * 9, None]
    assert known(segments, chats["a"])[1::2] == [[1] * 9, [2] * 9]
    for name in "efgh":
        say(segments, [("user", name)], reply("yes", *[5] * 9))
    assert known(segments, chats["a"])[1::2] == [[1] * 9, None]
    say(segments, [("user", "i")], reply("yes", *[5] * (6 * each)))
    assert known(segments, [("user", "i"), ("assistant", "yes")])[1] is None, "it alone is more than all may be"


# The whole domain, on a model that says what would encode otherwise.
@pytest.fixture
def batcher(hostile_batcher: Batcher) -> Batcher:
    return hostile_batcher


@pytest_asyncio.fixture(loop_scope="module")
async def conversations(hostile_batcher: Batcher) -> AsyncIterator[Conversations]:
    made = Conversations(MemoryStore(), hostile_batcher, lambda owner: owner.encode())
    yield made
    await made.close()


def newlines(chat: list[Said] = HELLO, **fields: Any) -> Turn:
    """A turn that is answered by two line feeds, each a token."""
    asked = turn(max_tokens=2, **fields)
    return replace(asked, items=[NewItem(role, text) for role, text in chat], sampling=replace(asked.sampling, logit_bias={NEWLINE: 100.0}))


async def done(conversations: Conversations, asked: Turn) -> Run:
    run = await conversations.submit(asked)
    await run.done()
    return run


@in_module
@pytest.mark.parametrize("stored", [False, True])
async def test_every_token_of_the_first_turn_is_in_the_second(conversations: Conversations, batcher: Batcher, stored: bool) -> None:
    """E10."""
    first = await done(conversations, newlines(stored=stored))
    assert batcher._engine
    assert batcher._engine.tokenizer.encode_plain("\n\n") == [NEWLINES]
    assert first.reply.ids == [NEWLINE, NEWLINE]
    whole: list[Said] = [*HELLO, ("assistant", await text_of(first)), ("user", "more")]
    second = await done(conversations, newlines(whole, stored=stored))
    assert prompt_of(second)[: len(ran(first))] == ran(first)
    whole += [("assistant", await text_of(second)), ("user", "more")]
    third = await done(conversations, newlines(whole, stored=stored))
    assert prompt_of(third)[: len(ran(second))] == ran(second)


@in_module
@pytest.mark.parametrize("said", ["\n", "\n\n\n", " \n\n"])
async def test_an_altered_reply_is_tokenised(conversations: Conversations, batcher: Batcher, said: str) -> None:
    await done(conversations, newlines())
    whole: list[Said] = [*HELLO, ("assistant", said), ("user", "more")]
    second = await done(conversations, newlines(whole))
    assert batcher._engine
    assert prompt_of(second) == batcher._engine.template.prompt(ledger.messages(None, items(whole), "")).ids


@in_module
async def test_another_owner_learns_nothing_of_the_tokens(conversations: Conversations, batcher: Batcher) -> None:
    first = await done(conversations, newlines())
    whole: list[Said] = [*HELLO, ("assistant", await text_of(first)), ("user", "more")]
    other = await done(conversations, newlines(whole, owner="ben"))
    assert batcher._engine
    assert prompt_of(other) == batcher._engine.template.prompt(ledger.messages(None, items(whole), "")).ids
    assert prompt_of(await done(conversations, newlines(whole))) != prompt_of(other)


@in_module
async def test_a_stored_turn_keeps_what_its_input_was_run_as(conversations: Conversations) -> None:
    """Whatever becomes of the memory, what follows a stored turn finds in the ledger what that turn ran."""
    opening: list[Said] = [*HELLO, ("assistant", "\n\n"), ("user", "more")]
    unknown = await done(conversations, newlines(opening))
    first = await done(conversations, newlines())
    known = await done(conversations, newlines(opening))
    assert prompt_of(known)[: len(ran(first))] == ran(first)
    assert prompt_of(known) != prompt_of(unknown)
    for segments in (conversations._segments, Segments()):
        conversations._segments = segments
        for earlier in (unknown, known):
            following = await done(conversations, newlines([("user", "?")], previous=earlier.id))
            assert prompt_of(following)[: len(ran(earlier))] == ran(earlier)


@in_module
async def test_the_words_that_a_failed_run_got_out_are_not_kept(
    conversations: Conversations, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batcher._engine
    real, steps = batcher._engine.runner.run, iter(range(100))

    def failing(plan: Any) -> Any:
        if next(steps) == 2:
            raise ZeroDivisionError
        return real(plan)

    monkeypatch.setattr(batcher._engine.runner, "run", failing)
    failed = await done(conversations, replace(newlines(), sampling=replace(newlines().sampling, max_tokens=9)))
    assert failed.response.status == "failed"
    assert await text_of(failed) == "\n\n"
    whole: list[Said] = [*HELLO, ("assistant", "\n\n"), ("user", "more")]
    second = await done(conversations, newlines(whole))
    assert prompt_of(second) == batcher._engine.template.prompt(ledger.messages(None, items(whole), "")).ids


@in_module
@pytest.mark.parametrize("known", [True, False])
async def test_a_reply_that_went_on_is_found_as_one_message(conversations: Conversations, batcher: Batcher, known: bool) -> None:
    """E10: begun by an earlier reply, or by the client."""
    begun = await text_of(await done(conversations, limited(newlines(stored=False), 1))) if known else "x"
    said: list[Said] = [*HELLO, ("assistant", begun)]
    second = await done(conversations, replace(limited(newlines(said, stored=False), 3), ending=Ending.CONTINUE))
    said[-1] = "assistant", begun + await text_of(second)
    third = await done(conversations, newlines([*said, ("user", "more")], stored=False))
    assert prompt_of(third)[: len(ran(second))] == ran(second)
    assert third.response.usage.cached_tokens == len(ran(second)) - 1  # the last token of a reply that was cut is never run


@in_module
async def test_the_ledger_has_the_message_that_went_on_apart(conversations: Conversations) -> None:
    """Where both are spoken one after the other, it would be run twice."""
    said: list[Said] = [*HELLO, ("assistant", "one"), ("assistant", "two")]
    run = await done(conversations, replace(limited(newlines(said), 3), ending=Ending.CONTINUE))
    assert (run.reply.lead_ids, run.reply.lead_digest) == ([], b"")


def limited(asked: Turn, tokens: int) -> Turn:
    return replace(asked, sampling=replace(asked.sampling, max_tokens=tokens))
