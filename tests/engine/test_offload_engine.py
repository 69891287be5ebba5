"""The engine on the CPU kernels with a tier: what comes back from memory or a file is, bit for bit, what a cold run computes."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from engine import decoder
from engine.core import EngineError, Load, Move, Sequence
from engine.engine import Engine
from engine.offload import FileStore, MemoryStore
from engine.weights.checkpoint import Checkpoint
from engine.weights.convert import prepare
from tests.engine import tiny
from tests.engine.test_engine import ask, ids_of, run
from tests.engine.test_engine_cpu import listen

NewEngine = Callable[..., Engine]

BLOCK = 16 * 2 * 2 * 2 * 32 * 2  # bytes: positions, keys and values, layers, heads, numbers of two bytes
PROMPT = random.Random(6).choices(range(3, 300), k=150)
OTHER = random.Random(7).choices(range(3, 300), k=150)
RUN = len(PROMPT) + 40 - 1  # tokens of a first turn whose KV exists: the last token was never run


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model may well compute faster than this disk reads."""
    for store in (MemoryStore, FileStore):
        monkeypatch.setattr(store, "measure", lambda self: (0.0, 0.0))


@pytest.fixture
def cold(quantised: Checkpoint, new_engine: NewEngine) -> Engine:
    return new_engine(quantised)


@pytest.fixture
def new_in_file(quantised: Checkpoint, new_engine: NewEngine, tmp_path: Path) -> NewEngine:
    """Makes engines whose tier is one file, unless options say otherwise."""
    return partial(new_engine, quantised, swap_space=gib(100), offload_dir=tmp_path)


@pytest.fixture(params=["memory", "file"])
def new_tiered(request: pytest.FixtureRequest, quantised: Checkpoint, new_engine: NewEngine, tmp_path: Path) -> NewEngine:
    """Makes engines whose tier is in memory or in a file."""
    return partial(new_engine, quantised, **({"offload_dir": tmp_path} if request.param == "file" else {}))


def gib(blocks: int) -> float:
    return blocks * BLOCK / 2**30


def first(prompt: list[int] = PROMPT, salt: bytes = b"mine", id: int = 0) -> Sequence:
    return ask(id, prompt, 40, salt, temperature=1.0, seed=7)


def begun(engine: Engine) -> Engine:
    """It has run `first`."""
    run(engine, {0: [first()]})
    return engine


def second(engine: Engine, salt: bytes = b"mine", prompt: list[int] = PROMPT, id: int = 1) -> Sequence:
    """The turn after `first`, which any engine answers in the same way."""
    answer = ids_of(run(engine, {0: [first(prompt, b"asked for " + salt)]})[0])
    return ask(id, [*prompt, *answer, 5, 6, 7], 20, salt, temperature=1.0, seed=8)


def again(sequence: Sequence, salt: bytes | None = None) -> Sequence:
    return Sequence(sequence.id, salt or sequence.salt, sequence.prompt, sequence.sampling)


def hit(engine: Engine, turn: Sequence) -> int:
    """How many tokens were found."""
    run(engine, {0: [turn]})
    return turn.cached


def hit_as_cold(engine: Engine, cold: Engine, turn: Sequence, salt: bytes) -> int:
    """The same; and the logits are those of `cold`, which has run nothing of `salt` yet."""
    wanted = listen(cold, again(turn, salt))[turn.id]
    np.testing.assert_array_equal(listen(engine, turn)[turn.id], wanted)
    return turn.cached


def save_all(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.rest():
            return
    raise AssertionError("it does not come to rest")


def kill(engine: Engine) -> None:
    """As kill -9 does, for all that the file can tell."""
    assert engine.runner.store
    engine.runner.store.close()


def loads(engine: Engine) -> list[Move]:
    """What will have come from the tier."""
    real, moved = engine.runner.move, list[Move]()

    def move(moves: list[Move]) -> list[Move]:
        moved.extend(move for move in moves if isinstance(move, Load))
        return real(moves)

    engine.runner.move = move  # type: ignore[method-assign, assignment]
    return moved


def crowd(engine: Engine) -> None:
    """Others come until nothing of before is in the pool."""
    pool = engine.scheduler.pool
    before = [node for node in pool.cache.nodes() if node.block >= 0]
    for id in range(100, 200):
        if all(node.block < 0 for node in before):
            return
        run(engine, {0: [ask(id, random.Random(id).choices(range(3, 300), k=200), 2, b"crowd")]})
    raise AssertionError("the pool is too large")


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"exact": True}, {"block_size": 32}])
def test_what_was_moved_out_comes_back_bit_for_bit(
    quantised: Checkpoint, new_engine: NewEngine, new_tiered: NewEngine, options: dict[str, Any]
) -> None:
    """E17: the whole conversation, its last block too, partly filled; and another one in its place."""
    cold = new_engine(quantised, **options)
    engine = begun(new_tiered(max_total_tokens=512, swap_space=gib(400), **options))
    came = loads(engine)
    for round in range(2):
        crowd(engine)
        came.clear()
        assert hit_as_cold(engine, cold, second(cold, id=round), b"%d" % round) >= RUN
        assert len(came) >= -(-RUN // engine.scheduler.pool.block_size)
        engine.scheduler.pool.check([])


@pytest.mark.parametrize("slots", [1, 3, 14])
def test_with_a_full_tier_work_goes_on(new_tiered: NewEngine, cold: Engine, slots: int) -> None:
    """E17: four conversations take turns in a pool that holds one and a half, and a tier that holds one at most."""
    engine = new_tiered(max_total_tokens=320, swap_space=gib(slots))
    chats = {salt: random.Random(salt[0]).choices(range(3, 300), k=100) for salt in (b"a", b"b", b"c", b"d")}
    for turn in range(4):
        asked = {
            salt: ask(at, [*tokens, 5, turn + 3], 12, salt, temperature=1.0, seed=turn) for at, (salt, tokens) in enumerate(chats.items())
        }
        got = run(engine, {at: [sequence] for at, sequence in enumerate(asked.values())})
        wanted = run(cold, {0: [again(sequence, b"%d of " % turn + salt) for salt, sequence in asked.items()]})
        for salt, sequence in asked.items():
            assert ids_of(got[sequence.id]) == ids_of(wanted[sequence.id])
            chats[salt] = [*sequence.prompt, *ids_of(got[sequence.id])]
        save_all(engine)
        engine.scheduler.pool.check([])
    assert engine.scheduler.pool.tier
    assert not engine.scheduler.pool.tier._free


def test_at_rest_the_tier_gets_everything_a_little_at_a_time(quantised: Checkpoint, new_engine: NewEngine) -> None:
    """An arrival never waits for more than a few blocks; and when there is no more, there is nothing to do."""
    engine = new_engine(quantised, swap_space=gib(100))
    assert not engine.rest()
    run(engine, {0: [first()]})
    moved = []
    real = engine.runner.move
    engine.runner.move = lambda moves: (moved.append(len(list(moves))), real(moves))[1]  # type: ignore[method-assign, assignment, func-returns-value]
    save_all(engine)
    assert sum(moved) == 12
    assert max(moved) <= 8
    assert not engine.rest()
    assert moved[-1] == 0


# Restarts


def restarted(engine: Engine, clean: bool) -> None:
    if clean:
        engine.close()
    else:
        save_all(engine)
        kill(engine)


@pytest.mark.parametrize("clean", [False, True])
def test_a_conversation_goes_on_after_a_restart(
    new_in_file: NewEngine, cold: Engine, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """E12, E18: killed when idle, or stopped; from the file, to the last token that was run. And once more."""
    caplog.set_level(logging.INFO)
    engine = new_in_file()
    assert ids_of(run(engine, {0: [first()]})[0]) == ids_of(run(cold, {0: [first(salt=b"cold")]})[0])
    restarted(engine, clean)
    engine = new_in_file()
    assert "12 blocks of earlier conversations are in" in caplog.text
    came = loads(engine)
    turn = second(cold)
    assert hit_as_cold(engine, cold, turn, b"colder") == RUN
    assert len(came) == 12
    assert hit(engine, again(turn, b"another's")) == 0
    restarted(engine, clean)
    engine = new_in_file()
    third = ask(2, [*turn.prompt, *turn.output, 9, 9], 10, b"mine")
    assert hit_as_cold(engine, cold, third, b"coldest") == len(turn.prompt) + 20 - 1


AT = 5  # the block that is damaged
DAMAGES: dict[str, Callable[[Any, int, int], object]] = {
    "its record": lambda file, record, data: over(file, record + 30, b"~"),
    "its tokens": lambda file, record, data: over(file, record + 48 + 9, b"~"),
    "its bytes": lambda file, record, data: over(file, data + BLOCK // 2, b"~~~~"),
    "all of it, to zeros": lambda file, record, data: (over(file, record, bytes(128)), over(file, data, bytes(BLOCK))),
    "its bytes, to zeros": lambda file, record, data: over(file, data, bytes(BLOCK)),
}


def over(file: Any, at: int, data: bytes) -> None:
    file.seek(at)
    file.write(data)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_computed_anew(new_in_file: NewEngine, cold: Engine, tmp_path: Path, damage: str, running: bool) -> None:
    """E17: while the server runs, or before it starts. What comes before it is used, and so is all that is another conversation's."""
    options = {"swap_space": gib(400), "max_total_tokens": 512}
    engine = begun(new_in_file(**options))
    run(engine, {0: [first(OTHER)]})
    save_all(engine)
    node = engine.scheduler.pool.cache.match(b"mine", PROMPT).chain[AT]
    slots = engine.scheduler.pool.tier.slots if engine.scheduler.pool.tier else 0
    crowd(engine)
    if not running:
        kill(engine)
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        DAMAGES[damage](file, node.slot * 128, -(-slots * 128 // 4096) * 4096 + node.slot * BLOCK)
    if not running:
        engine = new_in_file(**options)
    for prompt, known in ((OTHER, RUN), (PROMPT, AT * 16)):
        turn = second(cold, prompt=prompt)
        assert hit_as_cold(engine, cold, turn, b"%d" % known) == known
        engine.scheduler.pool.check([])
    save_all(engine)
    crowd(engine)
    turn = ask(3, [*turn.prompt, *turn.output, 9], 4, b"mine")
    assert hit(engine, turn) == len(turn.prompt) - 2, "it is kept again"


def test_a_file_that_is_emptied_under_a_running_server_costs_only_time(new_in_file: NewEngine, cold: Engine, tmp_path: Path) -> None:
    engine = begun(new_in_file(swap_space=gib(400), max_total_tokens=512))
    crowd(engine)
    (path,) = tmp_path.iterdir()
    os.truncate(path, 0)
    turn = second(cold)
    assert hit_as_cold(engine, cold, turn, b"colder") == 0
    crowd(engine)
    turn = ask(3, [*turn.prompt, *turn.output, 9], 4, b"mine")
    assert hit(engine, turn) == len(turn.prompt) - 2


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "int8"},
        {"exact": True},
        {"exact": True, "kv_dtype": "bfloat16"},
        {"block_size": 32},
        {"weights": "int8"},
        {"kernels": "reference"},
        "model",
    ],
    ids=str,
)
def test_kv_of_another_arithmetic_is_never_read(
    quantised: Checkpoint, new_engine: NewEngine, cold: Engine, tmp_path: Path, tiny_folder: Path, change: dict[str, Any] | str
) -> None:
    options: dict[str, Any] = {"swap_space": gib(100), "offload_dir": tmp_path / "tier"}
    restarted(begun(new_engine(quantised, **options)), clean=False)
    other = quantised
    if change == "model":
        config = tiny.config(hidden_size=64, intermediate_size=96, head_dim=32, context_length=512)
        path = tiny.write_gguf(tmp_path / "other.gguf", config, seed=1, kind=GGMLQuantizationType.Q4_1)
        other = prepare(str(path), tiny_folder.parent / "cache")
    else:
        assert isinstance(change, dict)
        options |= change
    engine = new_engine(other, **options)
    assert hit(engine, second(cold)) == 0
    kill(engine)


def test_kernels_name_themselves(quantised: Checkpoint, new_engine: NewEngine) -> None:
    options = [{"kv_dtype": kind, "exact": exact} for kind in ("float32", "bfloat16", "int8") for exact in (False, True)]
    identities = {new_engine(quantised, **each).runner.decoder.identity for each in options}
    assert len(identities) == len(options)


@pytest.mark.parametrize("changed", ["models/rope.py", "models/llama_cpu.py", "kernels/cpu/kv.py", "kernels/reference.py"])
def test_another_source_is_another_arithmetic(tmp_path: Path, changed: str) -> None:
    """What an older Hocket has left may have other bits."""
    engine = Path(decoder.__file__).parent
    shutil.copytree(engine, tmp_path, dirs_exist_ok=True)
    assert decoder.sources_digest(tmp_path) == decoder.sources_digest()
    source = tmp_path / changed
    source.write_text(source.read_text() + "\n")
    assert decoder.sources_digest(tmp_path) != decoder.sources_digest()


def test_two_servers_on_one_folder(new_in_file: NewEngine, tmp_path: Path) -> None:
    engine = begun(new_in_file())
    with pytest.raises(EngineError, match=f"expected an offload folder that no other server uses, got {tmp_path}"):
        new_in_file()
    restarted(engine, clean=True)
    engine = new_in_file()
    assert hit(engine, second(engine)) == RUN
    kill(engine)


# A disk that is full


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that takes a few blocks: a real one where that may be had."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], capture_output=True, check=False)
    if mounted.returncode == 0:
        yield folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    real, left = os.pwrite, 128 << 10

    def pwrite(file: int, data: memoryview, at: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    yield folder


def test_a_full_disk_only_loses_blocks(new_in_file: NewEngine, cold: Engine, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, replies are what they are, and the engine comes to rest."""
    engine = begun(new_in_file(swap_space=gib(400), offload_dir=small_disk, max_total_tokens=512))
    for round in range(3):
        crowd(engine)
        rests = 0
        while engine.rest():
            rests += 1
            assert rests <= 512 // 16
        for _ in range(5):
            assert not engine.rest(), "nothing more can be done"
        hit_as_cold(engine, cold, second(cold, id=round), b"%d" % round)
        engine.scheduler.pool.check([])
    assert [record.levelno for record in caplog.records if "cannot be kept" in record.message] == [logging.WARNING]
    engine.close()


def test_what_a_full_disk_refused_is_kept_once_there_is_room(new_in_file: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begun(new_in_file())

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        assert not engine.rest()
    save_all(engine)
    kill(engine)
    engine = new_in_file()
    assert hit(engine, second(engine)) == RUN
    kill(engine)


def test_a_turn_that_runs_at_the_end_is_kept_too(new_in_file: NewEngine) -> None:
    engine = new_in_file()
    cut = ask(0, PROMPT, 40, b"mine")
    engine.step([cut])
    while len(cut.output) < 5:
        engine.step()
    engine.close()
    following = ask(1, [*PROMPT, *cut.output[:4], 7], 2, b"mine")
    assert hit(new_in_file(), following) >= len(PROMPT) + 4 - 1, "one that is alone in its block may be quicker to compute"
