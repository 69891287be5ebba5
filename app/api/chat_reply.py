"""A chat's replies as `chat.completion` objects and as their chunks.

Owns their shapes: what a choice says, what it calls, log probabilities, finish reasons, usage. Both forms are told by the same
`ChatTeller`, so that a stream, put together, is what the object says. (OpenAI API reference: Chat)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from app.api.choices import Choices, finish_reason
from app.api.kept import kept
from app.api.telling import wire_logprobs
from app.api.wire import Wire
from app.conversations.calls import call_id
from app.conversations.run import Run
from app.store.records import Item, Logprob, Usage
from engine.tool_calls import CallArguments, CallBegun, CallEnded, Piece, Said, ToolCallParser


class ChatTeller:
    """Give it a reply's text with `tell`, and its `end`; both return deltas, each with the log probabilities of what it says."""

    def __init__(self, reply: Item) -> None:
        self._reply = reply
        self._parser = ToolCallParser() if reply.calls else None
        self._logprobs: list[Logprob] = []  # of text that is held back
        self._said = False
        self._after_call = False  # nothing was said since
        self.called = False

    def tell(self, text: str, logprobs: Iterable[Logprob] = ()) -> list[tuple[Wire, list[Logprob]]]:
        if self._parser is None:
            return [({"content": text}, list(logprobs))]
        self._logprobs += logprobs
        return self._deltas(self._parser.feed(text))

    def end(self) -> list[tuple[Wire, list[Logprob]]]:
        return self._deltas(self._parser.end()) if self._parser else []

    def _deltas(self, pieces: list[Piece]) -> list[tuple[Wire, list[Logprob]]]:
        """What is said has the log probabilities of all that came with it; those of calls are not told."""
        told = []
        for piece in pieces:
            logprobs = self._logprobs if isinstance(piece, Said) else []
            told += [(delta, logprobs) for delta in self._delta(piece)]
            self._logprobs = [] if isinstance(piece, Said) else self._logprobs
        if pieces or self._after_call:  # what a call is closed with is not said, and nothing tells of it
            self._logprobs = []
        return told

    def _delta(self, piece: Piece) -> list[Wire]:
        match piece:
            case Said(text):
                between = "\n" if self._said and self._after_call else ""
                self._said, self._after_call = True, False
                return [{"content": between + text}]
            case CallBegun(index, name):
                self.called = self._after_call = True
                function = {"name": name, "arguments": ""}
                return [{"tool_calls": [{"index": index, "id": call_id(self._reply, index), "type": "function", "function": function}]}]
            case CallArguments(index, text):
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
            case CallEnded():
                return []


def completion(choices: Choices) -> Wire:
    """Finished runs as a `chat.completion` object. Raises: ApiError if one failed"""
    shown = [_choice(index, run) for index, run in sorted(choices.runs.items())]
    return {**_head(choices.runs[0], "chat.completion"), "choices": shown, "usage": usage_object(choices.usage)}


async def chunks(choices: Choices, include_usage: bool) -> AsyncGenerator[Wire, None]:
    """The runs as `chat.completion.chunk` objects: role, what is said and called, finish reason; then the usage, if asked for.

    Raises: as `Choices.entries`, and ApiError if a run failed
    """
    first = choices.runs[0]
    head = _head(first, "chat.completion.chunk") | ({"usage": None} if include_usage else {})

    def chunk(index: int, delta: Wire, logprobs: list[Logprob] | None = None, reason: str | None = None) -> Wire:
        return {**head, "choices": [_part(index, {"delta": delta}, logprobs or None, reason)]}

    tellers: dict[int, ChatTeller] = {}
    nothing = None if first.reply.calls else ""  # with tools there may be nothing to say
    for index in choices.indices:
        yield chunk(index, {"role": "assistant", "content": nothing})
    async for index, entry in choices.entries():
        run = choices.runs[index]
        teller = tellers.setdefault(index, ChatTeller(run.reply))
        for delta, logprobs in teller.tell(entry.text, entry.logprobs) if entry else teller.end():
            yield chunk(index, delta, logprobs)
        if entry is None:
            yield chunk(index, {}, reason=_reason(run, teller.called))
    if include_usage:
        yield {**head, "choices": [], "usage": usage_object(choices.usage)}


def usage_object(usage: Usage) -> Wire:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _choice(index: int, run: Run) -> Wire:
    teller = ChatTeller(run.reply)
    told = [part for entry in kept(run) for part in teller.tell(entry.text, entry.logprobs)] + teller.end()
    said: list[str] = []
    calls: list[tuple[Wire, list[str]]] = []
    for delta, _ in told:
        said.append(delta.get("content") or "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append((call, []))
            else:
                calls[call["index"]][1].append(call["function"]["arguments"])
    text = "".join(said)
    message: Wire = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if calls:
        message["tool_calls"] = [_whole_call(call, arguments) for call, arguments in calls]
    logprobs = [logprob for _, part in told for logprob in part] if run.response.request.shows_logprobs else None
    return _part(index, {"message": message}, logprobs, _reason(run, teller.called))


def _whole_call(begun: Wire, arguments: list[str]) -> Wire:
    return {"id": begun["id"], "type": "function", "function": {"name": begun["function"]["name"], "arguments": "".join(arguments)}}


def _part(index: int, body: Wire, logprobs: list[Logprob] | None, reason: str | None) -> Wire:
    shown = None if logprobs is None else {"content": wire_logprobs(logprobs), "refusal": None}
    return {"index": index, **body, "logprobs": shown, "finish_reason": reason}


def _reason(run: Run, called: bool) -> str:
    reason = finish_reason(run.response)
    return "tool_calls" if called and reason == "stop" else reason


def _head(run: Run, kind: str) -> Wire:
    response = run.response
    return {
        "id": f"chatcmpl-{response.id.removeprefix('resp_')}",
        "object": kind,
        "created": int(response.created_at),
        "model": response.request.model,
        "service_tier": response.request.service_tier,
    }
