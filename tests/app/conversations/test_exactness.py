"""Any conversation, however it is carried on: the prompt of turn N + 1 begins with what turns 1 to N ran, as far as it can be seen."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Said, Turn
from app.store.memory import MemoryStore
from app.store.records import Asked
from engine.batcher import Batcher
from engine.core import SamplingParams
from tests.app.conversations.hostile import CONTEXT, prompt_of
from tests.engine import tiny

CONVERSATIONS = 100
AT_ONCE = 16
BLOCK = 16  # tokens
TURNS = 6

LETTERS = ["\n", "\n\n", " ", "  ", "a", "the", "é", "日", "🙂", "\ue000", "<|im_end|>", "<|im_", "end|>", "assistant\n", "�", "\0"]


@dataclass(slots=True)
class Exchange:
    """A turn that has ended, and what it followed."""

    parent: Exchange | None
    said: list[Said]  # new in this turn
    run: Run
    text: str  # of the reply, as its followers were shown it

    @property
    def chat(self) -> list[Said]:
        before = self.parent.chat if self.parent else []
        return [*before, *self.said, Said("assistant", self.text)]

    @property
    def path(self) -> Iterator[Exchange]:
        yield self
        if self.parent:
            yield from self.parent.path


@dataclass(slots=True)
class Talk:
    """Someone who talks to the model: goes on, goes back and takes another way, sends everything or follows what is stored."""

    name: int
    conversations: Conversations
    batcher: Batcher
    seen: Counter[str]  # what happened in all of them
    ended: list[Exchange] = field(default_factory=list)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.name)

    async def hold(self) -> None:
        owner = self.random.choice(["ana", "ben"])
        system = self.text() if self.random.random() < 0.5 else ""
        as_item = self.random.random() < 0.5
        for number in range(TURNS):
            parent = self.random.choice(self.ended) if self.ended and self.random.random() < 0.3 else (self.ended or [None])[-1]
            said: list[Said] = [Said("user", f"{self.name} {number} {self.text()}")]
            if not parent and system and as_item:
                said.insert(0, Said("system", system))
            follows = parent is not None and parent.run.response.request.store and self.random.random() < 0.4
            stored = follows or self.random.random() < 0.5
            asked = Turn(
                owner=owner,
                items=said if follows or not parent else [*parent.chat, *said],
                sampling=self.sampling(),
                instructions=None if as_item else system,
                previous=parent.run.id if follows and parent else None,
                stored=stored,
                request=Asked(store=stored),
            )
            if parent:
                self.seen["following" if follows else "whole"] += 1
                self.seen["branch"] += parent is not self.ended[-1]
            self.ended.append(await self.exchange(asked, parent, said))
            self.check(self.ended[-1])
            self.check_cached(self.ended[-1])

    async def exchange(self, asked: Turn, parent: Exchange | None, said: list[Said]) -> Exchange:
        run = await self.conversations.submit(asked)
        entries = self.random.randrange(8) if self.random.random() < 0.3 else 1000  # after which it is cancelled
        if not entries:
            run.cancel()
        pieces = []
        async for index, entry in run.entries():
            pieces.append(entry.text)
            if index == entries:
                run.cancel()
        self.seen[run.response.reason or run.response.status] += 1
        return Exchange(parent, said, run, "".join(pieces))

    def check(self, turn: Exchange) -> None:
        assert turn.run.response.status != "failed", turn.run.response.error
        assert self.batcher._engine
        tokenizer = self.batcher._engine.tokenizer
        opening = [tiny.BOS, *tokenizer.encode_plain("assistant\n")]
        prompt = prompt_of(turn.run)
        assert prompt[-len(opening) :] == opening
        for earlier in turn.path:
            if earlier is turn:
                continue
            # A reply without text is no message: then no more of that prompt can be seen than what the user said.
            known = prompt_of(earlier.run)
            known = known + (earlier.run.reply.ids or []) if earlier.text else known[: -len(opening)]
            assert prompt[: len(known)] == known
            self.seen["otherwise"] += earlier.text != "" and tokenizer.encode_plain(earlier.text) != earlier.run.reply.ids

    def check_cached(self, turn: Exchange) -> None:
        """As many tokens came from the cache as the prompt has in common with what this talk has run, the last apart, which is always
        run."""
        prompt, sequence = prompt_of(turn.run), turn.run.generation.sequence  # type: ignore[union-attr]
        if turn.parent is None or not sequence.output:  # others begin like this too; or it was cancelled before its prompt was run
            return
        least = most = 0
        for earlier in self.ended[:-1]:
            assert earlier.run.generation
            before = earlier.run.generation.sequence
            ran = before.tokens(0, before.length - bool(before.output))  # the last token it chose was never run
            common = next(
                (at for at, (one, other) in enumerate(zip(ran, prompt, strict=False)) if one != other), min(len(ran), len(prompt))
            )
            most = max(most, common)
            if before.output:  # else it may have been cancelled before its prompt was run
                least = max(least, common)
        cached = turn.run.response.usage.cached_tokens
        assert min(least, len(prompt) - 1) <= cached <= min(most, len(prompt) - 1)
        self.seen["exactly"] += least == most
        self.seen["inside a block"] += cached % BLOCK != 0

    def text(self) -> str:
        return "".join(self.random.choices(LETTERS, k=self.random.randrange(4)))

    def sampling(self) -> SamplingParams:
        favourites = self.random.sample(range(tiny.EOS + 1, tiny.CONFIG.vocab_size), 5)
        return SamplingParams(
            max_tokens=self.random.randint(1, 24),
            seed=self.random.getrandbits(60),
            temperature=self.random.choice([0.5, 1.0, 2.0]),
            stop=tuple(self.random.sample(["e", "th", " ", "s", "\n"], 2)) if self.random.random() < 0.4 else (),
            logit_bias=dict.fromkeys(favourites, 6.0) | {tiny.EOS: self.random.choice([0.0, 4.0])},
            ignore_eos=self.random.random() < 0.5,
        )


@pytest.mark.asyncio(loop_scope="module")
async def test_what_was_run_is_run_again_in_every_later_turn(hostile_batcher: Batcher) -> None:
    conversations = Conversations(MemoryStore(), hostile_batcher, lambda owner: owner.encode())
    places, seen = asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def one(name: int) -> None:
        async with places:
            await Talk(name, conversations, hostile_batcher, seen).hold()

    await asyncio.gather(*map(one, range(CONVERSATIONS)))
    await conversations.close()
    assert hostile_batcher.ready().context_length == CONTEXT, "else it would be the length that ended replies"
    for kind in ("following", "whole", "branch", "completed", "cancelled", "max_output_tokens", "otherwise", "exactly", "inside a block"):
        assert seen[kind] > 30, seen
