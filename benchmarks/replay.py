"""A trace replayed: the server's own scheduler and pool, driven by a clock that only the cost model moves.

Owns that clock, the arrivals (a conversation's next turn comes a pause after its last one has ended, with the whole history as prompt) and
the model that answers: it says what the trace has. Everything that decides is the engine's. `tally.py` keeps what is told of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from heapq import heappop, heappush

from benchmarks.tally import Tally
from benchmarks.traces import Conversation
from engine.admission import Room
from engine.blocks import BlockPool
from engine.core import BusyError, Load, Move, SamplingParams, Save, Sequence, StepPlan, StepResult
from engine.cost import StepCost
from engine.prefix_cache import PrefixCache
from engine.scheduler import Limits, Scheduler
from engine.tier import Tier

RETRIES = 2  # of a request that is refused, each after the time it was told: what the OpenAI client does


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """What a trace is replayed on."""

    cost: StepCost
    limits: Limits
    pool_tokens: int
    block_size: int = 16
    tier_tokens: int = 0  # 0: no tier
    overhead: float = 0.0  # milliseconds of a step outside the model
    max_queue: int = 0  # requests that may wait; 0: any number


@dataclass(slots=True, eq=False)
class Asked:
    """A turn on its way."""

    conversation: Conversation
    turn: int
    words: list[int]  # all that is ever said in the conversation
    begin: int  # where in them the reply begins
    time: float  # when it was first asked
    tries: int = 0


class Replay:
    def __init__(self, trace: list[Conversation], rate: float, setup: Setup) -> None:
        """`rate`: conversations that begin in a second, on average."""
        self.setup = setup
        self.now = 0.0  # seconds
        self.tally = Tally(setup.limits.max_batch_size)
        tier = _tier(setup)
        pool = BlockPool(setup.pool_tokens // setup.block_size, setup.block_size, PrefixCache(setup.block_size), tier)
        self.scheduler = Scheduler(pool, setup.limits, setup.cost)
        self._room = Room(setup.limits.max_batch_size + setup.max_queue) if setup.max_queue else None
        self._coming: list[tuple[float, int, Asked | Conversation]] = []  # a heap; a number keeps what comes at once in order
        self._numbers = 0
        self._ids = 0  # of sequences
        self._live: dict[int, Asked] = {}  # by sequence
        for conversation in trace:
            self._later(conversation.start / rate, conversation)

    def run(self) -> Tally:
        begin = time.perf_counter()
        while not self.over:
            self.step()
        self.tally.wall = time.perf_counter() - begin
        return self.tally

    @property
    def over(self) -> bool:
        return not self._coming and self.scheduler.idle

    def step(self) -> None:
        """One forward pass; if there is nothing to run, whatever comes next is waited for first."""
        scheduler = self.scheduler
        if scheduler.idle:
            self._rest(self._coming[0][0] - self.now)
            self.now = max(self.now, self._coming[0][0])
        plan = scheduler.plan(self._arrivals())
        took = self.setup.cost.of_step(plan.chunks) + self._moved(plan.moves) + self.setup.overhead
        self.now += took / 1e3
        self.tally.step(self.now, took, plan, scheduler)
        self._answer(plan)

    def _answer(self, plan: StepPlan) -> None:
        """What comes after a chunk is what the trace has there."""
        live, now, told = self._live, self.now, self.tally.token
        tokens = [live[chunk.sequence.id].words[chunk.start + len(chunk.tokens)] for chunk in plan.chunks if chunk.samples]
        for sampled in self.scheduler.advance(plan, StepResult(tokens)):
            sequence = sampled.sequence
            told(sequence, now)
            if sampled.finish:
                self._ended(sequence, live.pop(sequence.id))

    def _ended(self, sequence: Sequence, asked: Asked) -> None:
        self.tally.ended(sequence)
        if self._room:
            self._room.leave(sequence.salt, self.now)
        conversation, turn = asked.conversation, asked.turn + 1
        if turn < len(conversation.turns):
            following = conversation.turns[turn]
            when = self.now + following.think
            begin = sequence.length + following.message
            self._later(when, Asked(conversation, turn, asked.words, begin, when))

    # What comes

    def _later(self, when: float, what: Asked | Conversation) -> None:
        self._numbers += 1
        heappush(self._coming, (when, self._numbers, what))

    def _arrivals(self) -> list[Sequence]:
        """Of all that is due, what is let in."""
        arrivals = []
        while self._coming and self._coming[0][0] <= self.now:
            when, _, what = heappop(self._coming)
            asked = what if isinstance(what, Asked) else Asked(what, 0, what.tokens(), what.turns[0].message, when)
            if self._let_in(asked):
                arrivals.append(self._sequence(asked))
        return arrivals

    def _let_in(self, asked: Asked) -> bool:
        if self._room is None:
            return True
        try:
            self._room.enter(asked.conversation.owner, self.now)
        except BusyError as busy:
            self.tally.refused += 1
            asked.tries += 1
            if asked.tries > RETRIES:
                self.tally.given_up += 1  # and with it the rest of the conversation
            else:
                self._later(self.now + busy.retry_after, asked)
            return False
        return True

    def _sequence(self, asked: Asked) -> Sequence:
        conversation = asked.conversation
        turn = conversation.turns[asked.turn]
        sampling = SamplingParams(max_tokens=turn.reply, ignore_eos=True)
        sequence = Sequence(self._ids, conversation.owner, asked.words[: asked.begin], sampling, priority=conversation.priority)
        self._ids += 1
        self._live[sequence.id] = asked
        self.tally.asked(sequence, asked.turn, asked.time)
        return sequence

    # The tier

    def _moved(self, moves: list[Move]) -> float:
        """Milliseconds."""
        self.tally.loads += sum(isinstance(move, Load) for move in moves)
        self.tally.saves += sum(isinstance(move, Save) for move in moves)
        return self.setup.cost.of_moves(moves)

    def _rest(self, seconds: float) -> None:
        """The tier gets what only the pool holds, as far as there is time."""
        pool, save = self.scheduler.pool, self.setup.cost.save
        if pool.tier and seconds > 0:
            pool.write_behind(int(min(1e3 * seconds / save, pool.blocks)) if save else pool.blocks)
            self.tally.saves += len(pool.take_moves())


def _tier(setup: Setup) -> Tier | None:
    """As the engine has it: none if computing a block is as quick as bringing it back."""
    slots = setup.tier_tokens // setup.block_size
    return Tier(slots) if slots and setup.cost.load_rows() < setup.block_size else None
