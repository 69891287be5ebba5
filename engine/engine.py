"""The engine as one synchronous object: requests in, deltas of text and tokens out, a step at a time.

Owns the scheduler, the runner and each reply in the making, all of one model. Knows no threads, no asyncio and no conversations:
`batcher.py` drives it from the engine thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import cast

from engine import calibrate
from engine.blocks import BlockPool
from engine.chat_template import ChatTemplate
from engine.core import Delta, EngineOptions, FinishReason, Message, RequestError, Save, Score, Sequence, StepPlan, StepResult
from engine.cost import StepCost
from engine.decoder import Decoder, load_decoder, sources_digest
from engine.grammar import Grammars
from engine.grammar_guides import Guides
from engine.offload import Store, open_store
from engine.prefix_cache import PrefixCache
from engine.reply import Reply
from engine.runner import Runner
from engine.scheduler import Limits, Sampled, Scheduler
from engine.tier import Tier
from engine.tokenizer import Tokenizer
from engine.weights.cache import Progress, quiet
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare

log = logging.getLogger(__name__)

Deltas = list[tuple[int, Delta]]  # (sequence id, what it gained)

STEPS_KEPT = 1024
# What users may begin with: letters, digits, blanks and line feeds merge with what is before them, each in its own way.
OPENINGS = ("a", "B", "0", "", " ", " a", "\t", "\n", "\n\n", "\n\n\na", "\r\n", ".", "'s", ":", "-", "#", "<", "é", "日本", "か", "🙂")
TOUCHED_AHEAD = 32  # blocks: a question and its reply, mostly
WRITTEN_AT_ONCE = 8  # blocks: a few milliseconds, for which an arrival may wait
CLOSE_SECONDS = 5.0
NO_NUMBERS = "the engine failed in a step: the model gave numbers that are none"


@dataclass(slots=True, frozen=True)
class StepRecord:
    """What one step did, for those who watch the engine."""

    index: int  # counts steps from 0
    decodes: tuple[int, ...]  # ids of the sequences that decoded one token
    prefills: tuple[tuple[int, int], ...]  # (sequence id, prompt tokens run)


class Engine:
    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress = quiet) -> None:
        """Have weights and kernels ready, making what the cache has not, and allot the KV pool. Raises: ModelError, EngineError"""
        config = checkpoint.config
        self.checkpoint = checkpoint
        self.tokenizer = Tokenizer(checkpoint.tokenizer_path, checkpoint.eos_ids)
        self.template = ChatTemplate(checkpoint.template, self.tokenizer, **checkpoint.special_tokens)
        decoder = load_decoder(checkpoint, options, blocks_of(options), progress)
        identity = f"{checkpoint.fingerprint} {options.weights} {decoder.identity} {sources_digest()}"
        store = open_store(options, identity, decoder.block_bytes)
        cost = _measured(decoder, store, options, config.context_length)
        if store and cost and cost.load_rows() >= options.block_size:
            store.close()
            store = None
        self.grammars = Grammars(self.tokenizer, config.vocab_size, checkpoint.eos_ids)
        self.guides = Guides(self.grammars)
        self.runner = Runner(decoder, options.block_size, store, self.guides)
        self.scheduler = Scheduler(self._pool(options, store), _limits(checkpoint, options), cost)
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._count = itertools.count()
        self._replies: dict[int, Reply] = {}

    def _pool(self, options: EngineOptions, store: Store | None) -> BlockPool:
        cache = PrefixCache(options.block_size, map(self._shared, options.shared_prefixes))
        tier = Tier(store.slots) if store else None
        if tier and store and (found := tier.restore(store.records(), cache)):
            log.info("%d blocks of earlier conversations are in %s", found, store.where)
        return BlockPool(blocks_of(options), options.block_size, cache, tier)

    def _shared(self, text: str) -> list[int]:
        """The tokens that every prompt begins with whose system message is `text`, whatever the user says: the last ones of what the
        template has between the two may differ with it."""
        prompts = []
        for said in OPENINGS:
            with contextlib.suppress(RequestError):  # a template may refuse some
                prompts.append(self.template.prompt([Message("system", text), Message("user", said)]).ids)
        common = zip(min(prompts), max(prompts), strict=False)  # what these two have in common all between them have
        ids = [id for id, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], common)]
        if len(ids) < self.runner.block_size:
            log.warning("a shared prefix of %d tokens is not shared: only whole blocks are, of %d tokens", len(ids), self.runner.block_size)
        return ids

    @classmethod
    def load(cls, options: EngineOptions, progress: Progress) -> Engine:
        """Fetch and convert the model if this was not done before, then load it. Raises: ModelError, EngineError"""
        checkpoint = prepare(options.model, options.cache_dir, progress)
        progress("loading the weights", None)
        return cls(checkpoint, options, progress)

    @property
    def fingerprint(self) -> str:
        """Of tokenizer and template: token ids kept under another one mean nothing."""
        return hashlib.sha256(f"{self.tokenizer.digest()} {self.template.digest()}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt that is no chat: nothing typed is a control token. Raises: RequestError"""
        bos = self.checkpoint.bos_id if self.checkpoint.add_bos else None
        return [*([] if bos is None else [bos]), *self.tokenizer.encode_plain(text)]

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self, arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> Deltas:
        """Take requests in and out, run one forward pass, and say what each sequence gained."""
        arrivals = list(arrivals)
        for sequence in arrivals:
            self._replies[sequence.id] = Reply(sequence, self.tokenizer, self.guides.add(sequence))
        aborts = [sequence for sequence in dict.fromkeys(aborts) if sequence.id in self._replies]  # some may have ended meanwhile
        plan = self.scheduler.plan(arrivals, aborts)
        deltas = [(sequence.id, self._last(sequence, FinishReason.CANCELLED)) for sequence in aborts]
        began = time.perf_counter()
        if failed := self.runner.move(plan.moves):
            plan = self.scheduler.lost(plan, failed)
        if plan.chunks:
            self.steps.append(_record(next(self._count), plan))
            deltas += self._run(plan, began)
        return deltas

    def _watch(self, plan: StepPlan, milliseconds: float) -> None:
        """Only steps that read a prompt are bounded by what they are to take, so only they are held against it; but not those that look
        at every row's logits, which take longer."""
        cost = self.scheduler.cost
        if cost and plan.tokens > len(plan.chunks) and not any(chunk.scored for chunk in plan.chunks):
            self.scheduler.drift.observe(cost.of_step(plan.chunks) + cost.of_moves(plan.moves), milliseconds)

    def prepare(self) -> bool:
        """While there is nothing to run: have memory for one of the blocks that come next. Returns whether there was one without."""
        return self.runner.touch(self.scheduler.pool.upcoming(TOUCHED_AHEAD))

    def rest(self) -> bool:
        """While there is nothing to run: let the tier have some of what only the pool holds. Returns whether there is more of it."""
        pool = self.scheduler.pool
        pool.write_behind(WRITTEN_AT_ONCE)
        moves = pool.take_moves()
        failed = self.runner.move(moves)
        for move in failed:
            pool.unsaved(cast(Save, move))
        return bool(moves) and not failed

    def close(self) -> None:
        """Let the tier have what only the pool holds, as far as a few seconds allow."""
        for sequence in [*self.scheduler.running]:  # what they have is worth keeping too
            self.scheduler.finish(sequence)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.rest() and time.monotonic() < deadline:
            pass
        self.guides.close()
        if self.runner.store:
            self.runner.store.close()

    def _run(self, plan: StepPlan, began: float) -> Deltas:
        try:
            result = self.runner.run(plan)
            self._watch(plan, 1e3 * (time.perf_counter() - began))
        except Exception as fault:  # whatever it is, only this step's sequences pay for it
            log.exception("a step failed; its %d sequences end with an error", len(plan.chunks))
            message = f"the engine failed in a step: {type(fault).__name__}"
            return [(chunk.sequence.id, self._fail(chunk.sequence, message)) for chunk in plan.chunks]
        faults = self._faults(plan, result)
        deltas: Deltas = []
        for sequence, message in faults.items():
            if message is NO_NUMBERS:
                self.scheduler.pool.distrust(sequence)
            deltas.append((sequence.id, self._fail(sequence, message)))
        plan, result = _without(plan, result, faults)
        for sampled in self.scheduler.advance(plan, result):
            deltas.append((sampled.sequence.id, self._delta(sampled, result.scores.get(sampled.sequence.id))))
        return deltas

    def _faults(self, plan: StepPlan, result: StepResult) -> dict[Sequence, str]:
        """Whose replies end with this step, and why. The others' have taken in what it brought."""
        faults: dict[Sequence, str] = {}
        tokens = iter(result.tokens)
        taken: dict[Sequence, int] = {}
        for chunk in plan.chunks:
            sequence, reply = chunk.sequence, self._replies[chunk.sequence.id]
            token = next(tokens) if chunk.samples else 0
            scores = result.prompt_scores.get(sequence.id, [])
            if token < 0 or any(math.isnan(score.logprob) for score in scores):
                faults[sequence] = NO_NUMBERS
                continue
            reply.know(chunk.start + 1, scores)
            if chunk.samples:
                taken[sequence] = token
        return faults | self._held(taken)

    def _held(self, taken: dict[Sequence, int]) -> dict[Sequence, str]:
        """Has the guides take the tokens of the replies that have one. Whose cannot go on, and why."""
        guides = {sequence: guide for sequence in taken if (guide := self._replies[sequence.id].guide)}
        self.guides.take([(guide, [taken[sequence]]) for sequence, guide in guides.items()])
        said = "the reply could not be held to its grammar"
        return {sequence: f"{said}: {guide.fault}" for sequence, guide in guides.items() if guide.fault}

    def _delta(self, sampled: Sampled, score: Score | None) -> Delta:
        sequence, token, finish = sampled.sequence, sampled.token, sampled.finish
        reply = self._replies[sequence.id]
        if finish is FinishReason.STOP:
            return self._last(sequence, FinishReason.STOP)
        text = reply.text.push(token)
        if reply.stopped:
            self.scheduler.finish(sequence)
            finish = FinishReason.STOP
        if finish:
            return self._last(sequence, finish, (token,), text, score)
        prompt = reply.known_prompt()
        return Delta((token,), text, reply.text.exact, sequence.cached, logprobs=reply.spelled(score), prompt_logprobs=prompt)

    def _last(
        self, sequence: Sequence, finish: FinishReason, ids: tuple[int, ...] = (), text: str = "", score: Score | None = None
    ) -> Delta:
        reply = self._replies.pop(sequence.id)
        self.guides.drop(sequence)
        text += reply.text.flush()
        return Delta(
            ids,
            text,
            reply.text.exact,
            sequence.cached,
            finish,
            tuple(reply.text.visible_ids()),
            logprobs=reply.spelled(score),
            prompt_logprobs=reply.known_prompt(),
        )

    def _fail(self, sequence: Sequence, fault: str) -> Delta:
        guide = self._replies[sequence.id].guide
        self.scheduler.finish(sequence)
        last = replace(self._last(sequence, FinishReason.ERROR), error=fault)
        return replace(last, error_code="invalid_grammar") if guide and guide.fault else last


def blocks_of(options: EngineOptions) -> int:
    return -(-options.max_total_tokens // options.block_size)


def _limits(checkpoint: Checkpoint, options: EngineOptions) -> Limits:
    return Limits(
        options.max_batch_size,
        options.max_step_tokens,
        checkpoint.config.context_length,
        frozenset(checkpoint.eos_ids),
        options.lone_step_tokens,
        options.schedule_policy,
        options.max_step_ms,
    )


def _measured(decoder: Decoder, store: Store | None, options: EngineOptions, context_length: int) -> StepCost | None:
    """What steps take, if anything depends on it."""
    if not (store or options.max_step_ms):
        return None
    load, save = store.measure() if store else (0.0, 0.0)
    cost = calibrate.measure(decoder, blocks_of(options), options.block_size, options.max_step_tokens, context_length, load, save)
    if store:
        computed = cost.of_row() * options.block_size
        choice = "is brought back" if cost.load_rows() < options.block_size else "is computed anew, and nothing is kept there"
        log.info(
            "a block of %d tokens takes %.1f ms to come from %s (%.1f to go there) and %.1f ms to compute: it %s",
            options.block_size,
            load,
            store.where,
            save,
            computed,
            choice,
        )
    return cost


def _record(index: int, plan: StepPlan) -> StepRecord:
    decodes = tuple(chunk.sequence.id for chunk in plan.chunks if chunk.sequence.output and len(chunk.tokens) == 1)
    prefills = tuple((chunk.sequence.id, len(chunk.tokens)) for chunk in plan.chunks if chunk.sequence.id not in decodes)
    return StepRecord(index, decodes, prefills)


def _without(plan: StepPlan, result: StepResult, gone: Container[Sequence]) -> tuple[StepPlan, StepResult]:
    """The plan and the result without some of the sequences."""
    if not gone:
        return plan, result
    sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
    tokens = [token for sequence, token in zip(sampling, result.tokens, strict=True) if sequence not in gone]
    return StepPlan([chunk for chunk in plan.chunks if chunk.sequence not in gone]), replace(result, tokens=tokens)
