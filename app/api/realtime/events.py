"""A run as the Realtime protocol's events, and items as it shows them. Pure: a function of what the log holds."""

from __future__ import annotations

from collections.abc import AsyncIterator

from app.api.errors import failure
from app.api.telling import Teller
from app.api.wire import Wire
from app.conversations.run import Run
from app.store.records import Usage


async def told(run: Run, previous: str | None) -> AsyncIterator[Wire]:
    """The run's events, live until its end. `previous`: the item of the conversation before the reply, if it is part of one."""
    telling = _Telling(run, previous)
    teller = Teller(run.reply)
    yield {"type": "response.created", "response": response_object(run, None)}
    for event in teller.begin():
        for told in telling.tell(event):
            yield told
    async for _, entry in run.entries():
        for event in teller.tell(entry.text):
            for told in telling.tell(event):
                yield told
    for event in teller.end(run.reply.status):
        for told in telling.tell(event):
            yield told
    yield {"type": "response.done", "response": response_object(run, [realtime_item(item) for item in teller.items])}


class _Telling:
    """The events that Responses and Realtime share, as the latter has them."""

    def __init__(self, run: Run, previous: str | None) -> None:
        self._response_id = run.id
        self._in_conversation = run.response.request.store
        self._previous = previous
        self._call_id: str | None = None

    def tell(self, event: Wire) -> list[Wire]:
        kind = event["type"]
        told = {"type": kind, "response_id": self._response_id, **event}
        match kind.split(".")[1]:
            case "output_item":
                item = told["item"] = realtime_item(event["item"])
                self._call_id = item.get("call_id")
                return [told, *self._in_its_place(item, kind.rpartition(".")[2])]
            case "content_part":
                told["part"] = {"type": "text", "text": event["part"]["text"]}
            case "output_text":
                told.pop("logprobs", None)
            case "function_call_arguments":
                told["call_id"] = self._call_id
        return [told]

    def _in_its_place(self, item: Wire, change: str) -> list[Wire]:
        """That an item of the conversation was added, or is done."""
        if not self._in_conversation:
            return []
        event = item_event(change, item, self._previous)
        if change == "done":
            self._previous = item["id"]
        return [event]


def item_event(change: str, item: Wire, previous: str | None) -> Wire:
    return {"type": f"conversation.item.{change}", "previous_item_id": previous, "item": item}


def realtime_item(wire: Wire, id: str | None = None) -> Wire:
    """An item as Responses shows it, as Realtime does. `id`: its client's own."""
    item = {**wire, "id": id or wire["id"], "object": "realtime.item"}
    if "content" in wire:
        item["content"] = [{"type": part["type"], "text": part["text"]} for part in wire["content"]]
    return item


def response_object(run: Run, output: list[Wire] | None) -> Wire:
    """The response as it has ended with `output`; None: as it began."""
    asked, ended = run.response.request, output is not None
    status, details = _status(run) if ended else ("in_progress", None)
    return {
        "object": "realtime.response",
        "id": run.id,
        "status": status,
        "status_details": details,
        "output": output or [],
        "conversation_id": asked.conversation,
        "output_modalities": ["text"],
        "max_output_tokens": asked.max_output_tokens or "inf",
        "metadata": asked.metadata or None,
        "usage": _usage(run.response.usage) if ended else None,
    }


def _status(run: Run) -> tuple[str, Wire | None]:
    match run.response.status, run.response.reason:
        case "incomplete", "cancelled":
            return "cancelled", {"type": "cancelled", "reason": "client_cancelled"}
        case "incomplete", reason:
            return "incomplete", {"type": "incomplete", "reason": reason}
        case "failed", _:
            return "failed", {"type": "failed", "error": failure(run.response).error}
    return "completed", None


def _usage(usage: Usage) -> Wire:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "cached_tokens": usage.cached_tokens,
            "text_tokens": usage.prompt_tokens,
            "audio_tokens": 0,
            "cached_tokens_details": {"text_tokens": usage.cached_tokens, "audio_tokens": 0},
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }
