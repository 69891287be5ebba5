"""The engine as one synchronous object: requests in, deltas of text and tokens out, a step at a time.

Owns the scheduler, the runner and each reply's text stream, all of one model. Knows no threads, no asyncio and no conversations:
`batcher.py` drives it from the engine thread.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.blocks import BlockPool
from engine.chat_template import ChatTemplate
from engine.core import Delta, EngineOptions, FinishReason, Sequence, StepPlan, StepResult
from engine.decoder import load_decoder
from engine.detokenizer import TextStream
from engine.runner import Runner
from engine.scheduler import Limits, Sampled, Scheduler
from engine.tokenizer import Tokenizer
from engine.weights.cache import Progress, quiet
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare

log = logging.getLogger(__name__)

Deltas = list[tuple[int, Delta]]  # (sequence id, what it gained)

STEPS_KEPT = 1024


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
        blocks = -(-options.max_total_tokens // options.block_size)
        self.runner = Runner(load_decoder(checkpoint, options, blocks, progress), options.block_size)
        limits = Limits(
            options.max_batch_size, options.max_step_tokens, config.context_length, frozenset(checkpoint.eos_ids), options.lone_step_tokens
        )
        self.scheduler = Scheduler(BlockPool(blocks, options.block_size), limits)
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._count = itertools.count()
        self._texts: dict[int, TextStream] = {}

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

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self, arrivals: Iterable[Sequence] = (), aborts: Iterable[Sequence] = ()) -> Deltas:
        """Take requests in and out, run one forward pass, and say what each sequence gained."""
        arrivals = list(arrivals)
        for sequence in arrivals:
            self._texts[sequence.id] = TextStream(self.tokenizer, sequence.sampling.stop)
        aborts = [sequence for sequence in dict.fromkeys(aborts) if sequence.id in self._texts]  # some may have ended meanwhile
        plan = self.scheduler.plan(arrivals, aborts)
        deltas = [(sequence.id, self._last(sequence, FinishReason.CANCELLED)) for sequence in aborts]
        if plan.chunks:
            self.steps.append(_record(next(self._count), plan))
            deltas += self._run(plan)
        return deltas

    def _run(self, plan: StepPlan) -> Deltas:
        try:
            result = self.runner.run(plan)
        except Exception as fault:  # whatever it is, only this step's sequences pay for it
            log.exception("a step failed; its %d sequences end with an error", len(plan.chunks))
            return [(chunk.sequence.id, self._fail(chunk.sequence, type(fault).__name__)) for chunk in plan.chunks]
        plan, result, broken = _parted(plan, result)
        deltas = [(sequence.id, self._fail(sequence, "the model gave numbers that are none")) for sequence in broken]
        return deltas + [(sampled.sequence.id, self._delta(sampled)) for sampled in self.scheduler.advance(plan, result)]

    def _delta(self, sampled: Sampled) -> Delta:
        sequence, token = sampled.sequence, sampled.token
        if sampled.finish is FinishReason.STOP:
            return self._last(sequence, FinishReason.STOP)
        stream = self._texts[sequence.id]
        text = stream.push(token)
        if stream.stopped:
            self.scheduler.finish(sequence)
            return self._last(sequence, FinishReason.STOP, (token,), text)
        if sampled.finish:
            return self._last(sequence, sampled.finish, (token,), text)
        return Delta((token,), text, stream.exact, sequence.cached)

    def _last(self, sequence: Sequence, finish: FinishReason, ids: tuple[int, ...] = (), text: str = "") -> Delta:
        stream = self._texts.pop(sequence.id)
        text += stream.flush()
        return Delta(ids, text, stream.exact, sequence.cached, finish, tuple(stream.visible_ids()))

    def _fail(self, sequence: Sequence, fault: str) -> Delta:
        self.scheduler.finish(sequence)
        last = self._last(sequence, FinishReason.ERROR)
        return replace(last, error=f"the engine failed in a step: {fault}")


def _record(index: int, plan: StepPlan) -> StepRecord:
    decodes = tuple(chunk.sequence.id for chunk in plan.chunks if chunk.sequence.output and len(chunk.tokens) == 1)
    prefills = tuple((chunk.sequence.id, len(chunk.tokens)) for chunk in plan.chunks if chunk.sequence.id not in decodes)
    return StepRecord(index, decodes, prefills)


def _parted(plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult, list[Sequence]]:
    """The plan and the result without the sequences whose logits were no numbers, and these."""
    if -1 not in result.tokens:
        return plan, result, []
    sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
    broken = [sequence for sequence, token in zip(sampling, result.tokens, strict=True) if token < 0]
    chunks = [chunk for chunk in plan.chunks if chunk.sequence not in broken]
    return StepPlan(chunks), StepResult([token for token in result.tokens if token >= 0]), broken
