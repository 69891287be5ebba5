"""Responses over WebSocket: one connection, its lanes, its cursors.

Owns the order of a connection: frames of one lane run first in, first out; lanes run side by side. One task reads frames and never waits
for a reply (a server that stops reading sees no cancel and no pong); each lane's task submits its next frame, then follows that run and
sends its events. A lane that cannot send waits for its socket and holds back nobody: the run goes on and stays in the log. A connection's
end stops no stored run.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.decoding import decode
from app.api.errors import ApiError, refusal
from app.api.models import Models
from app.api.responses.events import follow
from app.api.responses.schema import ClientEvent, ResponseCancel, ResponseCreate, read_create
from app.conversations.run import Run
from app.conversations.service import Conversations, Shelf

log = logging.getLogger(__name__)

MAX_LANES = 16  # with a response in progress
MAX_WAITING_BYTES = 8 << 20  # of frames that wait for their turn, on all lanes
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(slots=True)
class Lane:
    stream_id: str | None  # None: the default lane
    waiting: deque[str | bytes] = field(default_factory=deque)
    run: Run | None = None  # in progress, once accepted
    cancelled: bool = False  # the response in progress was cancelled, perhaps before it was accepted
    task: asyncio.Task[None] | None = None


class ResponsesSocket:
    def __init__(self, socket: WebSocket, owner: str, conversations: Conversations, models: Models) -> None:
        self._socket = socket
        self._owner = owner
        self._conversations = conversations
        self._models = models
        self._scratch = Shelf.scratch()  # what `store: false` keeps
        self._lanes: dict[str | None, Lane] = {}
        self._sending = asyncio.Lock()
        self._left = False

    async def serve(self) -> None:
        """Until the client goes."""
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._take(message.get("text") or message.get("bytes") or "")
        except WebSocketDisconnect:
            return
        finally:
            await self._leave()

    async def _take(self, frame: str | bytes) -> None:
        stream_id = None
        try:
            event = decode(frame, ClientEvent)
            stream_id = _checked_stream_id(event.stream_id)
            match event.type:
                case "response.create":
                    self._queue(stream_id, frame)
                case "response.cancel":
                    await self._cancel(stream_id, decode(frame, ResponseCancel))
                case _:
                    raise ApiError(f"expected an event of type response.create or response.cancel, got {event.type[:80]!r}", "type")
        except Exception as fault:
            await self._refuse(fault, stream_id)

    def _queue(self, stream_id: str | None, frame: str | bytes) -> None:
        waiting = sum(len(frame) for lane in self._lanes.values() for frame in lane.waiting)
        if waiting + len(frame) > MAX_WAITING_BYTES:
            raise ApiError(f"expected at most {MAX_WAITING_BYTES} bytes to wait for their turn, got more", None, "rate_limit_exceeded", 429)
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise ApiError(
                    f"expected responses in progress on at most {MAX_LANES} lanes, got one more",
                    "stream_id",
                    "websocket_stream_limit_reached",
                )
            lane = self._lanes[stream_id] = Lane(stream_id)
            lane.task = asyncio.create_task(self._work(lane), name=f"lane {stream_id}")
        lane.waiting.append(frame)

    async def _work(self, lane: Lane) -> None:
        """Run the lane's frames one after the other; the lane is gone when none waits."""
        try:
            while lane.waiting:
                frame = lane.waiting.popleft()
                try:
                    await self._respond(lane, read_create(frame))
                except WebSocketDisconnect:
                    raise
                except Exception as fault:
                    await self._refuse(fault, lane.stream_id)
                finally:
                    lane.run, lane.cancelled = None, False
        except WebSocketDisconnect:
            pass  # the reader sees it too, and cleans up
        finally:
            self._lanes.pop(lane.stream_id, None)

    async def _respond(self, lane: Lane, request: ResponseCreate) -> None:
        request.background = None  # someone is here and waits
        turn = request.turn(self._owner, self._models.served(request.model))
        run = lane.run = await self._conversations.submit(turn, self._scratch)
        if lane.cancelled:
            run.cancel()
        if self._left:
            return
        async for event in follow(run):
            await self._send(event, lane.stream_id)

    async def _cancel(self, stream_id: str | None, request: ResponseCancel) -> None:
        lane = self._lanes.get(stream_id)
        if request.response_id is not None:
            await self._conversations.cancel(self._owner, request.response_id, self._scratch)
        elif lane:
            lane.cancelled = True
            if lane.run:
                lane.run.cancel()
        else:
            raise ApiError("expected a response in progress on this lane to cancel, found none", "response_id", "response_not_found")

    async def _refuse(self, fault: Exception, stream_id: str | None) -> None:
        refused = refusal(fault)
        if refused.status == 500:
            log.error("a frame could not be answered", exc_info=fault)
        await self._send(refused.event, stream_id)

    async def _send(self, event: dict[str, Any], stream_id: str | None) -> None:
        if stream_id is not None:
            event = {**event, "stream_id": stream_id}
        async with self._sending:
            await self._socket.send_text(msgspec.json.encode(event).decode())

    async def _leave(self) -> None:
        self._left = True
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.waiting.clear()
            if lane.run and not lane.run.response.request["store"]:
                lane.run.cancel()  # nobody could ever read it
            if lane.task and not (lane.cancelled and lane.run is None):  # else it still has to cancel what it has submitted
                lane.task.cancel()
        await asyncio.gather(*(lane.task for lane in lanes if lane.task), return_exceptions=True)


def _checked_stream_id(stream_id: Any) -> str | None:
    if stream_id is None or (isinstance(stream_id, str) and STREAM_ID.fullmatch(stream_id)):
        return stream_id
    raise ApiError(
        f"expected a stream_id of 1 to 256 letters, digits, _ . or -, got {str(stream_id)[:80]!r}", "stream_id", "invalid_stream_id"
    )
