"""Realtime over WebSocket: one connection, its session, the order of what happens in it.

Events are carried out one after the other, in the order in which they came, by a worker. A reader beside it never waits for a reply, nor
for the client to take one, so that a cancel is always heard. Each response has a task that follows its run and sends its events; the
conversation's responses are told one after the other, those beside it (`conversation: "none"`) at once. A connection's end stops no
response of the conversation; those beside it nobody could ever read, so they are cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from dataclasses import dataclass

from starlette.websockets import WebSocketDisconnect

from app.api.channel import Channel
from app.api.choices import renaming
from app.api.decoding import within
from app.api.errors import ApiError, realtime_error, refusal
from app.api.realtime.default import DefaultConversation
from app.api.realtime.events import told
from app.api.realtime.schema import (
    Event,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    Session,
    SessionUpdate,
    read_event,
)
from app.api.wire import Wire
from app.conversations.run import Run
from app.conversations.service import Conversations

log = logging.getLogger(__name__)

SESSION_SECONDS = 3600
MAX_ASIDE = 16  # responses beside the conversation at a time
MAX_WAITING_BYTES = 8 << 20  # of events that wait for their turn
EVENT_BYTES = 256  # that the smallest is counted as
GOING_AWAY = 1001  # close code; official clients connect anew where they are asked to


@dataclass(slots=True)
class Heard:
    """A client's event that waits for its turn, or what is wrong with it."""

    event: Event | Exception
    event_id: str | None  # the client's
    size: int  # bytes
    cancelled: bool = False  # a cancel came after it: the response that it asks for is to end at once


class RealtimeSocket:
    def __init__(self, channel: Channel, owner: str, session: Session, conversation: DefaultConversation, conversations: Conversations):
        self._channel = channel
        self._owner = owner
        self._session = session
        self._conversation = conversation
        self._conversations = conversations
        self._waiting: deque[Heard] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._current: Heard | None = None  # being carried out
        self._submitting = False
        self._active: Run | None = None  # the conversation's last response
        self._telling: asyncio.Task[None] | None = None  # it
        self._aside: set[Run] = set()  # responses beside the conversation, until they are told
        self._tasks: set[asyncio.Task[None]] = set()  # that tell of responses
        self._left = False
        self._numbers = itertools.count(1)
        self._token = secrets.token_hex(8)

    async def serve(self, seconds: float = SESSION_SECONDS) -> None:
        """Until the client goes, or the session's time is over."""
        worker = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(seconds):
                await self._send({"type": "session.created", "session": self._session.shown()})
                async for frame in self._channel.frames():
                    await self._take(frame)
        except WebSocketDisconnect:
            pass
        except TimeoutError:
            await self._leave(worker)
            over = ApiError(f"a session lasts {seconds / 60:g} minutes, and this one is over", None, "session_expired")
            await self._channel.part(self._numbered(realtime_error(over.refusal, None)), GOING_AWAY, "session expired")
        finally:
            await self._leave(worker)

    # What the reader does

    async def _take(self, frame: str | bytes) -> None:
        event, event_id = read_event(frame)
        heard = Heard(event, event_id, EVENT_BYTES + len(frame))
        if self._waiting_bytes + heard.size > MAX_WAITING_BYTES:
            message = f"expected at most {MAX_WAITING_BYTES} bytes to wait for their turn, got more"
            # Who does not take this is not listened to either.
            await self._refuse(ApiError(message, None, "rate_limit_exceeded", 429), event_id)
            return
        if isinstance(event, ResponseCancel):
            if self._cancel(event):
                return
            heard.event = ApiError("expected a response in progress to cancel, found none", "response_id", "response_cancel_not_active")
        self._waiting.append(heard)
        self._waiting_bytes += heard.size
        self._arrived.set()

    def _cancel(self, event: ResponseCancel) -> bool:
        """Returns whether there was anything to cancel. It may be a response that is not accepted yet."""
        runs = [run for run in (self._active, *self._aside) if run and not run.finished]
        if event.response_id is not None:
            runs = [run for run in runs if run.id == event.response_id]
            asked = None
        else:
            runs = [run for run in runs if run is self._active]
            ahead = (heard for heard in (*reversed(self._waiting), self._current) if heard)
            asked = next((heard for heard in ahead if isinstance(heard.event, ResponseCreate) and not heard.event.aside), None)
        for run in runs:
            run.cancel()
        if asked:
            asked.cancelled = True
        return bool(runs or asked)

    # What the worker does

    async def _work(self) -> None:
        try:
            while not self._left:
                self._arrived.clear()
                while self._waiting and not self._left:
                    self._current = self._waiting.popleft()
                    self._waiting_bytes -= self._current.size
                    await self._carry_out(self._current)
                    self._current = None
                await self._arrived.wait()
        except WebSocketDisconnect:
            pass  # the reader sees it too

    async def _carry_out(self, heard: Heard) -> None:
        try:
            if isinstance(heard.event, Exception):
                raise heard.event
            for event in await self._answer(heard.event):
                await self._send(event)
        except WebSocketDisconnect:
            raise
        except Exception as fault:
            await self._refuse(fault, heard.event_id)

    async def _answer(self, event: Event) -> list[Wire]:
        conversation = self._conversation
        match event:
            case SessionUpdate():
                with within("session"):
                    self._session.update(event.session)
                return [{"type": "session.updated", "session": self._session.shown()}]
            case ItemCreate():
                if event.item.type == "function_call_output":
                    await self._reply_told()  # what it answers may still be on its way
                with renaming({"input": "item.call_id", "after": "previous_item_id"}):  # of an item, only what it answers is looked up
                    return await conversation.create(event)
            case ItemRetrieve():
                return await conversation.retrieve(event.item_id)
            case ItemDelete():
                await self._cancelled_reply_told()
                return await conversation.delete(event.item_id)
            case ItemTruncate():
                await self._cancelled_reply_told()
                return await conversation.truncate(event)
            case ResponseCreate():
                await self._respond(event.response or ResponseFields(), event.aside)
        return []

    async def _respond(self, response: ResponseFields, aside: bool) -> None:
        if response.conversation not in (None, "auto", "none", self._conversation.id):
            raise ApiError(f"expected conversation auto or none, got {response.conversation[:80]!r}", "response.conversation")
        if aside and len(self._aside) >= MAX_ASIDE:
            message = f"expected at most {MAX_ASIDE} responses at a time beside the conversation, got one more"
            raise ApiError(message, None, "rate_limit_exceeded", 429)
        if not aside:
            await self._cancelled_reply_told()
        context = None
        if response.input is not None:
            context = tuple(await self._conversation.input(response.input, "response.input"))
        elif aside:
            context = tuple(await self._conversation.said())
        with within("response"):
            turn = self._session.turn(self._owner, response, context)
        begun = not aside and await self._conversation.begin()
        self._submitting = True
        try:
            with renaming(self._session.params(response)):
                run = await self._conversations.submit(turn)
        except Exception:
            if begun:
                await self._conversation.undo()
            raise
        finally:
            self._submitting = False
        if self._current and self._current.cancelled:
            run.cancel()
        if aside:
            self._aside.add(run)
            self._follow(run, None)
        else:
            self._active = run
            self._telling = self._follow(run, self._telling)

    async def _reply_told(self) -> None:
        if self._active and not self._active.settled and self._telling:
            await asyncio.wait((self._telling,))

    async def _cancelled_reply_told(self) -> None:
        """A reply that was cancelled is over in a moment: what comes after the cancel need not fail for its sake."""
        if self._active and self._active.stopped_because:
            await self._reply_told()

    # What each response's task does

    def _follow(self, run: Run, after: asyncio.Task[None] | None) -> asyncio.Task[None]:
        task = asyncio.create_task(self._tell(run, after))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tell(self, run: Run, after: asyncio.Task[None] | None) -> None:
        """Send a run's events, once `after` has sent those of the one before."""
        try:
            if after:
                await asyncio.wait((after,))
            previous = await self._conversation.before(run.reply.id) if run.response.request.store else None
            async for event in told(run, previous):
                await self._send(event)
        except WebSocketDisconnect:
            pass  # the reader sees it too
        except Exception as fault:
            await self._refuse(fault, None)
        finally:
            if run in self._aside:
                self._aside.remove(run)
                run.cancel()  # if it has not ended, the client is gone, and nobody could ever read it

    # Both

    async def _refuse(self, fault: Exception, event_id: str | None) -> None:
        refused = refusal(fault)
        if refused.status == 500:
            log.error("an event could not be carried out", exc_info=fault)
        await self._send(realtime_error(refused, event_id))

    async def _send(self, event: Wire) -> None:
        await self._channel.send(self._numbered(event))

    def _numbered(self, event: Wire) -> Wire:
        return {"type": event["type"], "event_id": f"event_{self._token}_{next(self._numbers)}", **event}

    async def _leave(self, worker: asyncio.Task[None]) -> None:
        """Nobody is here any more: what the conversation was promised goes on, the rest ends."""
        self._left = True
        self._waiting.clear()
        self._arrived.set()
        if not (self._submitting and self._current and self._current.cancelled):  # else it still has to cancel what it submits
            worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        for run in self._aside:
            run.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
