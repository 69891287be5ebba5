"""The chat page's files: from the installed package, or from the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles


class FreshFiles(StaticFiles):
    """Files that a browser asks about each time (it has their ETag): modules of two versions never meet after an upgrade."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"
        return response


def folder() -> Path:
    installed = Path(__file__).parent / "static"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "static"


def routes() -> list[BaseRoute]:
    """`/` and the deep links `/c/<conversation>` give the page; it reads its own address."""
    files = folder()

    async def page(_: Request) -> Response:
        return FileResponse(files / "index.html", headers={"Cache-Control": "no-cache"})

    return [Route("/", page), Route("/c/{id}", page), Mount("/static", FreshFiles(directory=files))]
