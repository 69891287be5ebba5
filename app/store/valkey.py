"""The log in Redis or Valkey, over redis-py's asyncio client.

Owns the keys (`docs/store.md` lists them) and the transactions. Uses no scripting and nothing newer than Redis 6.2. Knows not who
runs the server: `embedded.py` does by default, an operator with `--redis-url`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError, WatchError

from app.store import IDEMPOTENCY_SECONDS, GoneError, RefusedError, StoreError
from app.store.records import Conversation, Entry, Item, Record, RecordError, Response, decode, encode

EPOCH = 1  # first half of a log entry's id; the second is the entry's index
MAX_CONNECTIONS = 16
ANSWER_SECONDS = 15.0  # longest wait for an answer, a slow disk's sync included
CONNECT_SECONDS = 5.0
RACES = 16  # attempts at a watched transaction before giving up

OPEN = b"hocket:open"  # sorted set of the ids of open responses, scored by created_at
EXPIRING = b"hocket:expiring"  # sorted set of the ids of responses that do not last, scored by expires_at

T = TypeVar("T")


def connect(url: str) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://` that never sends a command twice.

    redis-py's own retry resends a write whose answer was lost; here the caller learns of it as a StoreError instead.

    Raises: ValueError when the address is of another kind.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=ANSWER_SECONDS,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)


class ValkeyStore:
    """The `Store` protocol on a Redis or Valkey server. Owns the client it is given: `close` closes it."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client  # redis-py's types leave open whether an answer is text or bytes, and awaited or not

    async def create_conversation(self, conversation: Conversation, items: Sequence[Item] = ()) -> None:
        with _faults("create a conversation"):
            async with self._client.pipeline() as transaction:
                _put_conversation(transaction, conversation)
                _put_items(transaction, conversation, items)
                await transaction.execute()

    async def conversation(self, id: str) -> Conversation | None:
        with _faults("read a conversation"):
            return _decoded(await self._client.get(_conversation(id)), Conversation)

    async def update_conversation(self, conversation: Conversation) -> None:
        with _faults("update a conversation"):
            async with self._client.pipeline() as transaction:
                _put_conversation(transaction, conversation, existing=True)
                await transaction.execute()

    async def conversations(self, owner: str, limit: int, after: str | None = None) -> list[Conversation]:
        if limit < 1:
            return []
        with _faults("list conversations"):
            start = 0
            if after is not None:
                rank = await self._client.zrevrank(_list(owner), _bytes(after))
                if rank is None:
                    return []
                start = rank + 1
            ids = await self._client.zrevrange(_list(owner), start, start + limit - 1)
            return await self._records([_conversation(id.decode()) for id in ids], Conversation)

    async def delete_conversation(self, conversation: Conversation) -> None:
        """A turn accepted meanwhile (it changes the watched set of responses) is deleted as well, on the next attempt."""
        await self._watching("delete a conversation", lambda transaction: self._delete(transaction, conversation))

    async def _delete(self, transaction: Any, conversation: Conversation) -> None:
        await transaction.watch(_responses(conversation.id))
        ids = [id.decode() for id in await transaction.smembers(_responses(conversation.id))]
        responses = [_decoded(await transaction.get(_response(id)), Response) for id in ids]
        once = {_once(r.owner, r.client_message_id): r.id for r in responses if r is not None and r.client_message_id is not None}
        if once:
            await transaction.watch(*once)
        # Older than a day, a response's message id may name a younger response of another conversation by now.
        ours = [key for key, id in once.items() if await transaction.get(key) == _bytes(id)]

        transaction.multi()
        for id in ids:
            transaction.unlink(_response(id), _log(id))
            transaction.zrem(OPEN, _bytes(id))
            transaction.zrem(EXPIRING, _bytes(id))
        transaction.unlink(_conversation(conversation.id), _items(conversation.id), _responses(conversation.id), *ours)
        transaction.zrem(_list(conversation.owner), _bytes(conversation.id))
        await transaction.execute()

    async def items(self, conversation: str) -> dict[str, Item]:
        with _faults("read a conversation's items"):
            records = await self._client.hgetall(_items(conversation))
            return {id.decode(): decode(record, Item) for id, record in records.items()}

    async def put_items(self, conversation: Conversation, items: Sequence[Item], unsaid: Sequence[str] = ()) -> None:
        async def put(transaction: Any) -> None:
            await transaction.watch(_conversation(conversation.id))
            if not await transaction.exists(_conversation(conversation.id)):
                return
            transaction.multi()
            _put_conversation(transaction, conversation, existing=True)
            _put_items(transaction, conversation, items)
            for response in unsaid:
                transaction.xtrim(_log(response), maxlen=0, approximate=False)
            await transaction.execute()

        await self._watching("write a conversation's items", put)

    async def accept(
        self, conversation: Conversation, response: Response, items: Sequence[Item], existing: bool = False
    ) -> Response | None:
        return await self._watching("accept a turn", lambda transaction: self._accept(transaction, conversation, response, items, existing))

    async def _accept(
        self, transaction: Any, conversation: Conversation, response: Response, items: Sequence[Item], existing: bool
    ) -> Response | None:
        key = None if response.client_message_id is None else _once(response.owner, response.client_message_id)
        if key is not None:
            await transaction.watch(key)
            earlier = await _holder(transaction, key)
            if earlier is not None:
                # Our own id: an attempt before this one was written and only its answer was lost.
                return None if earlier.id == response.id else earlier
        if existing:
            followed = _response(response.previous) if response.previous else _conversation(conversation.id)
            await transaction.watch(followed)
            if not await transaction.exists(followed):
                raise GoneError("what the turn follows was deleted meanwhile")

        transaction.multi()
        _put_conversation(transaction, conversation)
        _put_items(transaction, conversation, items)
        transaction.sadd(_responses(conversation.id), _bytes(response.id))
        transaction.set(_response(response.id), encode(response))
        # The log starts with an entry of index 0, so that appending can ask for a log that exists: a deleted one stays deleted.
        transaction.xadd(_log(response.id), {b"e": b""}, id=f"{EPOCH}-0")
        transaction.zadd(OPEN, {_bytes(response.id): response.created_at})
        if response.expires_at is not None:
            transaction.zadd(EXPIRING, {_bytes(response.id): response.expires_at})
        if key is not None:
            transaction.set(key, _bytes(response.id), ex=IDEMPOTENCY_SECONDS)
        await transaction.execute()
        return None

    async def repeated(self, owner: str, client_message_id: str) -> Response | None:
        with _faults("look up a message id"):
            return await _holder(self._client, _once(owner, client_message_id))

    async def append(self, batch: Sequence[tuple[str, int, Entry]]) -> None:
        if not batch:
            return
        with _faults("append to a reply"):
            async with self._client.pipeline(transaction=False) as pipeline:
                for response, index, entry in batch:
                    pipeline.xadd(_log(response), {b"e": encode(entry)}, id=f"{EPOCH}-{index}", nomkstream=True)
                answers = await pipeline.execute(raise_on_error=False)
        refused = {}
        for (response, index, _), answer in zip(batch, answers, strict=True):
            if answer is None:
                refused[response] = f"{response} is not in the log"
            elif isinstance(answer, ResponseError) and "equal or smaller" in str(answer):
                refused[response] = f"{response}: expected an index above the last one, got {index}"
            elif isinstance(answer, Exception):
                raise StoreError(f"the log could not append to a reply: {answer}") from answer
        if refused:
            raise RefusedError("; ".join(refused.values()), frozenset(refused))

    async def entries(self, response: str, after: int = 0) -> list[Entry]:
        with _faults("read a reply"):
            found = await self._client.xrange(_log(response), min=f"({EPOCH}-{max(0, after)}")
            return [decode(fields[b"e"], Entry) for _, fields in found]

    async def finish(self, response: Response, reply: Item) -> None:
        async def end(transaction: Any) -> None:  # writing the same end twice is writing it once
            await transaction.watch(_response(response.id))
            if not await transaction.exists(_response(response.id)):
                return
            transaction.multi()
            transaction.set(_response(response.id), encode(response))
            transaction.hset(_items(response.conversation), _bytes(reply.id), encode(reply))
            transaction.zrem(OPEN, _bytes(response.id))
            await transaction.execute()

        await self._watching("finish a reply", end)

    async def response(self, id: str) -> Response | None:
        with _faults("read a response"):
            return _decoded(await self._client.get(_response(id)), Response)

    async def delete_response(self, response: Response) -> None:
        await self._watching("delete a response", lambda transaction: self._delete_response(transaction, response))

    async def _delete_response(self, transaction: Any, response: Response) -> None:
        await transaction.watch(_responses(response.conversation))
        conversation = _decoded(await transaction.get(_conversation(response.conversation)), Conversation)
        others = await transaction.smembers(_responses(response.conversation)) - {_bytes(response.id)}
        if conversation and not conversation.listed and not others:
            await self._delete(transaction, conversation)
            return
        once = _once(response.owner, response.client_message_id) if response.client_message_id is not None else None
        if once is not None:
            await transaction.watch(once)
            if await transaction.get(once) != _bytes(response.id):  # it names a younger response by now
                once = None
        transaction.multi()
        transaction.unlink(_response(response.id), _log(response.id), *([once] if once is not None else []))
        transaction.srem(_responses(response.conversation), _bytes(response.id))
        transaction.zrem(OPEN, _bytes(response.id))
        transaction.zrem(EXPIRING, _bytes(response.id))
        await transaction.execute()

    async def expired(self, now: float, limit: int) -> list[Response]:
        with _faults("read the responses that have expired"):
            ids = await self._client.zrangebyscore(EXPIRING, "-inf", f"({now}", 0, limit)
            return await self._records([_response(id.decode()) for id in ids], Response)

    async def open_responses(self) -> list[Response]:
        with _faults("read the open responses"):
            ids = await self._client.zrange(OPEN, 0, -1)
            return await self._records([_response(id.decode()) for id in ids], Response)

    async def ping(self) -> None:
        with _faults("be reached"):
            await self._client.ping()

    async def close(self) -> None:
        with _faults("be closed"):
            await self._client.aclose()

    async def _watching(self, action: str, attempt: Callable[[Any], Awaitable[T]]) -> T:
        """What `attempt` makes of a transaction that watches what it looks at: again if that has changed, or the connection was lost."""
        with _faults(action):
            async with self._client.pipeline() as transaction:
                for _ in range(RACES):
                    with suppress(WatchError):
                        return await attempt(transaction)
        raise StoreError(f"the log could not {action}: what it looked at changed {RACES} times meanwhile")

    async def _records(self, keys: list[bytes], kind: type[Record]) -> list[Record]:
        """The records that are still there, in the order of their keys."""
        found = await self._client.mget(keys) if keys else []
        return [decode(data, kind) for data in found if data is not None]


async def _holder(client: Any, once: bytes) -> Response | None:
    """The response that an idempotency key names."""
    id = await client.get(once)
    return None if id is None else _decoded(await client.get(_response(id.decode())), Response)


def _put_conversation(transaction: Any, conversation: Conversation, existing: bool = False) -> None:
    transaction.set(_conversation(conversation.id), encode(conversation), xx=existing)
    if conversation.listed:
        transaction.zadd(_list(conversation.owner), {_bytes(conversation.id): conversation.updated_at}, xx=existing)


def _put_items(transaction: Any, conversation: Conversation, items: Sequence[Item]) -> None:
    if items:
        transaction.hset(_items(conversation.id), mapping={_bytes(item.id): encode(item) for item in items})


# Keys. An id in braces is a cluster's hash tag: what shares it shares a slot. Ids come from outside and may hold any character,
# a lone surrogate included, which must read as an id that never was; every key ends where its id cannot be mistaken for more.


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _conversation(id: str) -> bytes:
    return b"hocket:conversation:{%b}" % _bytes(id)


def _items(conversation: str) -> bytes:
    return b"hocket:conversation:{%b}:items" % _bytes(conversation)


def _responses(conversation: str) -> bytes:
    return b"hocket:conversation:{%b}:responses" % _bytes(conversation)


def _response(id: str) -> bytes:
    return b"hocket:response:{%b}" % _bytes(id)


def _log(response: str) -> bytes:
    return b"hocket:response:{%b}:log" % _bytes(response)


def _list(owner: str) -> bytes:
    return b"hocket:owner:{%b}:conversations" % _bytes(owner)


def _once(owner: str, message_id: str) -> bytes:
    name = _bytes(owner)
    return b"hocket:once:%d:%b:%b" % (len(name), name, _bytes(message_id))  # the length: (a:b, c) and (a, b:c) are two keys


# Reading


@contextmanager
def _faults(action: str) -> Iterator[None]:
    """Every fault of the server, the connection or a record becomes a StoreError that says what could not be done."""
    try:
        yield
    except (RedisError, RecordError, OSError) as fault:
        raise StoreError(f"the log could not {action}: {fault or type(fault).__name__}") from fault


def _decoded(data: bytes | None, kind: type[Record]) -> Record | None:
    return None if data is None else decode(data, kind)
