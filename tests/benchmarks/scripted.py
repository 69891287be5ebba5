"""A peer in a process of its own, for tests that end one: lists a model, and answers each chat as `peer.says` does.

python -m tests.benchmarks.scripted PORT [CHATS]      # dies in the middle of the reply after so many
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tests.benchmarks.peer import piece, says

MODELS = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{"data": [{"id": "a model"}]}'


async def main(port: int, chats: int | None = None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal chats
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(MODELS)
        else:
            lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            portions = [*says(json.loads(await reader.readexactly(int(lengths[0]))))]
            if chats == 0:
                writer.write(portions[0] + piece("cut"))
                await writer.drain()
                os._exit(1)
            chats = None if chats is None else chats - 1
            for portion in portions:
                writer.write(portion)
                await asyncio.sleep(0.001)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
