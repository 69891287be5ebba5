"""Other people's clients, as they come, with another base URL: two streamed turns, and a call of a tool. Opt-in: `make test-clients`.

Each client is run by a script beside this file, among packages of its own (requirements.txt, js/package.json). docs/clients.md tells of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.node import Node, json_lines
from tests.serving import Server

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-clients" / "bin" / "python"
QUESTIONS = ("What is the capital of France?", "And of Italy?")
CLIENTS = (
    ("vercel.mjs", "responses"),
    ("vercel.mjs", "chat"),
    ("vercel.mjs", "compatible"),
    ("langchain_chat.py", "completions"),
    ("langchain_chat.py", "responses"),
    ("litellm_chat.py", "completions"),
    ("agents_chat.py", "responses"),
    ("agents_chat.py", "completions"),
)

Case = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Node:
    assert shutil.which("node") and PYTHON.exists(), "expected the clients: `make test-clients` installs them"
    return Node(HERE / "js", tmp_path_factory.mktemp("js"))


@pytest.fixture(params=CLIENTS, ids=" ".join)
def case(request: pytest.FixtureRequest, scripts: Node, server: Server) -> Case:
    """Runs a client's case."""
    script, way = request.param
    environment = {"HOCKET_URL": server.url, "HOCKET_MODEL": server.model}

    def run(name: str) -> list[Any]:
        if script.endswith(".mjs"):
            return scripts.run(script, way, name, environment=environment)
        return json_lines(str(PYTHON), str(HERE / script), way, name, environment=environment)

    return run


@pytest.fixture(scope="module")
def replies(server: Server) -> list[str]:
    """To QUESTIONS, asked by no one's client."""
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
    return [message["content"] for message in messages[1::2]]


def test_two_streamed_turns(case: Case, replies: list[str]) -> None:
    turns = case("turns")
    assert [turn["text"] for turn in turns] == replies, "the chat arrives as it was said"
    assert ["".join(turn["pieces"]) for turn in turns] == replies and all(len(turn["pieces"]) > 1 for turn in turns)
    assert turns[1]["cached"] > turns[0]["cached"], "and nothing of it is run again"
    assert not any(turn.get("warnings") or turn.get("faults") for turn in turns)


def test_a_tool_that_must_be_called(case: Case) -> None:
    turns = case("tool")
    (call,) = (call for turn in turns for call in turn.get("calls", ()))
    assert call["name"] == "weather" and call["arguments"] in ({"city": "Paris"}, {"city": "Rome"})
    assert [result for turn in turns for result in turn.get("results", ())] == [f"21 degrees in {call['arguments']['city']}"]
    assert "".join(turns[-1]["pieces"]) == turns[-1]["text"] != "", "it says something to what the tool returned"
    assert not any(turn.get("warnings") or turn.get("faults") for turn in turns)
