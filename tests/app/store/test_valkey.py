"""What only the durable store can get wrong: connections, expiry, what is left in the server, foreign bytes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from app.store import IDEMPOTENCY_SECONDS, StoreError
from app.store.memory import MemoryStore
from app.store.records import Entry
from app.store.valkey import ValkeyStore, connect
from tests.app.store.test_contract import conversation, reply, turn


async def test_message_ids_expire_in_a_day(valkey: ValkeyStore) -> None:
    thread = conversation()
    await valkey.accept(thread, *turn(thread, "m1"))
    (key,) = await valkey._client.keys("hocket:once:*")
    assert IDEMPOTENCY_SECONDS - 60 < await valkey._client.ttl(key) <= IDEMPOTENCY_SECONDS == 24 * 3600


async def test_message_ids_expire_in_memory_too() -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    thread = conversation()
    first, _ = turn(thread, "m1")
    await store.accept(thread, first, [])
    now = IDEMPOTENCY_SECONDS - 1
    assert await store.accept(thread, turn(thread, "m1")[0], []) == first
    now = IDEMPOTENCY_SECONDS + 1
    assert await store.accept(thread, turn(thread, "m1")[0], []) is None


async def test_deleting_keeps_a_message_id_that_names_a_younger_response(valkey: ValkeyStore) -> None:
    old, young = conversation(), conversation()
    await valkey.accept(old, *turn(old, "m1"))
    await valkey._client.delete(*await valkey._client.keys("hocket:once:*"))  # as a day does
    response, items = turn(young, "m1")
    await valkey.accept(young, response, items)
    await valkey.delete_conversation(old)
    assert await valkey.accept(young, *turn(young, "m1")) == response


async def test_a_deleted_conversation_leaves_no_key(valkey: ValkeyStore) -> None:
    thread = conversation()
    response, items = turn(thread, "m1")
    await valkey.accept(thread, response, items)
    await valkey.append([(response.id, 1, Entry([1], "a"))])
    await valkey.finish(response, reply(response))
    second, _ = turn(thread, "m2")
    await valkey.accept(thread, second, [])
    assert await valkey._client.dbsize() > 0
    await valkey.delete_conversation(thread)
    assert await valkey._client.keys("*") == []


async def test_a_turn_accepted_while_its_conversation_is_deleted_goes_with_it_or_stays_whole(valkey: ValkeyStore) -> None:
    for _ in range(20):
        thread = conversation()
        await valkey.accept(thread, *turn(thread))
        late, items = turn(thread, "late")
        await asyncio.gather(valkey.delete_conversation(thread), valkey.accept(thread, late, items))
        if await valkey.response(late.id) is None:
            assert await valkey._client.keys("*") == []
        else:
            assert await valkey.open_responses() == [late]
            assert await valkey.items(thread.id) == {items[0].id: items[0]}
            await valkey.delete_conversation(thread)


async def test_a_lost_answer_to_accept_is_looked_up(valkey: ValkeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after the server ran the transaction and before it could say so: still one response, and it is ours."""
    thread = conversation()
    response, items = turn(thread, "m1")
    pool = valkey._client.connection_pool
    async with valkey._client.pipeline() as pipeline:
        kind = type(pipeline)
    original = kind._execute_transaction
    losses = 0

    async def lose_the_first_answer(self: object, connection: object, *rest: object) -> object:
        nonlocal losses
        answer = await original(self, connection, *rest)
        if losses == 0:
            losses += 1
            self.watching = True  # type: ignore[attr-defined]  # as it is until EXEC's answer is read
            raise RedisConnectionError("Connection lost")
        return answer

    monkeypatch.setattr(kind, "_execute_transaction", lose_the_first_answer)
    assert await valkey.accept(thread, response, items) is None
    assert losses == 1
    assert await valkey.open_responses() == [response]
    assert pool._in_use_connections == set()


async def test_writes_are_never_sent_twice(valkey_url: str) -> None:
    """redis-py resends by default. A server that swallows a command and hangs up gets it once."""
    seen = bytearray()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            if b"XADD" in data:
                seen.extend(data)
                break
            writer.write(b"+OK\r\n" * data.count(b"*"))
        writer.close()

    path = Path(valkey_url.removeprefix("unix://")).with_name("swallows")
    async with await asyncio.start_unix_server(hang_up, path):
        store = ValkeyStore(connect(f"unix://{path}"))
        with pytest.raises(StoreError, match="append to a reply"):
            await store.append([("r", 1, Entry([1], "a"))])
        await store.close()
    assert seen.count(b"XADD") == 1


async def test_no_server_is_a_clear_error(tmp_path: Path) -> None:
    store = ValkeyStore(connect(f"unix://{tmp_path}/none"))
    thread = conversation()
    response, items = turn(thread, "m1")
    for attempt in (
        store.ping(),
        store.conversation("x"),
        store.items("x"),
        store.entries("x"),
        store.open_responses(),
        store.conversations("x", 1),
        store.create_conversation(thread),
        store.update_conversation(thread),
        store.accept(thread, response, items),
        store.append([("r", 1, Entry([], ""))]),
        store.finish(response, reply(response)),
        store.delete_conversation(thread),
    ):
        with pytest.raises(StoreError, match=r"the log could not \w+.*: .*none"):
            await attempt
    await store.close()


async def test_foreign_and_later_records_are_named(valkey: ValkeyStore) -> None:
    await valkey._client.set("hocket:response:{r}", b"not msgpack")
    with pytest.raises(StoreError, match="expected a stored Response"):
        await valkey.response("r")
    thread = conversation()
    thread.version = 2
    await valkey.create_conversation(thread)
    with pytest.raises(StoreError, match="version 1, got version 2"):
        await valkey.conversation(thread.id)
    await valkey._client.set("hocket:conversation:{c}:items", b"a string")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await valkey.items("c")


async def test_many_at_once_share_few_connections(valkey: ValkeyStore) -> None:
    thread = conversation()
    turns = [turn(thread, f"m{n}") for n in range(100)]
    await asyncio.gather(*(valkey.accept(thread, *one) for one in turns))
    assert len(await valkey.open_responses()) == 100
    assert len(await valkey._client.client_list()) <= 17


async def test_an_abandoned_command_does_not_mix_up_answers(valkey: ValkeyStore) -> None:
    threads = [conversation() for _ in range(8)]
    for thread in threads:
        await valkey.create_conversation(thread)
    for delay in range(30):
        reads = [asyncio.create_task(valkey.conversation(thread.id)) for thread in threads]
        for _ in range(delay % 6):
            await asyncio.sleep(0)
        reads[delay % 8].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reads[delay % 8]
        for thread, read in zip(threads, reads, strict=True):
            if not read.cancelled():
                assert await read == thread


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        connect("http://localhost")
