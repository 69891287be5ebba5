"""A reply as it comes, told as OpenAI's output items and what happens to them.

Responses and Realtime share these shapes: messages, function calls, and the events of their growth. A pure function of the reply's text, so
the same reply is told the same to whoever asks, whenever: also where its calls begin, whatever pieces the text comes in.
(OpenAI API reference: Responses, streaming events)
"""

from __future__ import annotations

from collections.abc import Iterable

from app.api.wire import Wire
from app.conversations.calls import call_id
from app.store.records import Item, Logprob
from engine.tool_calls import CallArguments, CallBegun, CallEnded, Piece, Said, ToolCallParser


class Teller:
    """Give it a reply's text with `tell`, and its `end`; both return events, without what numbers or names them.

    `items` are those that are complete. A reply that says nothing and calls nothing is an empty message.
    """

    def __init__(self, reply: Item) -> None:
        self._reply = reply
        self._id = reply.id.partition("_")[2]
        self._parser = ToolCallParser() if reply.calls else None
        self._text: list[str] | None = None  # of the message that is open
        self._logprobs: list[Wire] = []  # of that message
        self._call: Wire | None = None  # the call that is open
        self._arguments: list[str] = []
        self.items: list[Wire] = []

    def begin(self) -> list[Wire]:
        """A reply without tools is a message, also before its first word."""
        return [] if self._parser else self._begin_message()

    def tell(self, text: str, logprobs: Iterable[Logprob] = ()) -> list[Wire]:
        if self._parser is None:
            return self._say(text, logprobs)
        events: list[Wire] = []
        for piece in self._parser.feed(text):
            events += self._take(piece, logprobs)
            if isinstance(piece, Said):
                logprobs = ()
        return events

    def end(self, status: str | None = None) -> list[Wire]:
        """`status`: of the item that is open (default: the reply's)."""
        status = status or self._reply.status
        events = [event for piece in (self._parser.end() if self._parser else ()) for event in self._take(piece)]
        if self._call:
            return [*events, *self._end_call("incomplete")]
        if self._text is None and self.items:
            return events
        if self._text is None:
            events += self._begin_message()
        return [*events, *self._end_message(status)]

    def _take(self, piece: Piece, logprobs: Iterable[Logprob] = ()) -> list[Wire]:
        match piece:
            case Said(text=text):
                return self._say(text, logprobs)
            case CallBegun(index=index, name=name):
                events = self._end_message("completed") if self._text is not None else []
                return [*events, *self._begin_call(index, name)]
            case CallArguments(text=text):
                assert self._call
                self._arguments.append(text)
                return [{"type": "response.function_call_arguments.delta", **self._place(self._call["id"]), "delta": text}]
            case CallEnded(whole=whole):
                return self._end_call("completed" if whole else "incomplete")

    def _say(self, text: str, logprobs: Iterable[Logprob]) -> list[Wire]:
        events = self._begin_message() if self._text is None else []
        assert self._text is not None
        shown = wire_logprobs(logprobs)
        self._text.append(text)
        self._logprobs += shown
        delta = {"content_index": 0, "delta": text, "logprobs": shown}
        return [*events, {"type": "response.output_text.delta", **self._place(self._message_id), **delta}]

    @property
    def _message_id(self) -> str:
        return f"msg_{self._id}" if not self.items else f"msg_{self._id}_{len(self.items)}"

    def _place(self, item_id: str) -> Wire:
        return {"item_id": item_id, "output_index": len(self.items)}

    def _begin_message(self) -> list[Wire]:
        self._text, self._logprobs = [], []
        id = self._message_id
        item = message_item(id, "assistant", "in_progress", "")
        return [
            {"type": "response.output_item.added", "output_index": len(self.items), "item": item},
            {"type": "response.content_part.added", **self._place(id), "content_index": 0, "part": text_part("")},
        ]

    def _end_message(self, status: str) -> list[Wire]:
        id, text, logprobs = self._message_id, "".join(self._text or ()), self._logprobs
        place = {**self._place(id), "content_index": 0}
        item = message_item(id, "assistant", status, text, logprobs)
        events = [
            {"type": "response.output_text.done", **place, "text": text, "logprobs": logprobs},
            {"type": "response.content_part.done", **place, "part": text_part(text, logprobs=logprobs)},
            {"type": "response.output_item.done", "output_index": len(self.items), "item": item},
        ]
        self._text = None
        self.items.append(item)
        return events

    def _begin_call(self, index: int, name: str) -> list[Wire]:
        id = f"fc_{self._id}_{index}"
        call = {"call_id": call_id(self._reply, index), "name": name, "arguments": ""}
        self._call, self._arguments = {"id": id, "type": "function_call", "status": "in_progress", **call}, []
        return [{"type": "response.output_item.added", "output_index": len(self.items), "item": self._call}]

    def _end_call(self, status: str) -> list[Wire]:
        assert self._call
        arguments = "".join(self._arguments)
        item = {**self._call, "status": status, "arguments": arguments}
        done = {"name": item["name"], "arguments": arguments}
        events = [
            {"type": "response.function_call_arguments.done", **self._place(item["id"]), **done},
            {"type": "response.output_item.done", "output_index": len(self.items), "item": item},
        ]
        self._call = None
        self.items.append(item)
        return events


def message_item(id: str, role: str, status: str, text: str, logprobs: list[Wire] | None = None) -> Wire:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [] if status == "in_progress" else [text_part(text, kind, logprobs)]
    return {"id": id, "type": "message", "role": role, "status": status, "content": content}


def text_part(text: str, kind: str = "output_text", logprobs: list[Wire] | None = None) -> Wire:
    return {"type": kind, "text": text} | ({"annotations": [], "logprobs": logprobs or []} if kind == "output_text" else {})


def wire_logprobs(logprobs: Iterable[Logprob]) -> list[Wire]:
    return [_logprob(token) | {"top_logprobs": [_logprob(other) for other in token.top]} for token in logprobs]


def _logprob(token: Logprob) -> Wire:
    return {"token": token.piece.decode(errors="replace"), "logprob": token.logprob, "bytes": list(token.piece)}
