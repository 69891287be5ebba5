"""A peer made of a script: an HTTP server on loopback that answers each chat with bytes of the test's choosing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

Answer = Callable[[dict[str, Any]], Iterator[bytes]]  # a chat's body -> what is written, portion by portion


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **details})


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def says(body: dict[str, Any]) -> Iterator[bytes]:
    """As many words as are asked for, the number of messages first."""
    words = [f"{len(body['messages'])}", *(f" word{at}" for at in range(1, body["max_tokens"]))]
    yield PLAIN
    yield from map(piece, words)
    yield usage(10 * len(body["messages"]), len(words), cached=5 * (len(body["messages"]) - 1)) + DONE


@asynccontextmanager
async def peer(answer: Answer = says) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and the bodies it was sent."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        bodies.append(json.loads(await reader.readexactly(length)))
        for portion in answer(bodies[-1]):
            writer.write(portion)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies
