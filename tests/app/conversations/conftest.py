"""The domain on a real Valkey and a real engine with a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from app.conversations.service import Conversations
from app.store.valkey import ValkeyStore, connect
from engine.batcher import Batcher
from engine.core import EngineOptions
from tests.app.conversations import hostile
from tests.app.store.conftest import valkey_url

__all__ = ["valkey_url"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batcher(tiny_folder: Path) -> AsyncIterator[Batcher]:
    made = Batcher(EngineOptions(model=str(tiny_folder), cache_dir=tiny_folder.parent / "cache", kernels="reference", threads=1))
    made.start()
    await made.settled()
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hostile_batcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Batcher]:
    folder = hostile.write_folder(tmp_path_factory.mktemp("hostile") / "model")
    options = EngineOptions(model=str(folder), cache_dir=folder.parent / "cache", kernels="reference", threads=1, max_total_tokens=1 << 17)
    made = Batcher(options)  # a pool that need not forget
    made.start()
    await made.settled()
    yield made
    await made.close()


@pytest.fixture
def new_conversations(batcher: Batcher) -> Callable[[object], Conversations]:
    return lambda store: Conversations(store, batcher, lambda owner: owner.encode())  # type: ignore[arg-type]


@pytest_asyncio.fixture(loop_scope="module")
async def valkey(valkey_url: str) -> AsyncIterator[ValkeyStore]:
    client = connect(valkey_url)
    await client.flushall()
    store = ValkeyStore(client)
    yield store
    await store.close()


@pytest_asyncio.fixture(loop_scope="module")
async def conversations(valkey: ValkeyStore, new_conversations: Callable[[object], Conversations]) -> AsyncIterator[Conversations]:
    made = new_conversations(valkey)
    yield made
    await made.close()
