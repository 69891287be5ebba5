"""`/healthz` (the process answers) and `/readyz` (a request would be served now)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.models import Models
from app.refusal import json_response
from app.store import Store, StoreError
from engine.batcher import Batcher, Failed, Loading


class Health:
    def __init__(self, batcher: Batcher, store: Store, models: Models) -> None:
        self._batcher = batcher
        self._store = store
        self._models = models
        self.routes = [Route("/healthz", self._alive), Route("/readyz", self._ready)]

    async def _alive(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        match self._batcher.state:
            case Loading(stage, fraction):
                return json_response({"status": "loading", "stage": stage, "fraction": fraction}, 503)
            case Failed(error):
                return json_response({"status": "failed", "error": error}, 503)
        if not self._batcher.responsive:
            return json_response({"status": "failed", "error": "the engine thread does not answer"}, 503)
        try:
            await self._store.ping()
        except StoreError as fault:
            return json_response({"status": "failed", "error": f"the conversation log does not answer: {fault}"}, 503)
        return json_response({"status": "ready", "model": self._models.name, "live": self._batcher.live})
