"""The protocols that a load can be spoken in: streaming chat completions over HTTP, and Responses over WebSocket.

Owns the wire. Light on purpose, since it shares the cores with the server it measures: bytes are taken as they arrive and only the fields
that count are decoded. (RFC 9112 for HTTP/1.1; the HTML standard's server-sent events; OpenAI's API reference)
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.load import LoadError, Turn

TIMEOUT_SECONDS = 900.0
EXCERPT = 500  # characters of a server's complaint that are shown


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Text(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text = _Text()


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _ResponseUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    input_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    id: str
    usage: _ResponseUsage | None = None
    error: Any = None


class _Event(msgspec.Struct):
    type: str
    delta: str = ""
    response: _Response | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk)
_event = msgspec.json.Decoder(_Event)


class Body:
    """The body of an HTTP response, out of bytes in any portions: plain until the connection ends, or in chunks. (RFC 9112, 7.1)"""

    def __init__(self) -> None:
        self.status = 0  # 0: the head is not complete
        self._chunked = False
        self._buffer = bytearray()

    def take(self, data: bytes) -> bytes:
        """What `data` adds to the body. Raises: LoadError for what is not HTTP/1.1"""
        self._buffer += data
        if not self.status and not self._head():
            return b""
        if not self._chunked:
            plain, self._buffer = bytes(self._buffer), bytearray()
            return plain
        body = bytearray()
        while (end := self._buffer.find(b"\r\n")) >= 0:
            try:
                size = int(self._buffer[:end].split(b";")[0], 16)
            except ValueError:
                raise LoadError(f"expected the size of a chunk, got {bytes(self._buffer[:end])!r}") from None
            if len(self._buffer) < end + size + 4:
                break
            body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + size + 4]
        return bytes(body)

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise LoadError(f"expected an HTTP/1.1 response, got {lines[0]!r}")
        self.status = int(rest[:3])
        self._chunked = any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in lines)
        del self._buffer[: end + 4]
        return True


class _Reply(asyncio.Protocol):
    """Turns the event stream that answers a request into a `Turn`; `done` ends with it."""

    def __init__(self, turn: Turn) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turn = turn
        self._body = Body()
        self._lines = bytearray()  # not complete yet

    def data_received(self, data: bytes) -> None:
        try:
            self._lines += self._body.take(data)
            if self._body.status not in (0, 200):
                return  # the whole complaint is shown once the connection ends
            while (end := self._lines.find(b"\n")) >= 0:
                line = bytes(self._lines[:end])
                del self._lines[: end + 1]
                if line.startswith(b"data:"):
                    self._take(line[5:].strip())
        except (LoadError, msgspec.MsgspecError) as fault:
            self._end(fault if isinstance(fault, LoadError) else LoadError(f"expected a chat completion's chunk, got {fault}"))

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._end(None)
            return
        chunk = _chunk.decode(event)
        if chunk.error:
            raise LoadError(f"expected a reply, got the error {str(chunk.error)[:EXCERPT]}")
        for choice in chunk.choices:
            if choice.delta.content:
                self._turn.piece(choice.delta.content)
        if chunk.usage:
            self._turn.tokens, self._turn.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            self._turn.cached_tokens = details.cached_tokens if details else None

    def connection_lost(self, fault: Exception | None) -> None:
        said = bytes(self._lines).decode(errors="replace").strip()[:EXCERPT]
        self._end(
            LoadError(f"expected a whole event stream, got status {self._body.status} and the end of the connection: {fault or said}")
        )

    def _end(self, fault: LoadError | None) -> None:
        if self.done.done():
            return
        if fault:
            self.done.set_exception(fault)
        else:
            self.done.set_result(None)


class ChatClient:
    """Each turn sends the whole chat so far, on a connection of its own."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port or 80, parts.path.rstrip("/").removesuffix("/v1")
        self._model = model
        self._messages: list[dict[str, str]] = []

    async def ask(self, question: str, tokens: int, turn: Turn) -> None:
        self._messages.append({"role": "user", "content": question})
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = self._head("POST", "/v1/chat/completions", msgspec.json.encode(body))
        transport, reply = await asyncio.get_running_loop().create_connection(lambda: _Reply(turn), self._host, self._port)
        transport.write(request)
        try:
            await asyncio.wait_for(reply.done, TIMEOUT_SECONDS)
        except TimeoutError:
            raise LoadError(f"expected a reply within {TIMEOUT_SECONDS:.0f} s, got {len(turn.pieces)} pieces of one") from None
        finally:
            transport.close()
        self._messages.append({"role": "assistant", "content": turn.text})

    async def close(self) -> None:
        """Nothing is open between turns."""

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


class ResponsesClient:
    """One WebSocket for the conversation; each turn sends its question only, and the id of the response it follows."""

    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url.replace('http', 'ws', 1).rstrip('/').removesuffix('/v1')}/v1/responses"
        self._model = model
        self._socket: ClientConnection | None = None
        self.previous: str | None = None  # the response that the next turn follows

    async def open(self) -> None:
        if self._socket is None:
            self._socket = await connect(self._url, compression=None)

    async def ask(self, question: str, tokens: int, turn: Turn) -> None:
        await self.open()
        assert self._socket
        create = {
            "type": "response.create",
            "model": self._model,
            "input": question,
            "previous_response_id": self.previous,
            "max_output_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        await self._socket.send(msgspec.json.encode(create).decode())
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not self._take(_event.decode(await self._socket.recv(decode=False)), turn):
                pass

    async def stop(self) -> None:
        """End the reply that `ask` waits for."""
        assert self._socket
        await self._socket.send('{"type": "response.cancel"}')

    def _take(self, event: _Event, turn: Turn) -> bool:
        """Whether the reply has ended."""
        if event.type == "response.output_text.delta":
            if event.delta:
                turn.piece(event.delta)
            return False
        if event.type in ("error", "response.failed"):
            complaint = event.response.error if event.response else event.error
            raise LoadError(f"expected a reply, got {event.type}: {str(complaint)[:EXCERPT]}")
        if event.type not in ("response.completed", "response.incomplete"):  # a reply as long as it may be is incomplete
            return False
        assert event.response
        self.previous = event.response.id
        if usage := event.response.usage:
            turn.tokens, turn.prompt_tokens = usage.output_tokens, usage.input_tokens
            turn.cached_tokens = usage.input_tokens_details.cached_tokens if usage.input_tokens_details else None
        return True

    async def close(self) -> None:
        if self._socket:
            await self._socket.close()


CLIENTS: dict[str, type[ChatClient] | type[ResponsesClient]] = {"chat": ChatClient, "responses": ResponsesClient}
