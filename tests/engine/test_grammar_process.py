"""Whatever a grammar does, and whatever is done to the processes that follow it: the server and everybody else go on."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import grammar_bounds, grammar_client, grammar_guides
from engine.core import EngineError, FinishReason, Grammar, RequestError
from engine.engine import Engine
from engine.grammar import Compiled, Grammars
from engine.grammar_client import Channel, Ended, Forked, Keeper, Late, Patience
from engine.grammar_guides import Guides
from engine.grammar_library import Replies
from engine.grammar_wire import Answer, Compile, Fork, Go, Step
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import Checkpoint
from tests.engine.guiding import Walk
from tests.engine.hostile_grammars import LINKS, chain
from tests.engine.test_engine import ids_of, run
from tests.engine.test_grammar import LARK, REGEX, crowd, guided, until
from tests.engine.test_grammar_hostile import beside

NewEngine = Callable[..., Engine]

SPINNING = Grammar("json_schema", '{"type": "integer", "multipleOf": 12345678}')
HUNGRY = Grammar("json_schema", json.dumps(beside(24, "anyOf")))
MUCH = "expected a JSON schema that replies can be held to: it takes more than .* MiB of memory or .* seconds"


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had thought of them."""
    for name in ("check_size", "check_schema", "check_expression", "check_lark"):
        monkeypatch.setattr(grammar_bounds, name, lambda _: None)


@pytest.fixture
def grammars(tiny_checkpoint: Checkpoint) -> Iterator[Grammars]:
    made = Grammars(Tokenizer(tiny_checkpoint.tokenizer_path, tiny_checkpoint.eos_ids), 300, tiny_checkpoint.eos_ids)
    yield made
    made.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Role and id of each process, as they begin."""
    found: list[tuple[str, int]] = []
    fork = Keeper.fork

    def watched(keeper: Keeper, asked: Fork, descriptors: Any, patience: Patience) -> Forked:
        made = fork(keeper, asked, descriptors, patience)
        found.append((asked.role, made.pid))
        return made

    monkeypatch.setattr(Keeper, "fork", watched)
    return found


def masks_of(grammars: Grammars) -> int:
    """The id of the process that works out masks."""
    assert grammars.processes.existing
    return grammars.processes.existing.forked.pid


def keeper_of(grammars: Grammars) -> int:
    assert grammars._keeper._process
    return grammars._keeper._process.pid


def gone(pid: int) -> bool:
    """Not even as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def over(pid: int) -> bool:
    """Gone, or a zombie that is somebody else's to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def computed(pid: int) -> float:
    """Seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Compiling:
    """A grammar being compiled in a thread of its own."""

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self.said = ""
        self._thread = threading.Thread(target=self._run, args=(grammars, grammar))
        self._thread.start()

    def _run(self, grammars: Grammars, grammar: Grammar) -> None:
        try:
            grammars.compiled(grammar)
        except (RequestError, EngineError) as refused:
            self.said = str(refused)

    @property
    def going_on(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> str:
        self._thread.join(60)
        assert not self.going_on
        return self.said


# Grammars


@pytest.mark.parametrize("grammar", [HUNGRY, SPINNING], ids=["memory", "time"])
def test_a_grammar_that_takes_too_much_is_refused_alone(
    grammars: Grammars, unbounded: None, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_client, "TRIAL_SECONDS", 2 if grammar is SPINNING else 60)
    monkeypatch.setattr(grammar_client, "TRIAL_BYTES", 64 * 1024 * 1024)
    walk = Walk(Guides(grammars), grammars.compiled(LARK))
    process, keeper, before = masks_of(grammars), keeper_of(grammars), resident()
    first = walk.allowed()
    with pytest.raises(RequestError, match=MUCH) as refused:
        grammars.compiled(grammar)
    assert (refused.value.param, refused.value.code) == ("grammar", "invalid_grammar")
    walk.take(first[0])
    assert walk.allowed()
    grammars.compiled(REGEX)
    assert (masks_of(grammars), keeper_of(grammars)) == (process, keeper)
    assert resident() - before < 20 * 1024 * 1024
    assert grammars.known(grammar) is None


def test_references_without_measure_do_not_end_anything(grammars: Grammars, unbounded: None) -> None:
    grammars.compiled(Grammar("json_schema", chain(1000, LINKS["a reference"])))
    with pytest.raises(RequestError, match=r"too (big|large)"):
        grammars.compiled(Grammar("json_schema", chain(50_000, LINKS["items"])))


def test_nobody_waits_for_a_grammar_that_takes_long(
    grammars: Grammars, unbounded: None, forked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose trial is killed, or crashes, is refused, the next is not."""
    monkeypatch.setattr("engine.grammar.REFUSED_SECONDS", 0.0)
    for how in (signal.SIGKILL, signal.SIGSEGV):
        forked.clear()
        spinning = Compiling(grammars, SPINNING)
        until(lambda: forked)
        trial = forked[0][1]
        grammars.compiled(Grammar("regex", f"meanwhile {how}"))
        assert spinning.going_on
        os.kill(trial, how)
        assert "it takes more than" in spinning.result()
        assert gone(trial)
        grammars.compiled(Grammar("regex", f"afterwards {how}"))


def test_who_is_tried_out_when_the_keeper_is_killed_is_tried_again(
    grammars: Grammars, unbounded: None, forked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_client, "TRIAL_SECONDS", 1000)
    spinning = Compiling(grammars, SPINNING)
    until(lambda: forked and computed(forked[0][1]) > 0.1)
    keeper = keeper_of(grammars)
    os.kill(forked[0][1], signal.SIGSTOP)  # it does not end by itself
    os.kill(keeper, signal.SIGKILL)
    until(lambda: len(forked) == 2)
    assert gone(keeper)
    until(lambda: over(forked[0][1]))
    assert keeper_of(grammars) != keeper
    os.kill(forked[1][1], signal.SIGKILL)
    assert "it takes more than" in spinning.result()
    os.kill(keeper_of(grammars), signal.SIGKILL)
    assert grammars.compiled(REGEX)


def test_what_is_compiled_when_the_masks_process_is_killed_is_compiled_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    send, killed = Channel.send, []

    def killing(channel: Channel, message: Any, patience: Patience) -> None:
        process = grammars.processes.existing
        if process and channel is process.compiling and not killed:
            killed.append(process.forked.pid)
            os.kill(process.forked.pid, signal.SIGKILL)
        send(channel, message, patience)

    monkeypatch.setattr(Channel, "send", killing)
    walk = Walk(Guides(grammars), grammars.compiled(REGEX))
    assert walk.allowed()
    assert killed
    assert masks_of(grammars) != killed[0]


# Replies


def disturbed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], None], steps: set[int], place: str = "forward"
) -> dict[int, list[int]]:
    """What a crowd says when something happens in some of the steps: while masks are worked out, or before tokens are taken."""
    owner: Any = engine.runner.decoder if place == "forward" else engine.guides
    real, ran = getattr(owner, place), []

    def watched(*given: Any) -> Any:
        ran.append(given)
        if len(ran) in steps:
            disturb()
        return real(*given)

    monkeypatch.setattr(owner, place, watched)
    return {id: ids_of(deltas) for id, deltas in run(engine, {0: crowd(0)}).items()}


@pytest.fixture
def undisturbed(quantised: Checkpoint, new_engine: NewEngine) -> dict[int, list[int]]:
    return {id: ids_of(deltas) for id, deltas in run(new_engine(quantised), {0: crowd(0)}).items()}


@pytest.mark.parametrize("place", ["forward", "take"])
@pytest.mark.parametrize("victim", [masks_of, keeper_of], ids=["masks", "keeper"])
def test_replies_go_on_as_they_would_have_when_processes_are_killed(
    quantised: Checkpoint,
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[int, list[int]],
    victim: Callable[[Grammars], int],
    place: str,
) -> None:
    """Those with a grammar, and those beside them."""
    engine = new_engine(quantised)
    pids: list[int] = []

    def kill() -> None:
        masks = masks_of(engine.grammars)
        pids.append(victim(engine.grammars))
        os.kill(pids[-1], signal.SIGKILL)
        until(lambda: over(masks))

    assert disturbed(engine, monkeypatch, kill, {1, 4, 9, 10}, place) == undisturbed
    assert len(set(pids)) == 4
    engine.close()


@pytest.mark.parametrize(("place", "replies"), [("take", 0), ("forward", 1)], ids=["idle", "at work"])
def test_a_process_that_stands_still_costs_no_more_than_the_reply_it_worked_for(
    quantised: Checkpoint,
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[int, list[int]],
    place: str,
    replies: int,
) -> None:
    monkeypatch.setattr(grammar_guides, "ANSWER_SECONDS", 0.3)
    engine = new_engine(quantised)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(masks_of(engine.grammars))
        os.kill(stopped[0], signal.SIGSTOP)

    said = disturbed(engine, monkeypatch, stop, {4}, place)
    assert sum(said[id] != undisturbed[id] for id in said) <= replies
    assert gone(stopped[0])
    engine.close()


@pytest.mark.parametrize(("grammar", "says"), [(SPINNING, "took longer than"), (HUNGRY, "what followed it ended")], ids=["time", "memory"])
def test_a_reply_whose_grammar_ends_the_process_ends_alone(
    quantised: Checkpoint,
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[int, list[int]],
    grammar: Grammar,
    says: str,
) -> None:
    """As if it had not been tried out."""
    if grammar is HUNGRY:
        monkeypatch.setattr(grammar_client, "MASKS_BYTES", 64 * 1024 * 1024)
    monkeypatch.setattr(grammar_guides, "ANSWER_SECONDS", 1.0 if grammar is SPINNING else 60.0)
    monkeypatch.setattr(grammar_guides, "STEP_SECONDS", 120.0)
    engine = new_engine(quantised)
    bad = guided(8, grammar)
    bad.compiled = Compiled(10**6, (grammar.kind, grammar.source))
    before = resident()
    replies = run(engine, {0: crowd(0), 3: [bad]})
    assert replies[8][-1].finish is FinishReason.ERROR
    assert re.search(f"could not be held to its grammar: .*{says}", str(replies[8][-1].error))
    assert {id: ids_of(replies[id]) for id in range(8)} == undisturbed
    assert resident() - before < 50 * 1024 * 1024
    assert len(engine.guides) == 0
    engine.close()


def test_masks_that_are_awaited_of_a_process_that_others_replaced_come_from_its_successor(grammars: Grammars) -> None:
    guides = Guides(grammars)
    compiled = grammars.compiled(REGEX)
    walks = [Walk(guides, compiled) for _ in range(3)]
    first = walks[0].allowed()
    waiting = guides.asked([walks[1].guide])
    os.kill(masks_of(grammars), signal.SIGKILL)
    grammars.compiled(LARK)  # sees its end, and has another begun
    assert walks[2].allowed() == first
    assert [np.flatnonzero(~mask).tolist() for mask in waiting() if mask is not None] == [first]
    for walk in walks:
        walk.take(first[0])
    assert walks[0].allowed() == walks[1].allowed() == walks[2].allowed()


def test_a_step_waits_only_so_long_whatever_happens(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process there is answers, one after the other, and then there is none any more."""
    monkeypatch.setattr(grammar_guides, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(grammar_guides, "STEP_SECONDS", 1.0)
    guides = Guides(grammars)
    begun = [guides.begin(grammars.compiled(REGEX)) for _ in range(10)]
    monkeypatch.setattr(Channel, "send", lambda channel, message, patience: None)
    clock = time.monotonic()
    assert guides.asked([*begun])() == [None] * 10
    assert time.monotonic() - clock < 10, "each for itself would take 4"
    assert all("it took longer than" in guide.fault for guide in begun)
    monkeypatch.undo()
    grammars.close()
    late = guides.begin(Compiled(10**6, ("regex", "a")))
    assert guides.asked([late])() == [None]
    assert late.fault


def test_steps_without_grammars_ask_nobody(tiny_checkpoint: Checkpoint, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(tiny_checkpoint)
    monkeypatch.setattr(Channel, "send", None)
    free = [sequence for sequence in crowd(0) if not sequence.sampling.grammar]
    assert len(run(engine, {0: free})) == len(free)
    assert engine.grammars._keeper._process is None


def test_many_tokens_are_one_message(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a reply goes on that was begun elsewhere."""
    guides = Guides(grammars)
    compiled = grammars.compiled(Grammar("regex", "[a-f]{60}"))
    step, chance = Walk(guides, compiled), np.random.default_rng(0)
    tokens: list[int] = []
    for _ in range(20):
        tokens.append(int(chance.choice(step.allowed())))
        step.take(tokens[-1])
    sent: list[Any] = []
    send = Channel.send
    monkeypatch.setattr(Channel, "send", lambda channel, message, patience: (sent.append(message), send(channel, message, patience)))
    once = Walk(guides, compiled)
    once.take(*tokens)
    assert once.allowed() == step.allowed()
    assert len(sent) == 1


def test_a_replys_end_is_known_when_its_tokens_are_taken(grammars: Grammars) -> None:
    walk = Walk(Guides(grammars), grammars.compiled(Grammar("regex", "h")))
    walk.take(*walk.allowed())
    assert walk.done
    assert not walk.fault
    assert walk.mask() is None


def test_what_nobody_asks_for_is_forgotten_there_too(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    guides = Guides(grammars)
    walk = Walk(guides, grammars.compiled(Grammar("regex", "short")))
    assert walk.allowed()
    key, process = walk.guide.compiled.key, grammars.processes.existing
    assert process
    sent: list[Any] = []
    send = Channel.send
    monkeypatch.setattr(Channel, "send", lambda channel, message, patience: (sent.append(message), send(channel, message, patience)))
    id = walk.guide.id
    guides.end(walk.guide)
    del walk
    grammars._kept.clear()
    gc.collect()
    assert Walk(guides, grammars.compiled(REGEX)).allowed()
    assert [message.ended for message in sent if isinstance(message, Step)] == [[id], []]
    assert [message.forgotten for message in sent if isinstance(message, Compile)] == [[key]], "also if nobody begins a reply any more"
    assert key not in process.known


def test_memory_for_masks_is_used_again(grammars: Grammars) -> None:
    guides, compiled = Guides(grammars), grammars.compiled(REGEX)
    for _ in range(50):
        walks = [Walk(guides, compiled) for _ in range(3)]
        for walk in walks:
            guides.end(walk.guide)
    assert len(grammars.rows) == 16


def test_the_processes_get_no_signal_of_the_terminals_and_leave_no_core(grammars: Grammars) -> None:
    assert Walk(Guides(grammars), grammars.compiled(REGEX)).allowed()
    assert os.getsid(keeper_of(grammars)) == keeper_of(grammars)
    (core,) = [line for line in Path(f"/proc/{masks_of(grammars)}/limits").read_text().splitlines() if line.startswith("Max core")]
    assert core.split()[4:6] == ["0", "0"]


class Panic(BaseException):
    """As the library's own."""


@pytest.mark.parametrize("where", ["deep_copy", "compute_bitmask", "consume_token"])
def test_a_panic_in_the_library_is_one_replys_alone(where: str) -> None:
    class Matcher:
        def __init__(self, panics: bool) -> None:
            self.panics = panics

        def _may(self, name: str) -> None:
            if self.panics and name == where:
                raise Panic("out of bounds")

        def deep_copy(self) -> Matcher:
            self._may("deep_copy")
            return self

        def compute_bitmask(self) -> bytes:
            self._may("compute_bitmask")
            return b"\x05"

        def consume_token(self, token: int) -> bool:
            self._may("consume_token")
            return True

        def is_stopped(self) -> bool:
            return False

        def is_error(self) -> bool:
            return False

    class Library:
        def matcher(self, grammar: Grammar) -> Matcher:
            return Matcher(grammar.source == "bad")

    rows = np.zeros((2, 8), np.bool_)
    replies = Replies(Library(), lambda at: rows[at])  # type: ignore[arg-type]
    goes = [Go(at, at, [3], at, ("regex", source)) for at, source in enumerate(("bad", "good"))]
    answers = [answer for go in goes for answer in (replies.take(go), replies.mask(go))]
    faults = {answer.fault for answer in answers[:2]}
    assert "Panic: out of bounds" in faults
    assert answers[2:] == [Answer(), Answer()]
    assert np.flatnonzero(~rows[1]).tolist() == [0, 2]


# Processes


def test_nothing_is_left_when_the_engine_is_closed(
    tiny_checkpoint: Checkpoint, new_engine: NewEngine, unbounded: None, forked: list[tuple[str, int]]
) -> None:
    engine = new_engine(tiny_checkpoint)
    run(engine, {0: crowd(0)})
    spinning = Compiling(engine.grammars, SPINNING)
    until(lambda: forked[-1][0] == "trial" and not gone(forked[-1][1]))
    pids = [keeper_of(engine.grammars), *(pid for _, pid in forked)]
    assert [role for role, pid in forked if not gone(pid)].count("masks") == 1
    engine.close()
    assert all(map(gone, pids))
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)
    assert spinning.result() == grammar_client.NOT_STARTED
    assert len(forked) == len(pids) - 1, "and none comes after"


def test_what_an_engine_leaves_behind_ends_with_it(tiny_checkpoint: Checkpoint) -> None:
    made = Grammars(Tokenizer(tiny_checkpoint.tokenizer_path, tiny_checkpoint.eos_ids), 300, tiny_checkpoint.eos_ids)
    made.compiled(REGEX)
    pids = [keeper_of(made), masks_of(made)]
    del made
    gc.collect()
    assert all(map(gone, pids))


def test_the_processes_end_with_the_server_however_it_ends(tiny_checkpoint: Checkpoint) -> None:
    """Even one that is in the middle of a grammar without end."""
    code = f"""
import sys, threading
from engine import grammar_bounds, grammar_client
from engine.core import Grammar
from engine.grammar import Grammars
from engine.tokenizer import Tokenizer
from engine.grammar_client import Keeper
grammar_bounds.check_schema = lambda source: None
grammar_client.TRIAL_SECONDS = 1000
fork = Keeper.fork
def watched(*given):
    made = fork(*given)
    print(made.pid, flush=True)
    return made
Keeper.fork = watched
made = Grammars(Tokenizer({str(tiny_checkpoint.tokenizer_path)!r}, {list(tiny_checkpoint.eos_ids)}), 300, {list(tiny_checkpoint.eos_ids)})
made.compiled(Grammar("regex", "a"))
print(made._keeper._process.pid, flush=True)
made.compiled(Grammar("json_schema", {SPINNING.source!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        pids = [int(server.stdout.readline()) for _ in range(4)]  # a trial, the masks, the keeper, another trial
        assert not any(map(over, pids[1:]))
        server.kill()
        server.wait()
        until(lambda: all(map(over, pids)))


def test_the_server_knows_no_library_of_grammars_and_they_know_no_models() -> None:
    for module, others in (("engine.engine", {"llguidance"}), ("engine.grammar_process", {"torch", "numba", "transformers"})):
        code = f"import sys, {module}; sys.exit(bool({others} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0, module


def test_patience_is_spent_by_waiting_alone() -> None:
    """Not by the clock: where everything stood still, nobody is late."""
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        patience = Patience(0.2)
        time.sleep(0.3)
        theirs.sendall(b"x")
        assert patience.wait(ours, 1)
        ours.recv(1)
        whole = Patience(0.1)
        with pytest.raises(Late):
            Patience(10, whole).wait(ours, 1)
        assert whole.over


def test_large_messages_pass_while_answers_come() -> None:
    """Neither end waits for the other to read first."""
    import socket

    from engine.grammar_wire import Line

    ours, theirs = socket.socketpair()
    channel, count = Channel(ours), 3000

    def answer() -> None:
        line = Line(theirs)
        for _ in range(count):
            line.send(Answer("x" * 200))
        while step := line.receive(Step):
            line.send(Answer(str(len(step.goes))))

    thread = threading.Thread(target=answer)
    thread.start()
    channel.send(Step([Go(at, at, [7] * 50) for at in range(20_000)], []), Patience(30))
    answers = [channel.receive(Answer, Patience(30)).fault for _ in range(count + 1)]
    assert answers == ["x" * 200] * count + ["20000"]
    ours.shutdown(socket.SHUT_RDWR)
    thread.join()
    theirs.close()
    with pytest.raises(Ended):
        channel.receive(Answer, Patience(1))
