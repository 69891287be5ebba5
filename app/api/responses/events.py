"""A run as the Responses protocol's events.

A pure function of what the log holds: the same run gives the same events with the same sequence numbers to whoever asks, whenever, so a
client that has events up to N can be given N + 1 onwards by any process. Entry i of the log (from 1) is the delta with sequence number
OPENING - 1 + i.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from msgspec.structs import replace

from app.conversations.run import Run
from app.store.records import Item, Usage

Event = dict[str, Any]

OPENING = 4  # created, in_progress, output_item.added, content_part.added


async def follow(run: Run, after: int = -1) -> AsyncIterator[Event]:
    """The run's events with sequence numbers above `after`, live until its terminal one."""
    for event in _opening(run):
        if event["sequence_number"] > after:
            yield event
    async for index, entry in run.entries(max(0, after - OPENING + 1)):
        delta = {"content_index": 0, "delta": entry.text, "logprobs": []}
        yield {"type": "response.output_text.delta", "sequence_number": OPENING - 1 + index, **_place(run), **delta}
    for event in _closing(run, OPENING + len(run.logged)):
        if event["sequence_number"] > after:
            yield event


def response_object(run: Run) -> dict[str, Any]:
    """The response as it is now. A reply in the making is not in its output yet."""
    response, request = run.response, run.response.request
    named = {"id": request["conversation"]} if request.get("conversation") else None
    return {
        "id": response.id,
        "object": "response",
        "created_at": int(response.created_at),
        "completed_at": int(response.completed_at) if response.completed_at else None,
        "status": response.status,
        "incomplete_details": {"reason": response.reason} if response.status == "incomplete" else None,
        "model": request["model"],
        "previous_response_id": response.previous,
        "instructions": request["instructions"],
        "output": [message_item(run.reply)] if run.finished else [],
        "error": {"code": "server_error", "message": response.error} if response.status == "failed" else None,
        "tools": [],
        "tool_choice": request.get("tool_choice", "auto"),
        "truncation": request.get("truncation", "disabled"),
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "text": {"format": {"type": "text"}},
        "top_p": request["top_p"],
        "presence_penalty": request["presence_penalty"],
        "frequency_penalty": request["frequency_penalty"],
        "top_logprobs": 0,
        "temperature": request["temperature"],
        "reasoning": None,
        "usage": _usage(response.usage) if run.finished else None,
        "max_output_tokens": request["max_output_tokens"],
        "max_tool_calls": request.get("max_tool_calls"),
        "store": request["store"],
        "background": request.get("background", False),
        "service_tier": request.get("service_tier", "default"),
        "metadata": request["metadata"],
        "safety_identifier": request["safety_identifier"],
        "prompt_cache_key": request["prompt_cache_key"],
        "conversation": named,
    }


def message_item(item: Item) -> dict[str, Any]:
    """A ledger item as the protocol's message."""
    kind = "output_text" if item.role == "assistant" else "input_text"
    begun = item.status == "in_progress"
    return {
        "id": item.id,
        "type": "message",
        "role": item.role,
        "status": item.status,
        "content": [] if begun else [_text_part(item.text, kind)],
    }


def _opening(run: Run) -> list[Event]:
    begun = Run(replace(run.response, status="in_progress", completed_at=None), replace(run.reply, status="in_progress"))
    response = response_object(begun)
    return [
        {"type": "response.created", "sequence_number": 0, "response": response},
        {"type": "response.in_progress", "sequence_number": 1, "response": response},
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": message_item(begun.reply)},
        {"type": "response.content_part.added", "sequence_number": 3, **_place(run), "content_index": 0, "part": _text_part("")},
    ]


def _closing(run: Run, number: int) -> list[Event]:
    text = run.reply.text
    done = {"content_index": 0, "text": text, "logprobs": []}
    return [
        {"type": "response.output_text.done", "sequence_number": number, **_place(run), **done},
        {"type": "response.content_part.done", "sequence_number": number + 1, **_place(run), "content_index": 0, "part": _text_part(text)},
        {"type": "response.output_item.done", "sequence_number": number + 2, "output_index": 0, "item": message_item(run.reply)},
        {"type": f"response.{run.response.status}", "sequence_number": number + 3, "response": response_object(run)},
    ]


def _place(run: Run) -> dict[str, Any]:
    return {"item_id": run.response.output, "output_index": 0}


def _text_part(text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
