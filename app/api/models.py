"""`GET /v1/models`, and which names a request may ask for."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.errors import ApiError
from app.refusal import json_response
from engine.batcher import Batcher


class Models:
    """The one model served, under its own name or the operator's alias."""

    def __init__(self, batcher: Batcher, alias: str | None = None) -> None:
        self._batcher = batcher
        self._alias = alias
        self._created = int(time.time())
        self.routes = [Route("/v1/models", self._list), Route("/v1/models/{id:path}", self._one)]

    @property
    def name(self) -> str:
        """Raises: NotReadyError"""
        return self._alias or self._batcher.ready().model

    def served(self, asked: str | None) -> str:
        """The served name for the one asked for; None means whatever is served. Raises: NotReadyError, ApiError"""
        name = self.name
        if asked is not None and asked not in (name, self._batcher.ready().model):
            raise ApiError(f"expected model {name!r}, got {asked[:80]!r}", "model", "model_not_found", 404)
        return name

    async def _list(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._object()]})

    async def _one(self, request: Request) -> Response:
        self.served(request.path_params["id"])
        return json_response(self._object())

    def _object(self) -> dict[str, object]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "hocket"}
