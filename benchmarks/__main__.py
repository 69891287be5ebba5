"""`make bench`: Hocket and its peers under the same load, on this machine.

Plays conversations of several turns, lone streams and long prompts against each server in turn (A B A B ...), and prints a Markdown table
of what each gave, with the ratio of Hocket to the best peer of each line and its spread; then how true each server's greedy replies, and
the distributions of Hocket's own kernels, are to the model in float32. benchmarks/peers.md says how peers are installed and started.

  make bench                                                      Hocket alone
  make bench ARGS="--quick"                                       in seconds, to see that it works
  make bench ARGS="--peer llama.cpp=http://127.0.0.1:8080"        against a server that runs
  make bench ARGS="--peer-command 'llama.cpp=llama-server -m model.gguf --port {port}'"
  make bench ARGS="claims"                                        the well-known claims, on Hocket's own engine
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
from app.settings import load
from benchmarks import claims, fidelity, machine, servers
from benchmarks.load import Load, LoadError, Result, Turn, run
from benchmarks.servers import Contender
from benchmarks.table import table
from benchmarks.works import Sample, Work, detail, works
from engine.weights.convert import prepare

WARM = Load(conversations=2, reply_tokens=8, seed="warm")
REPLY_TOKENS = 64  # of the replies whose fidelity is told


def main() -> None:
    if sys.argv[1:2] == ["claims"]:
        claims.main(sys.argv[2:])
        return
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers it has started end too
    known = [work.name for work in works(asked.quick)]
    chosen = [work for work in works(asked.quick) if not asked.work or work.name in asked.work]
    try:
        peers, commands = ([_named(peer, known) for peer in given] for given in (asked.peer, asked.peer_command))
        _check_works(asked.work, known)
        with contextlib.ExitStack() as stack:
            here = machine.measure()
            print(f"{here}\n", flush=True)
            flags = shlex.split(asked.flags)
            if asked.steps and not asked.url and load(flags, "hocket serve").kernels == "cpu":
                subprocess.run([sys.executable, "-m", "benchmarks.steps", *flags], check=True)
            contenders = [_ready(stack.enter_context(servers.hocket(asked.url, flags, asked.protocol)))]
            contenders += [_ready(stack.enter_context(servers.running(*peer))) for peer in peers]
            contenders += [_ready(stack.enter_context(servers.started(*command))) for command in commands]
            rounds = asked.rounds or (1 if asked.quick else 3)
            samples = measure(contenders, chosen, rounds)
            print(f"\n{table(samples, chosen, [each.name for each in contenders])}\n", flush=True)
            if asked.fidelity:
                faith(contenders, flags, kernels=not asked.url)
    except LoadError as fault:
        sys.exit(f"hocket bench: {fault}")


def measure(contenders: list[Contender], chosen: list[Work], rounds: int) -> dict[tuple[str, str], list[Sample]]:
    """Each work in turn, each round of it with one server after the other."""
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for work in chosen:
        for number in range(rounds):
            for contender in contenders:
                if contender.works and work.name not in contender.works:
                    continue
                with contender.turn(), _blamed(contender):
                    results = [_run(contender, each) for each in work.loads(number)]
                    sample = Sample(results, contender.memory())
                samples[work.name, contender.name].append(sample)
                shown = "; ".join(f"{figure.title}: {figure.of(sample)}" for figure in work.figures)
                print(f"{contender.name}: {shown} [{detail(sample)}]", flush=True)
    return samples


def faith(contenders: list[Contender], flags: list[str], kernels: bool) -> None:
    """How true each server is to float32. The model is Hocket's default one, or the one its flags name."""
    settings = load(flags, "hocket serve")
    checkpoint = prepare(settings.model, settings.cache_dir)
    reference = fidelity.Reference(checkpoint)
    expected = reference.greedy(fidelity.QUESTIONS, REPLY_TOKENS)
    print("| greedy replies against float32 | tokens before the first that differs |\n| --- | --- |")
    for contender in contenders:
        with contender.turn(), _blamed(contender):
            print(f"| {contender.name} | {fidelity.agreement(expected, asyncio.run(_replies(contender)))} |", flush=True)
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


def _ready(contender: Contender) -> Contender:
    """Warm and idle: it has compiled what it compiles, and costs the others nothing."""
    with _blamed(contender):
        _run(contender, WARM)
    share = contender.watch_idle()
    idle = "" if share is None else f", {share:.1%} of a core when idle"
    print(f"{contender.name} is ready{idle}", flush=True)
    return contender


def _run(contender: Contender, asked: Load) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(contender.client, asked))


@contextlib.contextmanager
def _blamed(contender: Contender) -> Iterator[None]:
    """Whatever goes wrong under a load, say with whom."""
    try:
        yield
    except* (LoadError, OSError) as faults:
        raise LoadError(f"{contender.name}: {_first(faults)}") from faults


def _first(faults: BaseExceptionGroup[BaseException]) -> BaseException:
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
