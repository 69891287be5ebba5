"""A small OpenAI-compatible chat server over an engine that has none, so that the same load can be put on it as on Hocket.

Owns HTTP, the chat template and text. Runs in the peer's own environment, which needs `tokenizers` and `jinja2` beside the engine, and
knows nothing of Hocket. Greedy replies only, always streamed, always as long as `max_tokens` says.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

LINGER_SECONDS = (
    0.002  # after a reply's end, its client's next turn is about to arrive: a step begun now would make it wait for a whole one
)
TURNS_OF_THE_LOOP = 4  # between steps, so that requests are accepted and pieces are sent
HEAD = "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"

Gains = list[tuple[int, list[int], bool]]  # (request, tokens it gained, it has ended)


class Engine(Protocol):
    """What this front serves. Requests are numbered by the caller."""

    def add(self, request: int, ids: list[int], tokens: int) -> None:
        """Take a prompt of token ids that wants `tokens` more, whatever they are."""

    def step(self) -> Gains:
        """Compute for a moment and say what each request gained; called only while some request has not ended."""


class Text:
    """The text of tokens that come one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from the last place where tokens and characters began together
        self._sent = ""

    def push(self, ids: list[int]) -> str:
        """What the tokens add; nothing while a character is incomplete."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        added, self._sent = text[len(self._sent) :], text
        if len(self._ids) > 64:
            self._ids = self._ids[-1:]
            self._sent = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return added


class Front:
    """`folder`: a Hugging Face folder with the model's tokenizer and chat template."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(settings.pop("chat_template"))
        self._words = {name: value for name, value in settings.items() if name.endswith("_token")}
        self._numbers = itertools.count()
        self._live: dict[int, asyncio.Queue[tuple[list[int], bool]]] = {}
        self._asked = asyncio.Event()

    async def serve(self, port: int) -> None:
        """Until cancelled."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", port)
        sys.stdout.write(f"listening on http://127.0.0.1:{port}/v1\n")
        sys.stdout.flush()
        async with server:
            await self._work()

    async def _work(self) -> None:
        """Steps run in the loop itself: engines that hold the GIL while they compute would stop it anyway."""
        while True:
            if not self._live:
                self._asked.clear()
                await self._asked.wait()
            ended = False
            for request, ids, last in self._engine.step():
                self._live[request].put_nowait((ids, last))
                if last:
                    del self._live[request]
                    ended = True
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            if ended:
                await asyncio.sleep(LINGER_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            match method, path:
                case "GET", "/v1/models":
                    self._whole(writer, "200 OK", {"object": "list", "data": [{"id": "model", "object": "model"}]})
                case "POST", "/v1/chat/completions":
                    await self._chat(writer, body)
                case _:
                    self._whole(writer, "404 Not Found", {"error": {"message": f"expected /v1/chat/completions, got {method} {path}"}})
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away; its request runs to its end
        finally:
            writer.close()

    async def _chat(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        try:
            asked = json.loads(body)
            rows, tokens = asked["messages"], int(asked["max_tokens"])
            if asked.get("temperature") != 0 or not asked.get("ignore_eos") or not asked.get("stream"):
                raise ValueError("expected temperature 0, ignore_eos and stream, got another request")
            rendered = self._template.render(messages=rows, add_generation_prompt=True, **self._words)
        except Exception as fault:  # a template may run into any error
            self._whole(writer, "400 Bad Request", {"error": {"message": f"{type(fault).__name__}: {fault}"}})
            return
        ids = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        request, gained, text, count = next(self._numbers), asyncio.Queue[tuple[list[int], bool]](), Text(self._tokenizer), 0
        self._live[request] = gained
        self._engine.add(request, ids, tokens)
        self._asked.set()
        writer.write(HEAD.format(status="200 OK", kind="text/event-stream").encode())
        last = False
        while not last:
            new, last = await gained.get()
            count += len(new)
            if (piece := text.push(new)) or last:
                _event(writer, {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": "length" if last else None}]})
        _event(writer, {"choices": [], "usage": {"prompt_tokens": len(ids), "completion_tokens": count}})
        writer.write(b"data: [DONE]\n\n")

    def _whole(self, writer: asyncio.StreamWriter, status: str, content: dict[str, Any]) -> None:
        writer.write(HEAD.format(status=status, kind="application/json").encode() + json.dumps(content).encode())


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(content).encode() + b"\n\n")
