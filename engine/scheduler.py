"""Which tokens run in the next step.

Owns: the running sequences, their block tables, and when they finish. Pure: a function of its state, the arrivals and the aborts; no clock,
no tensors, no I/O, so thousands of schedules can be tested in seconds. `waiting.py` says who is next, `blocks.py` who owns which block.

Each step has a budget of tokens, and with decodes in it one of predicted milliseconds too. Every running decode gets its one token first;
the rest goes to prefills, of those who run and of those who can start, each in its turn. Blocks that the tier has come back first, at the
price of the rows that take as long. A prompt that fits a step is not parted: if it does not fit behind another, it waits for the next step,
where its last token would have run anyway, and the one before it has a shorter step. Longer ones take what is left.

When the pool runs dry the newest background sequence, or else the newest, is preempted: its blocks become evictable (to the tier, if there
is one), its tokens stay, and what is left of its KV is found again when it goes on. So the oldest always progresses, and each time one is
crowded out it waits for twice the room. (Continuous batching: Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024.)
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from engine.blocks import BlockPool
from engine.core import Chunk, FinishReason, Load, Move, Phase, Save, Sequence, StepPlan, StepResult
from engine.cost import Drift, StepCost
from engine.prefix_cache import Match
from engine.waiting import AGE, Waiting

LEAST_ROWS = 4  # of a prompt in a step, whatever they take: it must come to an end
LONGEST_MS = 1000.0  # predicted, of a step that delays no decode: a newcomer and a cancel wait for its end


@dataclass(slots=True, frozen=True)
class Limits:
    max_batch_size: int  # sequences running at once
    max_step_tokens: int  # tokens in one forward pass
    context_length: int  # tokens of prompt and reply together
    eos_ids: frozenset[int]
    lone_step_tokens: int = 0  # tokens in one forward pass when there is one sequence only, if that is more
    policy: str = "fcfs"  # fcfs | lpm
    max_step_ms: float = 0  # predicted milliseconds of a step that has decodes; 0: any
    age: int = AGE  # steps after which who waits goes first


@dataclass(slots=True)  # not frozen: made for each token, as a chunk is
class Sampled:
    """One new token of a sequence, and whether it was the last."""

    sequence: Sequence
    token: int
    finish: FinishReason | None


@dataclass(slots=True)
class _Room:
    """What a step has left for prefills."""

    tokens: int
    milliseconds: float
    rows: int  # that it has already
    cost: StepCost | None
    least: int = LEAST_ROWS  # that fit, whatever they take

    @property
    def open(self) -> bool:
        return self.tokens > 0 and self.milliseconds > 0

    def fits(self, start: int, count: int) -> int:
        """How many of `count` rows at `start`."""
        count = min(count, self.tokens) if self.open else 0
        if self.cost is None or self.milliseconds == math.inf:
            return count
        return max(self.cost.rows_within(self.milliseconds, start, self.rows, count), min(count, self.least))

    def take(self, start: int, count: int) -> None:
        if self.cost and self.milliseconds != math.inf:
            more = self.cost.of_rows(self.rows + count) - self.cost.of_rows(self.rows) + self.cost.of_chunk(start, count)
            self.milliseconds -= more
        self.tokens -= count
        self.rows += count
        self.least = 0


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits, cost: StepCost | None = None) -> None:
        """`cost` is needed for `max_step_ms`, and says what a block from the tier takes."""
        if limits.max_step_tokens < limits.max_batch_size:
            raise ValueError(f"expected max_step_tokens >= max_batch_size, so that every decode fits, got {limits}")
        if limits.max_step_ms and cost is None:
            raise ValueError(f"expected a cost model with max_step_ms, got none with {limits}")
        self.pool = pool
        self.limits = limits
        self.cost = cost
        self.drift = Drift()  # of steps that read prompts; whoever times them tells it
        self.waiting = Waiting(limits.policy, self._known, limits.age)
        self.running: list[Sequence] = []  # interactive before background, then the oldest first
        self.step = 0  # counts plans
        self.longest = min(limits.context_length, pool.blocks * pool.block_size)  # tokens a sequence can ever have
        self._load_rows = cost.load_rows() if cost else 1

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def plan(self, arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> StepPlan:
        """The next step. Empty when nothing can run."""
        self.step += 1
        for sequence in arrivals:
            sequence.shared = self.pool.cache.shared_blocks(sequence.prompt)
            self.waiting.arrive(sequence, self.step)
        for sequence in aborts:
            self.finish(sequence)
        self._promote()
        self._make_way()
        chunks = self._decodes()
        if self.waiting or len(chunks) < len(self.running):
            chunks += self._prefills(self._room(chunks))
        return StepPlan(chunks, self.pool.take_moves())

    def advance(self, plan: StepPlan, result: StepResult) -> list[Sampled]:
        """Take a step's outcome in: KV that now exists, tokens that were chosen, sequences that are done."""
        sampled: list[Sampled] = []
        tokens = iter(result.tokens)
        size = self.pool.block_size
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = computed = chunk.start + len(chunk.tokens)
            if computed // size > len(sequence.chain):
                self.pool.remember(sequence)
            if chunk.samples:
                token = next(tokens)
                sequence.output.append(token)
                finish = self._finish_reason(sequence, token)
                if finish:
                    self.finish(sequence)
                sampled.append(Sampled(sequence, token, finish))
        return sampled

    def lost(self, plan: StepPlan, failed: Many[Move]) -> StepPlan:
        """The plan without those whose KV could not be moved: they begin anew, and what could not be read is forgotten."""
        blocks = set()
        for move in failed:
            if isinstance(move, Save):
                self.pool.unsaved(move)
                continue
            if isinstance(move, Load):
                self.pool.forget(move.node)
                blocks.add(move.block)
            else:
                blocks.add(move.target)
        hit = [s for s in self.running if not blocks.isdisjoint(s.table) or any(node.parent is None for node in s.chain)]
        for sequence in hit:
            self._stop(sequence, Phase.WAITING)
        return replace(plan, chunks=[chunk for chunk in plan.chunks if chunk.sequence not in hit])

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever its phase: its blocks become free or evictable."""
        if sequence.phase is Phase.RUNNING:
            self.pool.keep_tail(sequence)
            self._stop(sequence, Phase.FINISHED)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        sequence.phase = Phase.FINISHED

    # Decodes

    def _decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        size, step, serve = self.pool.block_size, self.step, self.waiting.serve
        for sequence in self.running.copy():
            start, output = sequence.computed, sequence.output
            if len(sequence.prompt) + len(output) - start != 1 or sequence.pending:
                continue
            if start < len(sequence.table) * size or self._grow(sequence):
                serve(sequence, 1, step)
                chunks.append(Chunk(sequence, start, [output[-1] if output else sequence.prompt[-1]], samples=True))
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Give a decode the block its next token goes to; the newest sequences make room if they must, itself included."""
        while sequence.phase is Phase.RUNNING:
            if sequence.computed < len(sequence.table) * self.pool.block_size:
                return True
            if self.pool.available:
                sequence.table.append(self.pool.allocate())
            else:
                self.running[-1].crowded_out += 1
                self._preempt(self.running[-1])  # of a later turn in this loop, so without a chunk yet
        return False

    # Prefills

    def _room(self, decodes: list[Chunk]) -> _Room:
        """A sequence that is alone keeps nobody waiting who is there already, so its steps may be longer."""
        alone = len(self.running) + len(self.waiting) == 1
        tokens = max(self.limits.max_step_tokens, self.limits.lone_step_tokens if alone else 0) - len(decodes)
        milliseconds = math.inf
        if self.cost and not decodes:
            milliseconds = LONGEST_MS / self.drift.ratio
        elif self.cost and self.limits.max_step_ms:
            milliseconds = max(0.1, self.limits.max_step_ms / self.drift.ratio - self.cost.of_step(decodes))
        return _Room(tokens, milliseconds, len(decodes), self.cost)

    def _prefills(self, room: _Room) -> list[Chunk]:
        chunks: list[Chunk] = []
        begun = [s for s in self.running if s.pending or s.length - s.computed > 1]
        whole, full = replace(room), False
        while room.open and (sequence := self._next(begun, full)):
            if sequence.phase is Phase.RUNNING:
                begun.remove(sequence)
            elif not self._start(sequence, room, whole):
                full = True
                continue
            chunks += self._continue(sequence, room)
        return chunks

    def _next(self, begun: list[Sequence], full: bool) -> Sequence | None:
        """Whose turn it is, of those whose prompt is partly run and, unless nobody else can start, those who wait."""
        full = full or len(self.running) >= self.limits.max_batch_size
        waiting = None if full else self.waiting.next(self.step)
        if not begun:
            return waiting
        first = min(begun, key=self._turn)
        return waiting if waiting and self._turn(waiting) < self._turn(first) else first

    def _turn(self, sequence: Sequence) -> tuple[int, int, int, int]:
        return self.waiting.rank(sequence, self.step)

    def _continue(self, sequence: Sequence, room: _Room) -> list[Chunk]:
        """Run as much of a prompt as there is room for, once what the tier has of it is there."""
        self._load(sequence, room)
        count = 0 if sequence.pending else room.fits(sequence.computed, sequence.length - sequence.computed)
        if not count:
            return []
        room.take(sequence.computed, count)
        self.waiting.serve(sequence, count, self.step)
        return [self._chunk(sequence, count)]

    def _start(self, sequence: Sequence, room: _Room, whole: _Room) -> bool:
        """Let a waiting sequence in, if there is room for it in this step and blocks for all its tokens."""
        found = self._match(sequence)
        known = found.tokens(self.pool.block_size)
        left = sequence.length - known
        fits = room.fits(known, left)
        if not fits or fits < left <= whole.fits(known, left):
            return False
        return self._admit(sequence, found)

    def _match(self, sequence: Sequence) -> Match:
        """What is known of a waiting sequence. At least one token must run, or there would be no logits to sample from (E15)."""
        found = self.pool.cache.match(sequence.salt, sequence.tokens(0, sequence.length - 1), sequence.shared, sequence.found)
        sequence.found = found.chain
        return found

    def _known(self, sequence: Sequence) -> int:
        return self._match(sequence).tokens(self.pool.block_size)

    def _blocks_short(self, sequence: Sequence, found: Match) -> int:
        """How many blocks are missing to let a sequence in."""
        here = [node for node in found.chain if node.block >= 0]
        needed = self.pool.blocks_for(sequence.length) - len(here)
        spare = ((1 << sequence.crowded_out) - 1) * len(self.running)  # whoever was crowded out comes back when there is more room
        if self.waiting.priority(sequence) < sequence.priority:
            spare = 0  # promoted: those who crowded it out give way to it now
        return needed + spare - (self.pool.available - self.pool.evictable(here))

    def _admit(self, sequence: Sequence, found: Match) -> bool:
        if self._blocks_short(sequence, found) > 0:
            return False
        pool, part, size = self.pool, found.part, self.pool.block_size
        here = [node for node in found.chain if node.block >= 0]
        source = part.block if part and len(here) == len(found.chain) else -1
        sequence.table = pool.share(here)
        sequence.table += [pool.allocate() for _ in range(pool.blocks_for(sequence.length) - len(here))]
        sequence.chain = here
        sequence.computed = len(here) * size
        sequence.pending = [(node, size) for node in found.chain[len(here) :]]
        if source >= 0:
            pool.copy(source, sequence.table[len(here)])
            sequence.computed += found.part_tokens
        elif part and found.part_tokens > self._load_rows:
            sequence.pending.append((part, found.part_tokens))
        if not (sequence.preemptions or sequence.output):
            sequence.cached = sequence.computed
        sequence.phase, sequence.found = Phase.RUNNING, []
        insort(self.running, sequence, key=self._rank)
        self.waiting.start(sequence)
        return True

    def _load(self, sequence: Sequence, room: _Room) -> None:
        """Bring back what the tier has of a sequence, as far as there is room in this step."""
        while sequence.pending and room.open:
            node, count = sequence.pending.pop(0)
            at, whole = sequence.computed // self.pool.block_size, count == self.pool.block_size
            if node.block < 0 and node.slot < 0:  # given up meanwhile: it is computed, and so is what follows
                sequence.pending.clear()
                return
            if node.block >= 0 and not whole:
                self.pool.copy(node.block, sequence.table[at])
            else:
                sequence.table[at] = self.pool.load(node, sequence.table[at], whole)
            if whole:
                sequence.chain.append(node)
            sequence.computed += count
            if not (sequence.preemptions or sequence.output):
                sequence.cached = sequence.computed
            room.tokens -= self._load_rows
            room.milliseconds -= self.cost.load if self.cost else 0.0

    # Giving way

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return self.waiting.priority(sequence), sequence.id

    def _promote(self) -> None:
        """Let background requests have their turn, however many interactive ones there are."""
        priority = self.waiting.priority
        if not self.waiting.due(bool(self.running) and not priority(self.running[0])):
            return
        begun = [s for s in self.running if priority(s) and s.length - s.computed > 1]
        if self.waiting.promote(begun, self.step):
            self.running.sort(key=self._rank)

    def _make_way(self) -> None:
        """Preempt those who hold what the next of those who wait has more right to. Before a step is planned: nobody loses a turn in it."""
        while self.running and (self.waiting.owners > 1 or self.waiting.priority(self.running[-1])):
            sequence = self.waiting.next(self.step)
            victim = self._victim(sequence) if sequence else None
            if not (sequence and victim):
                return
            full = len(self.running) >= self.limits.max_batch_size
            if not full and self._blocks_short(sequence, self._match(sequence)) <= 0:
                return
            self._preempt(victim)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Who gives way to a waiting sequence: the newest background one, if this one is not; or the newest of an owner that has more than
        its share of the batch, and was served more, if this one's owner has less."""
        newest, waiting = self.running[-1], self.waiting
        priority = waiting.priority(sequence)
        if waiting.priority(newest) > priority:
            return newest
        share = max(1, self.limits.max_batch_size // waiting.owners)
        if waiting.running(sequence) >= share:
            return None
        served = waiting.served(sequence)
        return next(
            (
                running
                for running in reversed(self.running)
                if waiting.priority(running) == priority and waiting.running(running) > share and waiting.served(running) > served
            ),
            None,
        )

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.keep_tail(sequence)
        sequence.preemptions += 1
        self._stop(sequence, Phase.WAITING)

    def _stop(self, sequence: Sequence, phase: Phase) -> None:
        """A sequence runs no longer: its blocks go, its tokens stay."""
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        sequence.table, sequence.chain, sequence.pending = [], [], []
        sequence.phase = phase
        if phase is Phase.WAITING:
            sequence.computed = 0
            self.waiting.add(sequence)
        self.waiting.stop(sequence)

    @staticmethod
    def _chunk(sequence: Sequence, count: int) -> Chunk:
        start = sequence.computed
        return Chunk(sequence, start, sequence.tokens(start, start + count), samples=start + count == sequence.length)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling, generated = sequence.sampling, len(sequence.output)
        if token in sampling.stop_ids or (token in self.limits.eos_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        if generated >= sampling.max_tokens or len(sequence.prompt) + generated >= self.longest:
            return FinishReason.LENGTH
        return None
