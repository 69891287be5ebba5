from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

import app.server
from app.cli import _server, listen
from app.server import _salts, create_app
from app.settings import Settings
from engine.batcher import Batcher
from engine.engine import Engine
from tests.app.wire import Wire


def test_salts_are_an_owners_own_and_last_as_long_as_the_data(tmp_path: Path) -> None:
    """E3: nobody can choose or guess another's root, and a restart finds it again."""
    one, other = Settings(data_dir=tmp_path / "one"), Settings(data_dir=tmp_path / "other")
    salt = _salts(one)
    assert salt("ana") == _salts(one)("ana")
    assert len({salt("ana"), salt("ben"), _salts(other)("ana"), _salts(Settings(store="memory"))("ana")}) == 4
    assert stat.S_IMODE((tmp_path / "one" / "secret").stat().st_mode) == 0o600


def test_where_the_log_is_in_memory_salts_last_as_long_as_the_kv_outside_it(tmp_path: Path) -> None:
    """Else what `--offload-dir` keeps could not be found again."""
    kept = Settings(store="memory", offload_dir=tmp_path / "kv")
    assert _salts(kept)("ana") == _salts(kept)("ana") != _salts(Settings(store="memory", offload_dir=tmp_path / "other"))("ana")
    assert stat.S_IMODE((tmp_path / "kv" / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


class Slow(Batcher):
    """It takes its time over each step, so that a reply is under way when the server is told to stop."""

    def _load(self) -> Engine:
        engine = super()._load()
        run, never = engine.runner.run, threading.Event()

        def slowly(plan: Any) -> Any:
            never.wait(0.02)
            return run(plan)

        engine.runner.run = slowly  # type: ignore[method-assign]
        return engine


class Stoppable:
    """The whole server as `hocket serve` runs it, on the tiny model, but for the signals."""

    def __init__(self, settings: Settings) -> None:
        listeners = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
        self.server = _server(create_app(settings), settings, self.url)
        self._thread = threading.Thread(target=self.server.run, args=(listeners,))
        self._thread.start()
        while not self._ready():
            assert self._thread.is_alive()
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def stoppable(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stoppable]:
    monkeypatch.setattr(app.server, "Batcher", Slow)
    running = Stoppable(
        Settings(
            model=str(tiny_folder),
            cache_dir=tiny_folder.parent / "cache",
            data_dir=tmp_path,
            store="memory",
            kernels="reference",
            threads=1,
        )
    )
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello", "max_output_tokens": 200}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}),
    ],
)
def test_a_server_that_is_told_to_stop_ends_its_streams(stoppable: Stoppable, path: str, body: dict[str, Any]) -> None:
    """They are told so, and it does not wait for what they would have said."""
    whole = {**body, "stream": True, "ignore_eos": True, "logit_bias": {"0": -100, "1": -100, "2": -100}}
    events: list[Any] = []
    with httpx.stream("POST", f"{stoppable.url}{path}", json=whole, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 6:
                stoppable.server.should_exit = True
    assert events.pop() == "[DONE]"
    assert len(events) < 200, "it had more to say"
    last = json.loads(events[-1])
    if "response" in last:
        assert (last["type"], last["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "server_shutdown"})
    else:
        assert last["choices"][0]["finish_reason"] == "length"


def test_a_server_that_is_told_to_stop_says_so_on_sockets_before_it_closes_them(stoppable: Stoppable) -> None:
    with Wire(stoppable.url) as wire:
        wire.create(input="hello", ignore_eos=True, max_output_tokens=200, logit_bias={"0": -100, "1": -100, "2": -100})
        while wire.receive()["type"] != "response.output_text.delta":
            pass
        stoppable.server.should_exit = True
        ended = wire.rest()[-1]["response"]
        assert ended["incomplete_details"] == {"reason": "server_shutdown"}
        with pytest.raises(ConnectionClosed) as closed:
            wire.receive()
        assert closed.value.rcvd and closed.value.rcvd.code == 1012
