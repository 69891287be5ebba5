"""Servers of the benchmark: their processes, and the front that peers without a server get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import machine, processes
from benchmarks.clients import ChatClient
from benchmarks.front import Front, Gains
from benchmarks.load import Load, LoadError, run
from benchmarks.models import folder, q8_0
from benchmarks.servers import running, started
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from tests.engine import tiny

PARENT = """
import subprocess, sys, time
while time.process_time() < 0.1:  # more than the clock's tick
    pass
child = subprocess.Popen(['sleep', '60'])
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_tree_is_counted_with_its_children() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert processes.tree(parent.pid) == [parent.pid, child]
        assert processes.memory(parent.pid) > processes.memory(child) > 0
        assert processes.processor_seconds(parent.pid) > 0
        os.kill(child, 15)
    finally:
        parent.kill()
        parent.communicate()
    assert processes.tree(parent.pid) == []


def test_the_listener_on_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert processes.listener(port) == os.getpid()
    assert processes.listener(port) is None


def test_a_command_that_ends_is_told_with_what_it_said() -> None:
    command = f"{sys.executable} -c \"print('no such model', {{port}}); raise SystemExit(3)\""
    with pytest.raises(LoadError, match=r"peer: expected a server, it ended with exit code 3: no such model \d+"), started("peer", command):
        raise AssertionError("it never ran")


def test_a_peer_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(LoadError, match=f"peer: expected a list of models at {url}/v1/models"), running("peer", f"{url}/v1"):
        raise AssertionError("it never ran")


class Echo:
    """Gives each request its own prompt back, a token a step."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[list[int], int]] = {}

    def add(self, request: int, ids: list[int], tokens: int) -> None:
        self.live[request] = ids, tokens

    def step(self) -> Gains:
        gains: Gains = []
        for request, (ids, tokens) in list(self.live.items()):
            gains.append((request, ids[:1], tokens == 1))
            self.live[request] = ids[1:], tokens - 1
            if tokens == 1:
                del self.live[request]
        return gains


@contextlib.asynccontextmanager
async def fronted(model: Path):  # type: ignore[no-untyped-def]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    task = asyncio.create_task(Front(Echo(), model).serve(port))
    while not processes.listener(port):
        assert not task.done(), task.result()
        await asyncio.sleep(0)
    yield f"http://127.0.0.1:{port}"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_the_front_speaks_chat_completions_with_the_model_s_own_template(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    async with fronted(folder(tiny_checkpoint, tmp_path / "float32")) as url:
        result = await run(lambda: ChatClient(url, "model"), Load(3, turns=2, prompt_tokens=12, reply_tokens=30))
        with pytest.raises(LoadError, match="status 404"):
            await ChatClient(f"{url}/elsewhere", "model").ask("?", 1, result.turns[0])
    assert [turn.tokens for turn in result.turns] == [30] * 6
    assert all(turn.text.startswith("user\nWrite a long story") for turn in result.turns), "special tokens are not shown"


def test_models_for_peers_hold_the_same_weights(tmp_path: Path) -> None:
    from gguf.constants import GGMLQuantizationType

    from engine.weights.gguf import GGUFModel

    config = tiny.config(hidden_size=64)
    source = tiny.write_gguf(tmp_path / "tiny.gguf", config, kind=GGMLQuantizationType.Q4_1)
    checkpoint = prepare(str(source), tmp_path / "cache")
    plain = prepare(str(folder(checkpoint, tmp_path / "float32")), tmp_path / "cache")
    rounded = GGUFModel(q8_0(source, tmp_path / "q8_0.gguf"))
    assert plain.config == checkpoint.config
    assert plain.template == checkpoint.template
    assert rounded.config == checkpoint.config
    for name, tensor in checkpoint.tensors().items():
        assert (plain.tensors()[name] == tensor).all()
        wanted = tensor.numpy()
        assert abs(rounded.tensor(name) - wanted).max() <= abs(wanted).max() / 127


def test_lines_about_the_machine_are_told_with_their_spread() -> None:
    here = machine.Machine("a processor", 2, 20e9)
    assert str(here) == "a processor, 2 cores, memory read at 20.0 GB/s by all of them"
    line = machine.floor_line(here, [0.008, 0.006, 0.007], 100_000_000)
    assert line == "one-row step: 7.00 ms, 1.40x (1.20 to 1.60) the 5.00 ms that reading its 100 MB takes"
    line = machine.python_line([0.020, 0.025], [0.019, 0.024])
    assert line == "Python's share of a 16-row step: 4.5% (4.0% to 5.0% of 22.50 ms)"
    assert machine.bandwidth(2, size=1 << 22, passes=1) > 1e8
