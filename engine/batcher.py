"""The async token-level batcher: the one door between asyncio and the engine thread.

Owns the engine thread, its inbox of arrivals and aborts, and the delivery of each step's tokens to the event loop: one
`call_soon_threadsafe` per step, however many sequences gained a token. Also the only way to tokenise, on threads
of its own. Knows no conversations and no protocols, and owners only as the salts of their sessions. Importing this module imports no torch:
the engine is imported in its thread, so that a server's sockets open while weights load.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine import core
from engine.admission import Room
from engine.core import (
    BusyError,
    Delta,
    Ending,
    EngineError,
    EngineOptions,
    FinishReason,
    Grammar,
    Message,
    NotReadyError,
    Prompt,
    SamplingParams,
    Tool,
)
from engine.served import Failed, Loading, Ready, log_change
from engine.turns import Turns

if TYPE_CHECKING:
    from engine.engine import Deltas, Engine
    from engine.grammar import Compiled

log = logging.getLogger(__name__)

__all__ = ["STALL_SECONDS", "Batcher", "Failed", "Generation", "Loading", "Ready", "Session"]

T = TypeVar("T")

BEAT_SECONDS = 1.0  # an idle engine thread shows that it lives this often
COMPILED_AT_ONCE = 2  # grammars
MOST_COMPILES = 128  # of one owner that wait for it: fewer than there is room for requests
CLOSE_SECONDS = 10.0  # a thread that takes longer to end is left to the process's end
STALL_SECONDS = 20.0  # a thread that has not been seen for this long is not answering; one step takes far less


class Batcher:
    """Start it inside a running event loop; every method is to be called from that loop."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.state: Loading | Ready | Failed = Loading("starting", None)
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._tokenising = ThreadPoolExecutor(2, "tokeniser")
        self._compiling = ThreadPoolExecutor(COMPILED_AT_ONCE, "grammar")  # a bad one may take seconds, for which nobody's prompt waits
        self._compile_turns = Turns(COMPILED_AT_ONCE)
        self._settled = asyncio.Event()
        self._ids = itertools.count()
        self._live: dict[int, Generation] = {}
        self._room = Room(options.max_batch_size + options.max_queue)
        self._wake = threading.Condition()
        self._arrivals: list[core.Sequence] = []  # guarded by _wake, as the next three
        self._first_arrival = 0.0  # when the first of them came
        self._aborts: list[core.Sequence] = []
        self._closing = False
        self._seen = time.monotonic()  # when the engine thread last began a round

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread after its current step. Live generations end as cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        self._tokenising.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._end_all(FinishReason.CANCELLED, None)

    async def settled(self) -> Ready:
        """Wait until the model is loaded. Raises: NotReadyError if it cannot be."""
        await self._settled.wait()
        return self.ready()

    def ready(self) -> Ready:
        """Raises: NotReadyError"""
        match self.state:
            case Ready():
                return self.state
            case Loading(stage):
                raise NotReadyError(f"the model is loading ({stage}); try again shortly", loading=True)
            case Failed(error):
                raise NotReadyError(f"the model could not be loaded: {error}", loading=False)

    @property
    def live(self) -> int:
        """Requests running or waiting."""
        return len(self._live)

    @property
    def responsive(self) -> bool:
        """Loaded, and the engine thread has been seen lately."""
        return isinstance(self.state, Ready) and time.monotonic() - self._seen < STALL_SECONDS

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), ending: Ending = Ending.REPLY) -> Prompt:
        """Render and tokenise a chat, off the event loop. Raises: NotReadyError, RequestError"""
        ready = self.ready()
        assert self._engine
        longest = self._engine.tokenizer.longest
        least = sum(1 + len(message.text) // longest for message in messages if message.ids is None)
        if least >= ready.context_length:  # not worth the tokenisers' time, which everyone shares
            raise ready.too_long(f"at least {least}")
        return await self._loop.run_in_executor(self._tokenising, self._engine.template.prompt, messages, tools, ending)

    async def measure(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Sequence[int]:
        """Where each message of a chat of any length ends, in tokens, off the event loop. Raises: NotReadyError, RequestError"""
        ready = self.ready()
        assert self._engine
        measure = self._engine.template.measure
        return await self._loop.run_in_executor(self._tokenising, measure, messages, ready.context_length, tools)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, off the event loop: plain text, after the BOS token if the model begins its prompts with one.

        Raises: NotReadyError, RequestError
        """
        ready = self.ready()
        assert self._engine
        if (least := -(-len(text) // self._engine.tokenizer.longest)) >= ready.context_length:
            raise ready.too_long(f"at least {least}")
        return await self._loop.run_in_executor(self._tokenising, self._engine.encode, text)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of a raw prompt's tokens, off the event loop. Raises: NotReadyError, RequestError"""
        self.ready().check_ids(ids, "input")
        assert self._engine
        return await self._loop.run_in_executor(self._tokenising, self._engine.tokenizer.decode, ids)

    async def _compiled_for(self, salt: bytes, grammar: Grammar) -> None:
        self.ready()
        assert self._engine
        if self._engine.grammars.known(grammar):
            return
        self._engine.grammars.check(grammar)
        if self._compile_turns.waiting(salt) >= MOST_COMPILES:
            raise BusyError(f"{MOST_COMPILES} grammars of yours wait to be compiled; try again when some have been")
        async with self._compile_turns.place(salt):
            await self._loop.run_in_executor(self._compiling, self._engine.grammars.compiled, grammar)

    def check(self, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse now what can never run. Raises: NotReadyError, RequestError"""
        self.ready().check(ids, sampling)

    def session(self, salt: bytes) -> Session:
        return Session(self, salt)

    def _submit(self, ids: list[int], salt: bytes, sampling: SamplingParams, background: bool) -> Generation:
        """For a request that was checked and holds a place."""
        self.ready()
        generation = Generation(self, core.Sequence(next(self._ids), salt, ids, sampling, priority=int(background)))
        self._live[generation.id] = generation
        if sampling.grammar:
            self._compile(generation.sequence, sampling.grammar)
        else:
            self._arrive(generation.sequence)
        return generation

    def _compile(self, sequence: core.Sequence, grammar: Grammar) -> None:
        """Let a sequence in once its grammar is compiled: mostly at once, since `compile` has been asked before."""
        assert self._engine
        if compiled := self._engine.grammars.known(grammar):
            sequence.compiled = compiled
            self._arrive(sequence)
        else:
            compiling = self._loop.run_in_executor(self._compiling, self._engine.grammars.compiled, grammar)
            compiling.add_done_callback(partial(self._compiled, sequence))

    def _compiled(self, sequence: core.Sequence, compiling: asyncio.Future[Compiled]) -> None:
        fault = None if compiling.cancelled() else compiling.exception()
        if sequence.id not in self._live:
            return  # cancelled meanwhile, or everything was
        if fault:
            self._deliver([(sequence.id, Delta((), "", finish=FinishReason.ERROR, error=str(fault)))])
        else:
            sequence.compiled = compiling.result()
            self._arrive(sequence)

    def _arrive(self, sequence: core.Sequence) -> None:
        with self._wake:
            if not self._arrivals:
                self._first_arrival = time.monotonic()
            self._arrivals.append(sequence)
            self._wake.notify()

    def _abort(self, sequence: core.Sequence) -> None:
        if sequence.sampling.grammar and not sequence.compiled:  # the engine has not heard of it
            self._deliver([(sequence.id, Delta((), "", finish=FinishReason.CANCELLED))])
            return
        with self._wake:
            self._aborts.append(sequence)
            self._wake.notify()

    def _end(self, generation: Generation) -> None:
        del self._live[generation.id]
        self._room.leave(generation.sequence.salt, time.monotonic())

    def _deliver(self, deltas: Deltas) -> None:
        for id, delta in deltas:
            if generation := self._live.get(id):
                generation._receive(delta)

    def _end_all(self, finish: FinishReason, error: str | None) -> None:
        for generation in list(self._live.values()):
            generation._receive(Delta((), "", finish=finish, error=error))

    def _set_state(self, state: Loading | Ready | Failed) -> None:
        log_change(self.state, state)
        self.state = state
        if isinstance(state, Failed):
            self._end_all(FinishReason.ERROR, state.error)
        if not isinstance(state, Loading):
            self._settled.set()

    # What follows runs in the engine thread.

    def _main(self) -> None:
        try:
            self._serve(self._load())
        except EngineError as fault:
            self._tell(self._set_state, Failed(str(fault)))
        except Exception as fault:
            log.exception("the engine thread ended")
            self._tell(self._set_state, Failed(f"the engine thread ended: {type(fault).__name__}: {fault}"))

    def _load(self) -> Engine:
        # libgomp reads this when it is brought in. Left alone, its threads spin between steps for so long that whoever else wants a core
        # waits, the event loop included; put to sleep at once, they take a while to wake for every step.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        from engine.engine import Engine

        engine = Engine.load(self.options, self._loading)
        checkpoint = engine.checkpoint
        self._engine = engine
        self._seen = time.monotonic()
        longest, config = engine.scheduler.longest, checkpoint.config
        bound = "the context" if longest == config.context_length else "all that the KV pool holds"
        ready = Ready(checkpoint.name, longest, config.vocab_size, engine.fingerprint, bound)
        self._tell(self._set_state, ready)
        return engine

    def _loading(self, stage: str, fraction: float | None) -> None:
        if self._closing:
            raise EngineError("closed while the model was loading")
        self._tell(self._set_state, Loading(stage, fraction))

    def _serve(self, engine: Engine) -> None:
        try:
            while not self._closing:
                self._seen = time.monotonic()
                arrivals, aborts = self._take(engine)
                deltas = engine.step(arrivals, aborts)
                if deltas:
                    self._tell(self._deliver, deltas)
        finally:
            engine.close()

    def _take(self, engine: Engine) -> tuple[list[core.Sequence], list[core.Sequence]]:
        """The arrivals and aborts since the last time. An idle engine tidies up, then sleeps until there are some, and waits for others to
        come along with the first arrival."""
        nothing_to_do = engine.idle and not self._called and not (engine.prepare() or engine.rest())
        with self._wake:
            if nothing_to_do and not self._called:
                self._wake.wait(BEAT_SECONDS)
            if engine.idle and self._arrivals:
                window = self._first_arrival + self.options.batch_window_ms / 1000 - time.monotonic()
                self._wake.wait_for(self._gathered, max(0.0, window))
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
        return arrivals, aborts

    @property
    def _called(self) -> bool:
        """There is a reason to look into the inbox."""
        return bool(self._arrivals or self._aborts or self._closing)

    def _gathered(self) -> bool:
        """There is nothing more to wait for before the first step."""
        return len(self._arrivals) >= self.options.max_batch_size or bool(self._aborts or self._closing)

    def _tell(self, callback: Callable[[T], None], argument: T) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:  # the loop has closed under us: nobody is left to tell
            self._closing = True


class Session:
    """A conversation's access to the engine: its requests share prefix blocks, and its share of the room, with those of the same salt."""

    def __init__(self, batcher: Batcher, salt: bytes) -> None:
        self._batcher = batcher
        self._salt = salt
        self._admitted = False  # it holds a place for its next request

    def admit(self, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse now what could not run; else hold a place for it until `generate` or `leave`.

        Raises: NotReadyError, RequestError, BusyError
        """
        assert not self._admitted, "expected generate or leave after what was admitted before"
        self._batcher.check(ids, sampling)
        self._batcher._room.enter(self._salt, time.monotonic())
        self._admitted = True

    async def compile(self, grammar: Grammar) -> None:
        """Find out, off the event loop, whether a reply can be held to `grammar`; `generate` with it then begins at once. Owners take
        turns.

        Raises: NotReadyError, RequestError
        """
        await self._batcher._compiled_for(self._salt, grammar)

    def leave(self) -> None:
        """What was admitted will not come: give its place back."""
        if self._admitted:
            self._admitted = False
            self._batcher._room.leave(self._salt, time.monotonic())

    def generate(self, ids: list[int], sampling: SamplingParams, background: bool = False) -> Generation:
        """Queue a prompt, admitted before or now. Interactive ones go before those in the background.

        Raises: NotReadyError, RequestError, BusyError
        """
        if not self._admitted:
            self.admit(ids, sampling)
        try:
            generation = self._batcher._submit(ids, self._salt, sampling, background)
        except BaseException:
            self.leave()
            raise
        self._admitted = False  # the generation gives the place back
        return generation


class Generation:
    """One reply in the making: an async iterator of deltas, the last of which has `finish` set."""

    def __init__(self, batcher: Batcher, sequence: core.Sequence) -> None:
        self._batcher = batcher
        self.sequence = sequence
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()  # bounded by the request's max_tokens
        self._finished = False

    @property
    def id(self) -> int:
        return self.sequence.id

    def cancel(self) -> None:
        """Ask for the end; the last delta still comes, with what was generated until then."""
        if not self._finished:
            self._batcher._abort(self.sequence)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            delta = await self._deltas.get()
            yield delta
            if delta.finish:
                return

    def _receive(self, delta: Delta) -> None:
        if delta.finish:
            self._finished = True
            self._batcher._end(self)
        self._deltas.put_nowait(delta)
