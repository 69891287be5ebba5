"""At most one live thread of a serving process enters OpenMP, and nothing there brings in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Server

# Serves four conversations; then says who computed, what was imported and how many threads Python knows nothing of.
SERVES = """
import asyncio, json, os, sys, threading
from pathlib import Path
from engine.batcher import Batcher
from engine.core import EngineOptions, Message, SamplingParams

async def reply(batcher, text):
    prompt = await batcher.prompt([Message("user", text)])
    generation = batcher.session(b"").generate(prompt.ids, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    return [delta async for delta in generation][-1].finish

async def main(folder, cache_dir):
    batcher = Batcher(EngineOptions(model=folder, cache_dir=Path(cache_dir), threads=2))
    batcher.start()
    await batcher.settled()
    from engine.kernels.cpu.stage import Team  # loaded by now
    ran, run = [], Team.run
    Team.run = lambda *args: (ran.append(threading.current_thread().name), run(*args))[1]
    finishes = await asyncio.gather(*(reply(batcher, text) for text in ("hello", "you and I", "the rest", "hello")))
    foreign = len(os.listdir("/proc/self/task")) - len(threading.enumerate())
    print(json.dumps({
        "finishes": finishes, "steps": len(ran), "ran": sorted(set(ran)), "owner": Team._owner.name, "foreign": foreign,
        "imported": [name for name in ("torch", "transformers", "gguf") if name in sys.modules],
    }))
    await batcher.close()

asyncio.run(main(*sys.argv[1:]))
"""


def serve_in_a_process(tiny_folder: Path, code: str = SERVES) -> dict[str, Any]:
    # OpenBLAS and the tokenisers have threads of their own, which are not OpenMP's.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", code, str(tiny_folder), str(tiny_folder.parent / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: OpenMP has no thread of its own")
def test_only_the_engine_thread_computes(tiny_folder: Path) -> None:
    """OpenMP gives every thread that enters it a team of its own: two compute threads are the engine's and one more, however many ask."""
    said = serve_in_a_process(tiny_folder)
    assert said["finishes"] == ["length"] * 4
    assert said["steps"] >= 20
    assert said["ran"] == ["engine"]
    assert said["owner"] == "engine"
    assert said["foreign"] == 1
    assert said["imported"] == []


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: OpenMP has no thread of its own")
def test_a_second_thread_in_openmp_would_be_seen(tiny_folder: Path) -> None:
    """The count above rises when another live thread enters it by a way of its own."""
    intruder = """
    import numba, numpy
    @numba.njit(parallel=True)
    def double(x):
        for i in numba.prange(len(x)):
            x[i] *= 2
    entered, end = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (double(numpy.ones(8)), entered.set(), end.wait(60)), daemon=True).start()
    entered.wait(60)
"""
    at = SERVES.index("    foreign = ")
    said = serve_in_a_process(tiny_folder, SERVES[:at] + intruder.lstrip("\n") + SERVES[at:])
    assert said["foreign"] == 2


@pytest.fixture
def tiny_server(tiny_folder: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ("--model", str(tiny_folder), "--cache-dir", str(tiny_folder.parent / "cache"), "--store", "memory")
    running = Server(tmp_path / "server", *flags).start()
    yield running
    running.stop()


@pytest.mark.slow
def test_a_server_maps_one_openmp_and_no_torch(tiny_server: Server) -> None:
    """After it has served: what is in the process's memory, whoever imported it."""
    asked = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    answer = httpx.post(f"{tiny_server.url}/v1/chat/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert tiny_server.process
    maps = Path(f"/proc/{tiny_server.process.pid}/maps").read_text()
    mapped = {Path(line.split()[-1]).name for line in maps.splitlines() if "/" in line}
    assert not [name for name in mapped if name.startswith(("libtorch", "libc10"))]
    assert len([name for name in mapped if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1
