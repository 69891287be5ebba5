"""Which tokens run in the next step.

Owns: the running sequences, their block tables, and when they finish. Pure: a function of its state, the arrivals and the aborts; no clock,
no tensors, no I/O, so thousands of schedules can be tested in seconds. `waiting.py` says who is next, `blocks.py` who owns which block.

Each step has a budget of tokens, and with decodes in it one of predicted milliseconds too. Every running decode gets its one token first;
the rest goes to prefills, of those who run and of those who can start, each in its turn. Blocks that the tier has come back first, at the
price of the rows that take as long. A prompt that fits a step is not parted: if it does not fit behind another, it waits for the next step,
where its last token would have run anyway, and the one before it has a shorter step. Longer ones take what is left.

When the pool runs dry the newest background sequence, or else the newest, is preempted: its blocks become evictable (to the tier, if there
is one and time: `room.py`), its tokens stay, and what is left of its KV is found again when it goes on. So the oldest always progresses,
and each time one is crowded out it waits for twice the room. (Continuous batching: Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI
2024.)
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from engine.alike import Alike
from engine.blocks import BlockPool
from engine.core import Chunk, FinishReason, Load, Move, Phase, Save, Sequence, StepPlan, StepResult
from engine.cost import Drift, StepCost
from engine.prefix_cache import Match
from engine.room import LEAST_MS, LONGEST_MS, Room
from engine.waiting import AGE, Waiting

RETRY = 256  # steps: a disk that is full is not asked again in each


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
        self.waiting = Waiting(limits.policy, self._known, limits.age, self._held)
        self.running: list[Sequence] = []  # interactive before background, then the oldest first
        self.step = 0  # counts plans
        self.longest = min(limits.context_length, pool.blocks * pool.block_size)  # tokens a sequence can ever have
        self._load_rows = cost.load_rows() if cost else 1
        self._alike = Alike(pool.block_size, self._known, _findable)
        self._quiet_until = 0  # the step before which nothing is written behind

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
        if self.waiting:
            self._alike.begin(self.running, self.step)
        self._promote()
        self._make_way()
        self.pool.most_saves = self._most_saves()
        chunks = self._decodes()
        prompts, behind = self.waiting or len(chunks) < len(self.running), self._behind
        if prompts or behind:
            room = self._room(chunks)
            if prompts:
                chunks += self._prefills(room)
            if behind and chunks:
                self._write_behind(chunks, room)
        return StepPlan(chunks, self.pool.take_moves())

    def advance(self, plan: StepPlan, result: StepResult) -> list[Sampled]:
        """Take a step's outcome in: KV that now exists, tokens that were chosen, sequences that are done."""
        sampled: list[Sampled] = []
        tokens = iter(result.tokens)
        size = self.pool.block_size
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = computed = chunk.start + len(chunk.tokens)
            if chunk.scored:
                sequence.scored = max(sequence.scored, chunk.start + chunk.scores)
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
                if move.node.parent:  # else it was given up again
                    self._quiet_until = self.step + RETRY
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
            self._alike.stop(sequence)
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

    def _room(self, decodes: list[Chunk]) -> Room:
        """A sequence that is alone keeps nobody waiting who is there already, so its steps may be longer."""
        alone = len(self.running) + len(self.waiting) == 1
        tokens = max(self.limits.max_step_tokens, self.limits.lone_step_tokens if alone else 0) - len(decodes)
        milliseconds = math.inf
        if self.cost and not decodes:
            milliseconds = LONGEST_MS / self.drift.ratio
        elif self.cost and self.limits.max_step_ms:
            milliseconds = max(LEAST_MS, self.limits.max_step_ms / self.drift.ratio - self.cost.of_step(decodes))
        room = Room(tokens, milliseconds, len(decodes), self.cost)
        room.take_saves(self.pool.saves)
        return room

    def _prefills(self, room: Room) -> list[Chunk]:
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

    def _continue(self, sequence: Sequence, room: Room) -> list[Chunk]:
        """Run as much of a prompt as there is room for, once what the tier has of it is there."""
        self._load(sequence, room)
        count = 0 if sequence.pending else room.fits(sequence.computed, sequence.length - sequence.computed)
        if _unscored(sequence):
            count = min(count, room.scores)
        if not count:
            return []
        room.take(sequence.computed, count)
        self.waiting.serve(sequence, count, self.step)
        chunk = self._chunk(sequence, count)
        room.scores -= chunk.scores
        return [chunk]

    def _start(self, sequence: Sequence, room: Room, whole: Room) -> bool:
        """Let a waiting sequence in, if there is room for it in this step and blocks for all its tokens."""
        found = self._match(sequence)
        known = found.tokens(self.pool.block_size)
        left = sequence.length - known
        fits = room.fits(known, left)
        if not fits or fits < left <= whole.fits(known, left):
            return False
        return self._admit(sequence, found, room)

    def _match(self, sequence: Sequence) -> Match:
        """What is known of a waiting sequence."""
        found = self.pool.cache.match(sequence.salt, sequence.tokens(0, _findable(sequence)), sequence.shared, sequence.found)
        sequence.found = found.chain
        return found

    def _known(self, sequence: Sequence) -> int:
        return self._match(sequence).tokens(self.pool.block_size)

    def _held(self, sequence: Sequence) -> bool:
        return self._alike.held(sequence, self.waiting.priority)

    def _blocks_short(self, sequence: Sequence, found: Match) -> int:
        """How many blocks are missing to let a sequence in."""
        here = [node for node in found.chain if node.block >= 0]
        needed = self.pool.blocks_for(sequence.length) - len(here)
        spare = ((1 << sequence.crowded_out) - 1) * len(self.running)  # whoever was crowded out comes back when there is more room
        if self.waiting.priority(sequence) < sequence.priority:
            spare = 0  # promoted: those who crowded it out give way to it now
        return needed + spare - (self.pool.available - self.pool.evictable(here))

    def _admit(self, sequence: Sequence, found: Match, room: Room) -> bool:
        if self._blocks_short(sequence, found) > 0:
            return False
        pool, part, size = self.pool, found.part, self.pool.block_size
        here = [node for node in found.chain if node.block >= 0]
        source = part.block if part and len(here) == len(found.chain) else -1
        saves = pool.saves
        sequence.table = pool.share(here)
        sequence.table += pool.allocate_all(pool.blocks_for(sequence.length) - len(here), room.saves(saves))
        room.take_saves(pool.saves - saves)
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
        self._alike.start(sequence)
        return True

    def _load(self, sequence: Sequence, room: Room) -> None:
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
            room.take_load(self._load_rows)

    # Saving

    def _most_saves(self) -> float:
        """How many blocks that are given up may be saved in this step."""
        if not (self.pool.tier and self.cost):
            return math.inf
        starts = [s.computed for s in self.running if s.length - s.computed == 1]
        decodes = self.cost.of_rows(len(starts)) + self.cost.of_decode(sum(starts) + len(starts))
        most = (self.limits.max_step_ms or LONGEST_MS) / self.drift.ratio
        return Room(1, most - decodes, len(starts), self.cost).saves()

    @property
    def _behind(self) -> bool:
        return bool(self.pool.behind and self.cost and self.step >= self._quiet_until)

    def _write_behind(self, chunks: list[Chunk], room: Room) -> None:
        """Save a little of what nobody uses, so that it is not lost with the process, nor all to be saved when it is given up."""
        assert self.cost
        pool, planned = self.pool, self.pool.saves
        most = room.saves_behind(self.cost.of_step(chunks), planned)
        pool.write_behind(most)
        if most and pool.saves == planned:  # no slot is spare
            self._quiet_until = self.step + RETRY

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
            victim = self.waiting.victim(sequence, self.running, self.limits.max_batch_size) if sequence else None
            if not (sequence and victim):
                return
            full = len(self.running) >= self.limits.max_batch_size
            if not full and self._blocks_short(sequence, self._match(sequence)) <= 0:
                return
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.keep_tail(sequence)
        sequence.preemptions += 1
        self._stop(sequence, Phase.WAITING)

    def _stop(self, sequence: Sequence, phase: Phase) -> None:
        """A sequence runs no longer: its blocks go, its tokens stay."""
        self.running.remove(sequence)
        self._alike.stop(sequence)
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
        return Chunk(sequence, start, sequence.tokens(start, start + count), start + count == sequence.length, _unscored(sequence))

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling, generated = sequence.sampling, len(sequence.output)
        ends = not sampling.ignore_eos or sampling.grammar  # a grammar allows it only where nothing else need come
        if token in sampling.stop_ids or (token in self.limits.eos_ids and ends):
            return FinishReason.STOP
        if generated >= sampling.max_tokens or len(sequence.prompt) + generated >= self.longest:
            return FinishReason.LENGTH
        return None


def _findable(sequence: Sequence) -> int:
    """How many of its tokens the cache may give: one has to run, or there would be no logits to sample from (E15), and all whose log
    probabilities are wanted."""
    return sequence.scored if _unscored(sequence) else sequence.length - 1


def _unscored(sequence: Sequence) -> bool:
    """Log probabilities of its prompt are wanted, and not all known: those of its last position are not the prompt's."""
    return sequence.sampling.prompt_logprobs and sequence.scored < len(sequence.prompt) - 1
