"""A run as the Responses protocol's events.

A pure function of what the log holds: the same run gives the same events with the same sequence numbers to whoever asks, whenever, so a
client that has events up to N can be given N + 1 onwards by any process. Of a reply that was cut since, or deleted, what is left is told.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

from app.api.errors import RESPONSES_CODES, failure
from app.api.kept import entries, kept
from app.api.telling import Teller
from app.api.wire import Wire
from app.conversations.run import Run
from app.store.records import Response, Usage


async def follow(run: Run, after: int = -1) -> AsyncIterator[Wire]:
    """The run's events with sequence numbers above `after`, live until its terminal one."""
    async for number, event in _numbered(_told(run)):
        if number > after:
            yield {"type": event.pop("type"), "sequence_number": number, **event}


async def _numbered(events: AsyncIterator[Wire]) -> AsyncIterator[tuple[int, Wire]]:
    numbers = itertools.count()
    async for event in events:
        yield next(numbers), event


async def _told(run: Run) -> AsyncIterator[Wire]:
    begun = response_object(run, begun=True)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    teller, shows_logprobs = Teller(run.reply), run.response.request.shows_logprobs
    spoken = _spoken(run)
    for event in teller.begin() if spoken else ():
        yield event
    async for entry in entries(run):
        for event in teller.tell(entry.text, entry.logprobs if shows_logprobs else ()):
            yield event
    for event in teller.end(run.reply.status) if spoken else ():
        yield event
    yield {"type": f"response.{run.response.status}", "response": response_object(run, teller.items)}


def response_object(run: Run, output: list[Wire] | None = None, *, begun: bool = False) -> Wire:
    """The response as it is now, or as it was when it had `begun`. A reply in the making is not in its output yet.

    `output`: its items, if they are at hand; they are made of the log otherwise, which alone knows their log probabilities.
    """
    response, asked = run.response, run.response.request
    status = "in_progress" if begun else response.status
    ended = status != "in_progress"
    return {
        "id": response.id,
        "object": "response",
        "created_at": int(response.created_at),
        "completed_at": int(response.completed_at) if response.completed_at and ended else None,
        "status": status,
        "incomplete_details": {"reason": response.reason} if status == "incomplete" else None,
        "model": asked.model,
        "previous_response_id": response.previous,
        "instructions": asked.instructions,
        "output": (_output(run) if output is None else output) if ended else [],
        "error": _error(response) if status == "failed" else None,
        "tools": asked.tools,
        "tool_choice": asked.tool_choice,
        "truncation": asked.truncation,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "text": asked.text,
        "top_p": asked.top_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "top_logprobs": asked.top_logprobs,
        "temperature": asked.temperature,
        "reasoning": None,
        "usage": _usage(response.usage) if ended else None,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "store": asked.store,
        "background": asked.background,
        "service_tier": asked.service_tier,
        "metadata": asked.metadata,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": asked.prompt_cache_key,
        "conversation": {"id": asked.conversation} if asked.conversation else None,
    }


def _error(response: Response) -> Wire:
    failed = failure(response)
    return {"code": RESPONSES_CODES.get(failed.code or "", failed.code), "message": failed.message}


def _output(run: Run) -> list[Wire]:
    """The items of a reply that has ended."""
    if not _spoken(run):
        return []
    teller = Teller(run.reply)
    if run.response.request.shows_logprobs:
        for entry in kept(run):
            teller.tell(entry.text, entry.logprobs)
    else:
        teller.tell(run.reply.text)
    teller.end(run.reply.status)
    return teller.items


def _spoken(run: Run) -> bool:
    """There is a reply to tell of, be it an empty one."""
    return run.response.request.generate and not run.reply.deleted


def _usage(usage: Usage) -> Wire:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},  # what is kept costs nobody anything
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
