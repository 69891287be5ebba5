"""The command: its own arguments, and what becomes of the others when a server fails."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.settings import load
from benchmarks import __main__ as command
from benchmarks import fidelity, machine, processes, servers
from benchmarks.__main__ import Failures, _named, faith, inside
from benchmarks.load import LoadError, Turn

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ["short", "long"]
SCRIPTED = f"{sys.executable} -m tests.benchmarks.scripted {{port}}"
BEFORE_SHORT = 1 + 2 + 2 * 8  # chats: until it answers at all, to warm up, and two rounds of the first work


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """The command with these arguments; the machine is not measured, and who is idle is believed to be."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(machine, "measure", lambda: machine.Machine("a processor", 2, 20e9))
    monkeypatch.setattr(processes, "idle_share", lambda pid: 0.0)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["hocket bench", *arguments])
        command.main()

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_a_peer_is_a_name_perhaps_works_and_a_url_or_command() -> None:
    assert _named("llama.cpp=http://127.0.0.1:8080", KNOWN) == ("llama.cpp", "http://127.0.0.1:8080", [])
    assert _named("a b@long,short=run --set x=1@2 {port}", KNOWN) == ("a b", "run --set x=1@2 {port}", ["long", "short"])


@pytest.mark.parametrize(
    ("peer", "said"),
    [("http://127.0.0.1:8080", "NAME=URL"), ("=x", "NAME=URL"), ("x=", "NAME=URL"), ("x@tall=y", "works of short, long, got tall")],
)
def test_a_peer_that_cannot_be_meant_is_refused(peer: str, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        _named(peer, KNOWN)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--flags", "--bad 1"], "unrecognized arguments: --bad 1"),
        (["--flags", "--block-size 5"], "expected a block_size that is a multiple of 16, got 5"),
        (["--flags", "--max-batch-size x --block-size y"], "max_batch_size: .*; block_size: "),
        (["--flags", "--model 'a"], 'expected flags as a shell takes them, got "--model \'a": No closing quotation'),
        (["claims", "--bad", "1"], "unrecognized arguments: --bad 1"),
    ],
)
def test_flags_that_cannot_be_meant_end_in_one_line_before_anything_is_measured(
    bench: Callable[..., None], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(*arguments)
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("hocket bench: ")
    assert re.search(said, line), line


def test_two_servers_of_one_name_are_refused(bench: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="a name of its own, got several called a, b"):
        bench("--peer", "a=x", "--peer", "b=x", "--peer-command", "b=x", "--peer-command", "a=x", "--peer-command", "c=x")


def test_a_peer_that_fails_loses_nothing_but_its_own_figures(bench: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    peers = [
        "absent=/no/such/server {port}",
        f"ends={sys.executable} -c 'raise SystemExit(7)'",
        f"crashes={SCRIPTED} {BEFORE_SHORT + 4}",  # in the second round of the second work
        f"fails at once={SCRIPTED} 1",
        f"steady={SCRIPTED}",
    ]
    with servers.started("Hocket", SCRIPTED) as hocket, pytest.raises(SystemExit) as ended:
        works = [word for name in ("crowd4", "short", "prefill") for word in ("--work", name)]
        given = [word for peer in peers for word in ("--peer-command", peer)]
        bench("--quick", "--rounds", "2", "--url", hocket.url, "--no-fidelity", *works, *given)
    told = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("|")]
    assert rows[0] == ["work", "Hocket", "crashes", "steady", "best peer", "Hocket against it"]
    crowd, _, _, short, prefill = rows[2:]
    assert all(crowd)
    for row in (short, prefill):
        assert [bool(cell) for cell in row] == [True, True, False, True, True, True]
        assert row[4] == "steady"
    said = str(ended.value.code).splitlines()
    assert said[0].startswith("hocket bench: absent failed: [Errno 2] No such file or directory")
    assert said[1] == "ends failed: expected a server, it ended with exit code 7: "
    assert said[2].startswith("fails at once failed: expected a whole event stream, got ")
    assert said[3].startswith("crashes failed: expected a whole event stream, got ")
    assert said[4].startswith("crashes failed: [Errno "), "it is asked in the next work too"
    assert len(said) == 5


def test_hocket_must_start(bench: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"hocket bench: Hocket failed: expected a list of models at http://127.0.0.1:9/v1/models"):
        bench("--quick", "--url", "http://127.0.0.1:9", "--peer-command", "never started=/no/such/server")
    assert "never started" not in capsys.readouterr().out


def test_a_failure_of_any_kind_is_told_with_its_kind_and_an_end_is_an_end() -> None:
    failures = Failures()
    with failures.of("peer"):
        raise ExceptionGroup("tasks", [ExceptionGroup("tasks", [LoadError("peer: it ended"), OSError()])])
    with failures.of("peer"):
        raise KeyError("choices")
    assert failures.told == ["peer failed: it ended", "peer failed: KeyError: 'choices'"]
    with pytest.raises(KeyboardInterrupt), failures.of("peer"):
        raise KeyboardInterrupt


class Talker:
    """A server whose every reply is `text`, or a fault."""

    def __init__(self, name: str, text: str | None) -> None:
        self.name, self.text = name, text

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def client(self) -> Talker:
        return self

    async def ask(self, question: str, tokens: int, turn: Turn) -> None:
        if self.text is None:
            raise ConnectionRefusedError("it is gone")
        turn.piece(self.text)

    async def close(self) -> None: ...


def test_a_server_that_is_gone_takes_nobody_s_fidelity_with_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Reference:
        def __init__(self, checkpoint: None) -> None: ...

        def greedy(self, questions: tuple[str, ...], tokens: int) -> list[list[str]]:
            return [["one", " two"]] * len(questions)

    monkeypatch.setattr(command, "prepare", lambda model, cache_dir: None)
    monkeypatch.setattr(fidelity, "Reference", Reference)
    failures = Failures()
    contenders: Any = [Talker("Hocket", "one two"), Talker("gone", None), Talker("other", "one three")]
    faith(contenders, load([], "hocket serve"), kernels=False, failures=failures)
    assert failures.told == ["gone failed: it is gone"]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| Hocket | 2 of 2 tokens, 12 of 12 replies whole |",
        "| other | 1 of 2 tokens, 0 of 12 replies whole |",
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_stages_and_steps_are_measured_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    ran = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(words)
        return subprocess.CompletedProcess(words, 1 if "benchmarks.stages" in words else 0)

    monkeypatch.setattr(subprocess, "run", run)
    failures = Failures()
    inside(["--threads", "1"], quick, failures)
    assert ran == [
        [sys.executable, "-m", "benchmarks.stages", "--threads", "1"],
        [sys.executable, "-m", "benchmarks.steps", *["--quick"] * quick, "--threads", "1"],
    ]
    assert failures.told == ["benchmarks.stages failed: expected exit code 0, got 1"]


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [([], True), (["--no-steps"], False), (["--flags", "--kernels reference"], False), (["--url", "http://127.0.0.1:9"], False)],
)
def test_what_a_step_costs_is_measured_where_hocket_s_own_kernels_run(
    bench: Callable[..., None], monkeypatch: pytest.MonkeyPatch, arguments: list[str], measured: bool
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(command, "inside", lambda flags, quick, failures: asked.append(flags))
    monkeypatch.setattr(servers, "hocket", lambda *_: _nobody())
    with pytest.raises(SystemExit, match="Hocket failed"):
        bench(*arguments)
    assert bool(asked) is measured


def _nobody() -> Any:
    raise LoadError("not started here")
