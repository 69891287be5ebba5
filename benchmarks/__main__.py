"""`make bench`: Hocket and its peers under the same load, on this machine.

Prints what a step of Hocket's costs inside, stage by stage and as a whole. Then plays conversations of several turns, lone streams and long
prompts against each server in turn (A B A B ...), and prints a Markdown table of what each gave, with the ratio of Hocket to the best peer
of each line and its spread; then how true each server's greedy replies, and the distributions of Hocket's own kernels, are to the model in
float32. A server that fails loses its own figures only. benchmarks/peers.md says how peers are installed and started.

  make bench                                                      Hocket alone
  make bench ARGS="--quick"                                       in seconds, to see that it works
  make bench ARGS="--peer llama.cpp=http://127.0.0.1:8080"        against a server that runs
  make bench ARGS="--peer-command 'llama.cpp=llama-server -m model.gguf --port {port}'"
  make bench ARGS="claims"                                        the well-known claims, on Hocket's own engine
  make bench ARGS="simulate --help"                               thousands of conversations, replayed by a clock of its own
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import uvloop

from app.server import engine_options
from app.settings import Settings, SettingsError, load
from benchmarks import claims, fidelity, machine, servers, simulate
from benchmarks.load import Load, LoadError, Result, Turn, run
from benchmarks.servers import Contender
from benchmarks.table import table
from benchmarks.works import Sample, Work, detail, works
from engine.weights.convert import prepare

HOCKET = "Hocket"  # what `servers` call it
WARM = Load(conversations=2, reply_tokens=8, seed="warm")
MISUSED = 2  # the exit code for arguments that cannot be meant, as argparse has it
REPLY_TOKENS = 64  # of the replies whose fidelity is told


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers it has started end too
    try:
        if sys.argv[1:2] == ["claims"]:
            claims.main(sys.argv[2:])
        elif sys.argv[1:2] == ["simulate"]:
            simulate.main(sys.argv[2:])
        else:
            bench(_arguments())
    except SettingsError as fault:
        said = str(fault).replace("\n", "; ")
        sys.stderr.write(f"hocket bench: {said}; hocket serve --help lists its flags\n")
        sys.exit(MISUSED)
    except LoadError as fault:
        sys.exit(f"hocket bench: {fault}")


def bench(asked: argparse.Namespace) -> None:
    """Who fails is told and left out of what it failed in; the others' figures are printed all the same.

    Raises: SettingsError; LoadError at the end if anyone failed, at once if Hocket does not start or it is unclear what is asked
    """
    flags = _words(asked.flags)
    settings = load(flags, "hocket serve")
    known = [work.name for work in works(asked.quick)]
    _check_works(asked.work, known)
    chosen = [work for work in works(asked.quick) if not asked.work or work.name in asked.work]
    peers, commands = ([_named(peer, known) for peer in given] for given in (asked.peer, asked.peer_command))
    _check_names([name for name, _, _ in peers + commands])
    failures = Failures()
    with contextlib.ExitStack() as stack:
        print(f"{machine.measure()}\n", flush=True)
        if asked.steps and not asked.url and settings.kernels == "cpu":
            inside(flags, asked.quick, failures)
        contenders: list[Contender] = []
        with failures.of(HOCKET):
            contenders.append(_entered(stack, servers.hocket(asked.url, flags, asked.protocol)))
        if not contenders:
            raise LoadError(failures.told[-1])
        for start, given in ((servers.running, peers), (servers.started, commands)):
            for name, where, part in given:
                with failures.of(name):
                    contenders.append(_entered(stack, start(name, where, part)))
        samples = measure(contenders, chosen, asked.rounds or (1 if asked.quick else 3), failures)
        print(f"\n{table(samples, chosen, [each.name for each in contenders])}\n", flush=True)
        if asked.fidelity:
            faith(contenders, settings, kernels=not asked.url, failures=failures)
    if failures.told:
        raise LoadError("\n".join(failures.told))


class Failures:
    """What went wrong with whom. A server may fail in any way, and the work of an hour is not to be lost by it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Whatever goes wrong in here is `name`'s fault, and ends no more than this."""
        try:
            yield
        except* Exception as faults:
            fault = _first(faults)
            said = str(fault) if isinstance(fault, (LoadError, OSError)) else f"{type(fault).__name__}: {fault}"
            self.told.append(f"{name} failed: {said.removeprefix(f'{name}: ')}")
            print(self.told[-1], flush=True)


def inside(flags: list[str], quick: bool, failures: Failures) -> None:
    """What a step costs inside, measured in processes of their own: the one that computes has OpenMP's threads."""
    for name, first in (("stages", []), ("steps", ["--quick"] if quick else [])):
        with failures.of(f"benchmarks.{name}"):
            code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *first, *flags]).returncode
            print(flush=True)
            if code:
                raise LoadError(f"expected exit code 0, got {code}")


def measure(contenders: list[Contender], chosen: list[Work], rounds: int, failures: Failures) -> dict[tuple[str, str], list[Sample]]:
    """Each work in turn, each round of it with one server after the other. Who fails in a round has no sample of that work."""
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for work in chosen:
        able = [contender for contender in contenders if not contender.works or work.name in contender.works]
        for number in range(rounds):
            for contender in list(able):
                with failures.of(contender.name), contender.turn():
                    results = [_run(contender, each) for each in work.loads(number)]
                    sample = Sample(results, contender.memory())
                    shown = "; ".join(f"{figure.title}: {figure.of(sample)}" for figure in work.figures)
                    print(f"{contender.name}: {shown} [{detail(sample)}]", flush=True)
                    samples[work.name, contender.name].append(sample)
                    continue
                able.remove(contender)  # it failed
                samples.pop((work.name, contender.name), None)
    return samples


def faith(contenders: list[Contender], settings: Settings, kernels: bool, failures: Failures) -> None:
    """How true each server is to float32. The model is Hocket's default one, or the one its flags name."""
    checkpoint = prepare(settings.model, settings.cache_dir)
    reference = fidelity.Reference(checkpoint)
    expected = reference.greedy(fidelity.QUESTIONS, REPLY_TOKENS)
    lines = ["| greedy replies against float32 | tokens before the first that differs |", "| --- | --- |"]
    for contender in contenders:
        with failures.of(contender.name), contender.turn():
            lines.append(f"| {contender.name} | {fidelity.agreement(expected, asyncio.run(_replies(contender)))} |")
    print("\n".join(lines), flush=True)
    if kernels:
        print(f"\n{fidelity.kernels(reference, checkpoint, engine_options(settings))}")


async def _replies(contender: Contender) -> list[str]:
    """One after the other, so that no server's batch changes them."""
    replies = []
    for question in fidelity.QUESTIONS:
        client, turn = contender.client(), Turn(0, 0.0)
        await client.ask(question, REPLY_TOKENS, turn)
        await client.close()
        replies.append(turn.text)
    return replies


def _entered(stack: contextlib.ExitStack, server: contextlib.AbstractContextManager[Contender]) -> Contender:
    """Warm and idle: it has compiled what it compiles, and costs the others nothing. It ends with `stack`; at once if it fails in this."""
    with contextlib.ExitStack() as own:
        contender = own.enter_context(server)
        _run(contender, WARM)
        share = contender.watch_idle()
        idle = "" if share is None else f", {share:.1%} of a core when idle"
        print(f"{contender.name} is ready{idle}", flush=True)
        stack.enter_context(own.pop_all())
    return contender


def _run(contender: Contender, asked: Load) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(contender.client, asked))


def _first(faults: BaseExceptionGroup[BaseException]) -> BaseException:
    """What came first, out of the groups that tasks put it in."""
    fault = faults.exceptions[0]
    return _first(fault) if isinstance(fault, BaseExceptionGroup) else fault


def _named(peer: str, known: list[str]) -> tuple[str, str, list[str]]:
    """Its name, what follows the first =, and the works it takes part in (none: all)."""
    front, _, rest = peer.partition("=")
    name, _, listed = front.partition("@")
    if not name or not rest:
        raise LoadError(f"expected a peer as NAME=URL or NAME=COMMAND, got {peer!r}")
    chosen = [work for work in listed.split(",") if work]
    _check_works(chosen, known)
    return name, rest, chosen


def _words(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as fault:
        raise SettingsError(f"expected flags as a shell takes them, got {flags!r}: {fault}") from None


def _check_names(peers: list[str]) -> None:
    names = [HOCKET, *peers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LoadError(f"expected each server under a name of its own, got several called {', '.join(twice)}")


def _check_works(chosen: list[str], known: list[str]) -> None:
    if unknown := [work for work in chosen if work not in known]:
        raise LoadError(f"expected works of {', '.join(known)}, got {', '.join(unknown)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hocket bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of small loads")
    parser.add_argument("--rounds", type=int, default=0, help="rounds in turn (default: 3)")
    parser.add_argument("--work", action="append", default=[], metavar="NAME", help="measure this work only; may be given several times")
    parser.add_argument("--url", help="a running Hocket; else one is started")
    parser.add_argument("--flags", default="", metavar="FLAGS", help="flags of `hocket serve` for the Hocket that is started")
    parser.add_argument("--protocol", choices=("chat", "responses"), default="chat", help="how Hocket is asked (default: chat)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[@WORK,...]=URL",
        help="a running OpenAI-compatible server; with works named, it takes part in those only",
    )
    parser.add_argument(
        "--peer-command",
        action="append",
        default=[],
        metavar="NAME[@WORK,...]=COMMAND",
        help="a server to start; {port} is the port it is to listen on",
    )
    parser.add_argument("--no-fidelity", dest="fidelity", action="store_false", help="leave out how true replies are to float32")
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="leave out what a step costs inside")
    return parser.parse_args()


if __name__ == "__main__":
    main()
