"""The runs of one request that asks for several replies: to one prompt (`n`), or to each of some.

Owns when they begin, that they end together, and what they add up to. A prompt is read once: its first run goes ahead, and the
others follow as soon as it has something to say, when they find the whole prompt in the cache. Each draws with a seed of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from app.api.errors import FailedReply
from app.api.kept import entries
from app.conversations.errors import ConversationError
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Turn
from app.store.records import Entry, Response, Usage
from engine.core import RequestError

MOST_CHOICES = 16  # of one request

Told = tuple[int, Entry | None]  # the index of a choice, and what it has gained; None: it has ended


class Choices:
    def __init__(self, conversations: Conversations, prompts: Sequence[Turn], n: int, params: Mapping[str, str]) -> None:
        """`n` choices for each of the prompts, whose indices follow each other. `params`: the protocol's names for the domain's fields."""
        self._conversations = conversations
        self._params = params
        self._n = n
        self._first = {at * n: turn for at, turn in enumerate(prompts)}
        self._later = {at * n: [_copy(turn, nth) for nth in range(1, n)] for at, turn in enumerate(prompts)}
        self._cancelled = False
        self.indices = range(n * len(prompts))
        self.runs: dict[int, Run] = {}  # those that have begun, by index

    async def begin(self) -> None:
        """Start the first choice of each prompt.

        Raises: ConversationError, StoreError, EngineError; then none is left running, but for a retry to find
        """
        try:
            for index, turn in self._first.items():
                self.runs[index] = await self._submit(turn)
        except BaseException:
            self._give_up()
            raise

    async def entries(self) -> AsyncGenerator[Told, None]:
        """What the choices gain, as it comes, and each one's end. Later choices are begun on the way.

        Raises: as `begin`, if one of them cannot be
        """
        if len(self.indices) == 1:
            async for gained in entries(self.runs[0]):
                yield 0, gained
            yield 0, None
            return
        coming: dict[asyncio.Task[Entry | None], tuple[int, AsyncIterator[Entry]]] = {}

        def follow(index: int, gains: AsyncIterator[Entry]) -> None:
            coming[asyncio.create_task(_next(gains))] = index, gains

        for index, run in self.runs.items():
            follow(index, entries(run))
        try:
            while coming:
                done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: coming[task][0]):
                    index, gains = coming.pop(task)
                    for later in await self._begin_later(index):
                        follow(later, entries(self.runs[later]))
                    if entry := task.result():
                        follow(index, gains)
                    yield index, entry
        except Exception:
            self._give_up()
            raise
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def done(self) -> None:
        """Wait for the end of all. Raises: as `entries`"""
        async for _ in self.entries():
            pass

    def cancel(self) -> None:
        """Ask all for their end; what has not begun does not begin."""
        self._cancelled = True
        for run in self.runs.values():
            run.cancel()

    def _give_up(self) -> None:
        """One cannot be begun: no other is, and those that nobody could come back for end. A retry finds the rest whole."""
        if any(turn.stored for turn in self._first.values()):
            self._later.clear()
        else:
            self.cancel()

    def prompt_run(self, index: int) -> Run:
        """The run that read a choice's prompt."""
        return self.runs[index - index % self._n]

    @property
    def usage(self) -> Usage:
        """Of all: each prompt counts once."""
        total = Usage()
        for index, run in self.runs.items():
            usage = run.response.usage
            total.completion_tokens += usage.completion_tokens
            if index in self._first:
                total.prompt_tokens += usage.prompt_tokens
                total.cached_tokens += usage.cached_tokens
        return total

    async def _begin_later(self, first: int) -> list[int]:
        """Start what waited for a choice to speak or end. Returns their indices."""
        begun = []
        for index, turn in enumerate(self._later.pop(first, ()), first + 1):
            if not self._cancelled:
                self.runs[index] = await self._submit(turn)
                begun.append(index)
        if self._cancelled:  # meanwhile
            self.cancel()
        return begun

    async def _submit(self, turn: Turn) -> Run:
        with renaming(self._params):
            return await self._conversations.submit(turn)


@contextmanager
def renaming(params: Mapping[str, str]) -> Iterator[None]:
    """Errors name the protocol's fields, not the domain's."""
    try:
        yield
    except (ConversationError, RequestError) as fault:
        if fault.param is not None:
            field, dot, rest = fault.param.partition(".")
            fault.param = params.get(fault.param, params.get(field, field) + dot + rest)
        raise


def finish_reason(response: Response) -> str:
    """Raises: FailedReply if it failed"""
    if response.status == "failed":
        raise FailedReply(response)
    return "stop" if response.status == "completed" else "length"  # whatever cut it, it is not whole


def _copy(turn: Turn, nth: int) -> Turn:
    """The turn of a prompt's nth choice. A repeat of the request finds it again, as it does the first."""
    sampling = turn.sampling
    seed = (sampling.seed + nth + 2**63) % 2**64 - 2**63
    return dataclasses.replace(
        turn,
        sampling=dataclasses.replace(sampling, seed=seed, prompt_logprobs=False),
        client_message_id=f"{turn.client_message_id}\n{nth}" if turn.client_message_id else None,
    )


async def _next(gains: AsyncIterator[Entry]) -> Entry | None:
    return await anext(gains, None)
