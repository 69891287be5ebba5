"""Responses over WebSocket: one connection, its lanes, its cursors.

Owns the order of a connection: frames of one lane run first in, first out; lanes run side by side, MAX_ACTIVE of them at a time, and
what comes beyond that waits. One task reads frames and never waits for a reply (a server that stops reading sees no cancel and no pong);
each lane's task submits its next frame, then follows that run and sends its events. A lane that cannot send waits for its socket and
holds back nobody: the run goes on and stays in the log. A connection's end stops no stored run; one that lives too long is ended.
(OpenAI guide: WebSocket mode)
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.channel import Channel
from app.api.choices import renaming
from app.api.decoding import decode, shown
from app.api.errors import ApiError, refusal
from app.api.models import Models
from app.api.responses.events import follow
from app.api.responses.references import dereferenced
from app.api.responses.schema import ClientEvent, ResponseCancel, ResponseCreate, ResponseSteer, read_create
from app.api.responses.scratch import Scratch
from app.api.wire import Wire
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.refusal import Refusal

log = logging.getLogger(__name__)

MAX_ACTIVE = 16  # responses in progress
MAX_NAMED_LANES = 32  # that a connection ever names; the default lane has no name
MAX_WAITING_BYTES = 8 << 20  # of frames that wait for their turn, on all lanes
FRAME_BYTES = 256  # what an empty frame takes up
MAX_SECONDS = 3600.0  # that a connection lasts
GOING_AWAY = 1001  # close code; official clients reconnect on it, where they are asked to
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(slots=True, frozen=True)
class Waiting:
    """A `response.create` that waits for its turn."""

    frame: str | bytes
    previous: Any  # the `previous_response_id` it names, unchecked

    @property
    def size(self) -> int:
        return FRAME_BYTES + len(self.frame)


@dataclass(slots=True)
class Lane:
    stream_id: str | None  # None: the default lane
    waiting: deque[Waiting] = field(default_factory=deque)
    run: Run | None = None  # in progress, once accepted
    submitting: bool = False  # its response is being accepted
    cancelled: bool = False  # its response was cancelled, perhaps before it was accepted
    task: asyncio.Task[None] | None = None


class ResponsesSocket:
    def __init__(
        self, socket: WebSocket, owner: str, conversations: Conversations, models: Models, max_seconds: float = MAX_SECONDS
    ) -> None:
        self._channel = Channel(socket)
        self._owner = owner
        self._conversations = conversations
        self._models = models
        self._max_seconds = max_seconds
        self._scratch = Scratch()  # what `store: false` keeps
        self._lanes: dict[str | None, Lane] = {}  # those with work
        self._names: set[str] = set()  # of all lanes so far
        self._active = asyncio.Semaphore(MAX_ACTIVE)
        self._waiting_bytes = 0
        self._left = False

    async def serve(self) -> None:
        """Until the client goes, or has been here for too long."""
        expired = False
        try:
            async with asyncio.timeout(self._max_seconds):
                async for frame in self._channel.frames():
                    await self._take(frame)
        except WebSocketDisconnect:
            pass
        except TimeoutError:
            expired = True
        finally:
            await self._leave()
        if expired:
            await self._channel.part(self._time_is_over.event, GOING_AWAY, "connection limit reached")

    async def _take(self, frame: str | bytes) -> None:
        stream_id = None
        try:
            event = decode(frame, ClientEvent)
            stream_id = _checked_stream_id(event.stream_id)
            match event.type:
                case "response.create":
                    self._queue(stream_id, Waiting(frame, event.previous_response_id))
                case "response.cancel":
                    await self._cancel(stream_id, decode(frame, ResponseCancel))
                case "response.steer":
                    await self._steer(decode(frame, ResponseSteer))
                case _:
                    raise ApiError(
                        f"expected an event of type response.create, response.cancel or response.steer, got {shown(event.type)}", "type"
                    )
        except WebSocketDisconnect:
            raise
        except Exception as fault:
            await self._refuse(fault, stream_id)

    def _queue(self, stream_id: str | None, create: Waiting) -> None:
        if self._waiting_bytes + create.size > MAX_WAITING_BYTES:
            raise ApiError(f"expected at most {MAX_WAITING_BYTES} bytes to wait for their turn, got more", None, "rate_limit_exceeded", 429)
        if stream_id is not None and stream_id not in self._names:
            if len(self._names) >= MAX_NAMED_LANES:
                raise ApiError(
                    f"expected at most {MAX_NAMED_LANES} different stream ids on a connection, got one more: "
                    "use one of them again, or open another connection",
                    "stream_id",
                    "websocket_stream_limit_reached",
                )
            self._names.add(stream_id)
        lane = self._lanes.get(stream_id)
        if lane is None:
            lane = self._lanes[stream_id] = Lane(stream_id)
            lane.task = asyncio.create_task(self._work(lane), name=f"lane {stream_id}")
        lane.waiting.append(create)
        self._waiting_bytes += create.size

    async def _work(self, lane: Lane) -> None:
        """Run the lane's frames one after the other; the lane is gone when none waits, unless its client goes first."""
        try:
            while lane.waiting:
                async with self._active:
                    create = lane.waiting.popleft()
                    self._waiting_bytes -= create.size
                    await self._carry_out(lane, create)
                    lane.run, lane.cancelled = None, False
            del self._lanes[lane.stream_id]
        except WebSocketDisconnect:  # the reader sees it too, perhaps later: until then a cancel may still come for the lane
            _abandon(lane)

    async def _carry_out(self, lane: Lane, create: Waiting) -> None:
        try:
            failed = not await self._respond(lane, read_create(create.frame))
        except WebSocketDisconnect:
            raise
        except Exception as fault:
            failed = True
            await self._refuse(fault, lane.stream_id)
        if failed and isinstance(create.previous, str):
            await self._scratch.evict(create.previous, lane.stream_id)

    async def _respond(self, lane: Lane, request: ResponseCreate) -> bool:
        """Returns whether the response came to a good end, or at least to none of the server's fault."""
        request.background = None  # someone is here and waits
        request.input = await dereferenced(request.input, self._owner, self._conversations, self._scratch.shelf)
        turn = request.turn(self._owner, self._models.served(request.model))
        lane.submitting = True
        try:
            with renaming(request.params):
                run = lane.run = await self._conversations.submit(turn, self._scratch.shelf)
        finally:
            lane.submitting = False
        if lane.cancelled:
            run.cancel()
        if self._left:
            return True
        async for event in follow(run):
            await self._send(event, lane.stream_id)
        if not turn.stored:
            await self._scratch.keep(run, lane.stream_id)
        return run.response.status != "failed"

    async def _cancel(self, stream_id: str | None, request: ResponseCancel) -> None:
        lane = self._lanes.get(stream_id)
        if request.response_id is not None:
            await self._conversations.cancel(self._owner, request.response_id, self._scratch.shelf)
        elif lane:
            lane.cancelled = True
            if lane.run:
                lane.run.cancel()
        else:
            raise ApiError("expected a response in progress on this lane to cancel, found none", "response_id", "response_not_found")

    async def _steer(self, request: ResponseSteer) -> None:
        """No input is taken while a reply is being made. Told in the protocol's own event, on the lane of what was to be steered."""
        steered = (lane.stream_id for lane in self._lanes.values() if lane.run and lane.run.id == request.previous_response_id)
        error = {
            "type": "invalid_request_error",
            "code": "steering_not_supported",
            "message": "steering is not supported: cancel the response, then continue it with the new input",
        }
        steer = {"previous_response_id": request.previous_response_id, "input": request.input}
        await self._send({"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}, next(steered, None))

    async def _refuse(self, fault: Exception, stream_id: str | None) -> None:
        refused = refusal(fault)
        if refused.status == 500:
            log.error("a frame could not be answered", exc_info=fault)
        await self._send(refused.event, stream_id)

    async def _send(self, event: Wire, stream_id: str | None) -> None:
        if stream_id is not None:
            event = {**event, "stream_id": stream_id}
        await self._channel.send(event)

    async def _leave(self) -> None:
        """Nobody is here any more: what is stored goes on, the rest ends."""
        self._left = True
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.waiting.clear()
            _abandon(lane)
            if lane.task and not (lane.cancelled and lane.submitting):  # else it still has to cancel what it has submitted
                lane.task.cancel()
        await asyncio.gather(*(lane.task for lane in lanes if lane.task), return_exceptions=True)

    @property
    def _time_is_over(self) -> Refusal:
        message = f"a connection lasts {self._max_seconds / 60:g} minutes, and this one's are over: open another one to go on"
        return Refusal(400, message, "websocket_connection_limit_reached")


def _abandon(lane: Lane) -> None:
    """Its client is gone: nobody could ever read what is not stored."""
    if lane.run and not lane.run.response.request.store:
        lane.run.cancel()


def _checked_stream_id(stream_id: Any) -> str | None:
    if stream_id is None or (isinstance(stream_id, str) and STREAM_ID.fullmatch(stream_id)):
        return stream_id
    raise ApiError(f"expected a stream_id of 1 to 256 letters, digits, _ . or -, got {shown(stream_id)}", "stream_id", "invalid_stream_id")
