"""The ASGI application: routes and lifespan, nothing else."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from app import page
from app.api.chat_completions import ChatCompletions
from app.api.completions import Completions
from app.api.conversations import ConversationsApi
from app.api.errors import ApiError, refusal
from app.api.generate import Generate
from app.api.health import Health
from app.api.models import Models
from app.api.realtime.http import Realtime
from app.api.responses.http import Responses
from app.conversations.errors import ConversationError
from app.conversations.segment_file import SegmentFile
from app.conversations.segments import Segments
from app.conversations.service import Conversations
from app.ephemeral import EphemeralKeys
from app.refusal import Refusal
from app.request_ids import RequestIds
from app.security import Guard
from app.settings import Settings
from app.store import Store, StoreError
from app.store.embedded import EmbeddedServer
from app.store.memory import MemoryStore
from app.store.valkey import ValkeyStore, connect
from engine.batcher import Batcher
from engine.core import EngineError, EngineOptions

log = logging.getLogger(__name__)


def create_app(settings: Settings) -> ASGIApp:
    ephemeral_keys = EphemeralKeys()  # issued and accepted by this process alone

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with _opened_store(settings) as store, _opened_segments(settings) as segments:
            batcher = Batcher(engine_options(settings))
            conversations = Conversations(store, batcher, _salts(settings), segments)
            cut = await conversations.recover()
            if cut:
                log.info("%d replies were cut when the server last ended; they are kept, marked incomplete", cut)
            models = Models(batcher, settings.model_name)
            adapters = (
                Responses(conversations, models),
                Realtime(conversations, models, ephemeral_keys),
                ChatCompletions(conversations, models),
                Completions(conversations, models, batcher),
                Generate(conversations, models),
                ConversationsApi(conversations),
                models,
                Health(batcher, store, models),
            )
            app.router.routes += [route for adapter in adapters for route in adapter.routes] + page.routes()
            batcher.start()
            try:
                # For the process. Runs are ended before it closes connections, which then wait for nothing.
                yield {"settled": batcher.settled, "end_runs": conversations.close}
            finally:
                await conversations.close()
                await batcher.close()

    refused = (ApiError, ConversationError, EngineError, StoreError, Exception)
    handlers = {HTTPException: _answer_http} | dict.fromkeys(refused, _answer)
    app = Starlette(lifespan=lifespan, exception_handlers=handlers)
    app.state.max_body_bytes = settings.max_frame_bytes
    return RequestIds(Guard(app, settings.hosts, settings.allowed_origins, settings.keys(ephemeral_keys)))


@asynccontextmanager
async def _opened_store(settings: Settings) -> AsyncIterator[Store]:
    if settings.store == "memory":
        yield MemoryStore()
        return
    if settings.redis_url:
        async with _connected(settings.redis_url) as store:
            yield store
        return
    async with EmbeddedServer(settings.data_dir) as server, _connected(server.url) as store:
        yield store


@asynccontextmanager
async def _opened_segments(settings: Settings) -> AsyncIterator[Segments]:
    """They outlive the process where its KV does."""
    if settings.offload_dir is None:
        yield Segments()
        return
    with closing(SegmentFile(settings.offload_dir)) as file:
        yield Segments(file=file)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Store]:
    store = ValkeyStore(connect(url))
    try:
        await store.ping()
        yield store
    finally:
        await store.close()


_LONG_NAMES = {"bf16": "bfloat16"}


def engine_options(settings: Settings) -> EngineOptions:
    return EngineOptions(
        model=settings.model,
        cache_dir=settings.cache_dir,
        kernels=settings.kernels,
        weights=_LONG_NAMES.get(settings.weights, settings.weights),
        kv_dtype=_LONG_NAMES.get(settings.kv_dtype or "", settings.kv_dtype or ""),
        exact=settings.exact,
        threads=settings.threads,
        max_batch_size=settings.max_batch_size,
        max_step_tokens=settings.max_step_tokens,
        lone_step_tokens=settings.lone_step_tokens,
        max_total_tokens=settings.max_total_tokens,
        block_size=settings.block_size,
        max_queue=settings.max_queue,
        schedule_policy=settings.schedule_policy,
        batch_window_ms=settings.batch_window_ms,
        max_step_ms=settings.max_step_ms,
        swap_space=settings.swap_gib,
        offload_dir=settings.offload_dir,
        shared_prefixes=settings.shared_prefixes,
    )


def _salts(settings: Settings) -> Callable[[str], bytes]:
    """Each owner's root for prefix blocks: derived from a secret that no client sees, so that none can choose or guess another's."""
    # Beside the log, or where there is none that lasts, beside the KV that is found by it.
    folder = settings.offload_dir if settings.store == "memory" else settings.data_dir
    secret = _kept_secret(folder / "secret") if folder else secrets.token_bytes(32)
    return lambda owner: hmac.digest(secret, owner.encode(), hashlib.sha256)


def _kept_secret(path: Path) -> bytes:
    """The folder's secret, made at the first start; written whole before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        draft = path.with_suffix(".new")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            os.fsync(file.fileno())
        draft.replace(path)
    return path.read_bytes()


async def _answer(_: Request, fault: Exception) -> Response:
    return refusal(fault).response()


async def _answer_http(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    words = {404: f"{request.url.path} does not exist", 405: f"{request.method} is not allowed on {request.url.path}"}
    code = "not_found" if fault.status_code == 404 else None
    answer = Refusal(fault.status_code, words.get(fault.status_code, fault.detail), code).response()
    answer.headers.update(fault.headers or {})
    if fault.status_code == 405:
        answer.headers["allow"] = ", ".join(_allowed(request))
    return answer


def _allowed(request: Request) -> list[str]:
    """The methods of a path: each has a route of its own."""
    found = [route for route in request.app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})
