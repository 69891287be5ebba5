"""What a kill -9 leaves: of the server, of the bundled Valkey, of both. Real processes. (slow)"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.app.wire import Event, Wire, text_of
from tests.serving import Server, StartFailed

pytestmark = pytest.mark.slow

LONG = {"ignore_eos": True, "temperature": 0, "max_output_tokens": 120}


def take(wire: Wire, count: int) -> list[Event]:
    return [wire.receive() for _ in range(count)]


def valkey_pid(server: Server) -> int:
    """The server that works in this data folder."""
    folder = str(server.data_dir / "valkey")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "cwd").readlink()) == folder and "valkey-server" in (process / "cmdline").read_text():
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"no Valkey works in {folder}")


@pytest.mark.parametrize("store_too", [False, True])
def test_what_was_acknowledged_survives_kill_9_and_goes_on(new_server: Callable[..., Server], store_too: bool) -> None:
    server = new_server().start()
    conversation = httpx.post(f"{server.url}/v1/conversations", json={}).json()["id"]
    with Wire(server.url) as wire:
        first = wire.respond(conversation=conversation, input="My name is Ana.", temperature=0, max_output_tokens=20)[-1]["response"]
        wire.create(conversation=conversation, input="Tell me a long story.", metadata={"client_message_id": "story"}, **LONG)
        seen = take(wire, 14)
        pid = valkey_pid(server)
        server.stop(kill=True)
        if store_too:
            os.kill(pid, signal.SIGKILL)
    server.start()

    items = httpx.get(f"{server.url}/v1/conversations/{conversation}/items?order=asc").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant"]
    assert items[1]["content"] == first["output"][0]["content"]
    assert items[3]["status"] == "incomplete"
    kept = items[3]["content"][0]["text"]
    assert kept.startswith(text_of(seen)), "nobody saw text that the crash took back"
    cut = httpx.get(f"{server.url}/v1/responses/{seen[0]['response']['id']}").json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "interrupted"})

    with Wire(server.url) as wire:
        again = wire.respond(conversation=conversation, input="Tell me a long story.", metadata={"client_message_id": "story"}, **LONG)
        assert again[: len(seen)] == seen, "the same response, not a second one"
        assert text_of(again) == kept
        following = wire.respond(conversation=conversation, input="Go on.", temperature=0, max_output_tokens=4)[-1]["response"]
    assert following["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    items = httpx.get(f"{server.url}/v1/conversations/{conversation}/items?order=asc").json()["data"]
    assert len(items) == 6


def test_a_killed_valkey_comes_back_under_a_running_stream(new_server: Callable[..., Server]) -> None:
    server = new_server().start()
    with Wire(server.url) as wire:
        wanted = text_of(wire.respond(input="Tell me a long story.", **LONG))
        wire.create(input="Tell me a long story.", **LONG)
        events = take(wire, 14)
        os.kill(valkey_pid(server), signal.SIGKILL)
        events += wire.rest()
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == wanted
    stored = httpx.get(f"{server.url}/v1/responses/{events[0]['response']['id']}").json()
    assert stored == events[-1]["response"]


def test_a_second_server_on_the_same_data_is_refused(new_server: Callable[..., Server]) -> None:
    server = new_server().start(wait=False)
    with pytest.raises(StartFailed, match=str(server.data_dir)):
        Server(server.data_dir).start()
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_clean_stop_ends_replies_and_leaves_nothing_running(new_server: Callable[..., Server]) -> None:
    server = new_server().start()
    with Wire(server.url) as wire:
        wire.create(input="Tell me a long story.", ignore_eos=True, max_output_tokens=4000)
        events = take(wire, 8)
        pid = valkey_pid(server)
        server.stop()
    assert not Path(f"/proc/{pid}").exists()
    server.start(wait=False)
    stored = httpx.get(f"{server.url}/v1/responses/{events[0]['response']['id']}").json()
    assert (stored["status"], stored["incomplete_details"]) == ("incomplete", {"reason": "server_shutdown"})
    assert stored["output"][0]["content"][0]["text"].startswith(text_of(events))


def test_the_page_opens_while_the_model_loads(new_server: Callable[..., Server]) -> None:
    server = new_server().start(wait=False)
    assert httpx.get(server.url).status_code == 200
    ready = httpx.get(f"{server.url}/readyz")
    if ready.status_code == 503:
        assert ready.json()["status"] == "loading"
        with Wire(server.url) as wire:
            refused = wire.respond(input="Hi")[-1]
        assert (refused["status"], refused["error"]["code"]) in ((503, "model_loading"), (None, None))
    server.wait_until_ready()


def test_a_model_that_cannot_be_loaded_is_told_to_everyone(new_server: Callable[..., Server], tmp_path: Path) -> None:
    liar = tmp_path / "liar.gguf"
    liar.write_bytes(b"GGUF" + b"\xff" * 100)
    server = new_server("--model", str(liar)).start(wait=False)
    with pytest.raises(AssertionError, match=r"liar\.gguf"):
        server.wait_until_ready()
    with Wire(server.url) as wire:
        refused = wire.respond(input="Hi")[-1]
    assert (refused["status"], refused["error"]["code"]) == (503, "model_failed")
    assert httpx.get(f"{server.url}/healthz").status_code == 200
