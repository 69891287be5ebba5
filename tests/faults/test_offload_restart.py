"""Conversations whose KV outlives the server. Real processes. (slow)"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.wire import Wire, text_of
from tests.serving import Server

pytestmark = pytest.mark.slow

BLOCK = 16  # tokens
RECORD = 128  # bytes, of one block
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def ask(server: Server, text: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The response, and its text."""
    with Wire(server.url) as wire:
        events = wire.respond(input=text, **(GREEDY | {"max_output_tokens": 40} | fields))
    return events[-1]["response"], text_of(events)


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def first_turn(server: Server) -> dict[str, Any]:
    """A long one, whose last block is partly filled."""
    text = "Tell me a story of the sea."
    tokens = ask(server, text, max_output_tokens=1)[0]["usage"]["input_tokens"]
    response = ask(server, text, max_output_tokens=60 + (14 - (tokens + 60 - 1)) % BLOCK)[0]
    assert (response["usage"]["total_tokens"] - 1) % BLOCK == 14
    return response


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("kv-*.cache")
    return path


def records(folder: Path) -> dict[int, tuple[int, int]]:
    """Of each block in the file: where its record is, by its id and the id of the block before it."""
    with file_of(folder).open("rb") as file:
        head = file.read(1 << 20)
    found = {}
    for at in range(0, len(head), RECORD):
        magic, id, parent = struct.unpack_from("<4s8xQQ", head, at)
        if magic == b"hkv1":
            found[at] = (id, parent)
    return found


def wait_until_kept(folder: Path, blocks: int) -> None:
    """The engine writes when it has nothing else to do, and tells nobody."""
    deadline = time.monotonic() + 20
    while (kept := len(records(folder))) < blocks:
        assert time.monotonic() < deadline, f"{kept} of {blocks} blocks"
        time.sleep(0.05)


@pytest.mark.parametrize("kill", [True, False])
def test_a_conversation_is_reopened_from_the_file(new_server: Callable[..., Server], folder: Path, kill: bool) -> None:
    """After kill -9 of an idle server, or a clean stop: not one token of it is computed again, and the reply is that of a cold run."""
    server = new_server("--offload-dir", str(folder)).start()
    first = first_turn(server)
    run = first["usage"]["total_tokens"] - 1  # the last token was never run
    if kill:
        wait_until_kept(folder, -(-run // BLOCK))
    server.restart(kill=kill)
    second, text = ask(server, "And then?", previous_response_id=first["id"])
    assert cached(second) == run
    server.stop()
    server.flags = ()
    server.start()
    again, wanted = ask(server, "And then?", previous_response_id=first["id"])
    assert cached(again) == 0
    assert text == wanted
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]


@pytest.mark.parametrize("flags", [(), ("--max-total-tokens", "2048")])
def test_a_conversation_that_ended_on_a_busy_server_is_reopened_after_a_kill(
    new_server: Callable[..., Server], folder: Path, flags: tuple[str, ...]
) -> None:
    """Somebody else's reply runs all the time. Each of its steps keeps a block at least, so a short turn after it is time enough."""
    server = new_server("--offload-dir", str(folder), *flags).start()
    with Wire(server.url) as wire:
        wire.create(input="Count.", **(GREEDY | {"max_output_tokens": 1500}))
        stream = wire.receive()["response"]["id"]
        first = first_turn(server)
        run = first["usage"]["total_tokens"] - 1
        ask(server, "Hello", max_output_tokens=-(-run // BLOCK) + 4)
        assert httpx.get(f"{server.url}/v1/responses/{stream}").json()["status"] == "in_progress", "it was never idle"
        server.stop(kill=True)
    server.start()
    second, text = ask(server, "And then?", previous_response_id=first["id"])
    assert cached(second) == run
    server.stop()
    server.flags = flags
    server.start()
    again, wanted = ask(server, "And then?", previous_response_id=first["id"])
    assert (cached(again), text) == (0, wanted)


def test_a_log_in_memory_does_not_keep_the_kv_from_being_found_again(new_server: Callable[..., Server], folder: Path) -> None:
    """Stateless clients bring their chats themselves. What names the owners' KV is where the KV is."""
    server = new_server("--offload-dir", str(folder), "--store", "memory").start()
    messages = [{"role": "user", "content": "Tell me a story of the sea."}]

    def say() -> dict[str, Any]:
        asked = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).raise_for_status().json()
        messages.extend([answer["choices"][0]["message"], {"role": "user", "content": "And then?"}])
        return dict(answer["usage"])

    run = say()["total_tokens"] - 1
    wait_until_kept(folder, -(-run // BLOCK))
    server.restart(kill=True)
    assert say()["prompt_tokens_details"]["cached_tokens"] == run
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_a_conversation_whose_client_keeps_it_is_reopened_too(new_server: Callable[..., Server], folder: Path) -> None:
    """The whole chat is sent each time, and some of its replies encode otherwise than they were generated."""
    server = new_server("--offload-dir", str(folder)).start()
    messages: list[dict[str, str]] = []

    def say(text: str, seed: int, **fields: Any) -> dict[str, Any]:
        """The usage."""
        messages.append({"role": "user", "content": text})
        asked = {"model": server.model, "messages": messages, "temperature": 1.3, "seed": seed, "max_tokens": 40, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked | fields, timeout=60).raise_for_status().json()
        messages.append(answer["choices"][0]["message"])
        return dict(answer["usage"])

    run = 0
    for seed, text in enumerate(("Tell me a story of the sea.", "And then?", "Who was there?", "How did it end?")):
        usage = say(text, seed, max_tokens=50 if seed == 3 else 40)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= run
        run = usage["total_tokens"] - 1  # the last token was never run
    assert run % BLOCK > BLOCK // 2, "expected a part of a block that takes longer to compute than to load"
    wait_until_kept(folder, -(-run // BLOCK))
    server.restart(kill=True)
    usage = say("Tell me another.", 9)
    assert usage["prompt_tokens_details"]["cached_tokens"] == run
    server.stop()
    file = folder / "segments"
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    server.start()
    del messages[-2:]
    usage = say("Tell me another.", 9)
    assert usage["prompt_tokens_details"]["cached_tokens"] < run, "expected a reply that encodes otherwise, got none"


def test_a_damaged_file_is_no_hindrance(new_server: Callable[..., Server], folder: Path) -> None:
    """Some of it wrong, and then all of it: the server starts, and its replies are right."""
    server = new_server("--offload-dir", str(folder)).start()
    first = first_turn(server)
    run = first["usage"]["total_tokens"] - 1
    _, wanted = ask(server, "And then?", previous_response_id=first["id"])
    server.stop()
    assert (folder.stat().st_mode & 0o777, file_of(folder).stat().st_mode & 0o777) == (0o700, 0o600)
    id, at = 0, -1
    for _ in range(3):  # to the third block of the conversation
        at, id = next((at, id_) for at, (id_, parent) in records(folder).items() if parent == id)
    with file_of(folder).open("r+b") as file:
        file.seek(at + 48)  # its first token
        file.write(b"\xff")
    server.start()
    second, text = ask(server, "And then?", previous_response_id=first["id"])
    assert text == wanted
    assert cached(second) == 2 * BLOCK < run
    server.stop()
    file_of(folder).write_bytes(b"\xff" * (1 << 24))
    server.start()
    second, text = ask(server, "And then?", previous_response_id=first["id"])
    assert text == wanted
    assert cached(second) == 0
    third, _ = ask(server, "And then?", previous_response_id=second["id"])
    assert cached(third) == second["usage"]["total_tokens"] - 1


def test_two_servers_do_not_share_a_folder(new_server: Callable[..., Server], folder: Path) -> None:
    server = new_server("--offload-dir", str(folder)).start()
    other = new_server("--offload-dir", str(folder)).start(wait=False)
    with pytest.raises(AssertionError, match=f"expected an offload folder that no other server uses, got {re.escape(str(folder))}"):
        other.wait_until_ready()
    assert ask(server, "Hello")[0]["status"] == "incomplete"
    assert httpx.get(f"{server.url}/readyz").status_code == 200
