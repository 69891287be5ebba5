"""OpenAI Chat Completions over HTTP, streaming and not.

Stateless: each request brings its whole chat, and its run is kept only while the request lasts, unless an `Idempotency-Key` asks that a
retry finds it. Unknown fields are ignored, since real clients send many; the known ones
that would change the reply, and are not supported, are refused.
(OpenAI API reference: Chat)
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api import sse
from app.api.decoding import MAX_MESSAGES, Content, Metadata, SamplingFields, body_of, decode, message_of, refuse_unless, tier_used
from app.api.disconnect import run_out, until_gone
from app.api.errors import ApiError, refusal
from app.api.models import Models
from app.conversations.errors import ConversationError
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Turn
from app.refusal import json_response
from app.security import owner_of
from app.store.records import Usage
from engine.core import RequestError

NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields that would change the reply and are not supported, with the values that leave it as it is
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "prediction": (None,),
    "web_search_options": (None,),
    "suffix": (None,),
    "best_of": (None, 1),
    "min_tokens": (None, 0),
    "length_penalty": (None, 1),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "truncate_prompt_tokens": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}
PARAMS = {"input": "messages", "max_output_tokens": "max_tokens"}  # the domain's names, where this protocol has others

Chunk = dict[str, Any]


class ChatMessage(msgspec.Struct):
    role: str
    content: Content | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ResponseFormat(msgspec.Struct):
    type: str


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None

    response_format: ResponseFormat | None = None

    def turn(self, owner: str, model: str, idempotency_key: str | None) -> Turn:
        """Raises: ApiError for a message that is not text"""
        key = (self.metadata or {}).get("client_message_id") or idempotency_key
        return Turn(
            owner=owner,
            items=[message_of(message.role, message.content, f"messages.{at}") for at, message in enumerate(self.messages)],
            sampling=self.sampling(self.max_completion_tokens or self.max_tokens),
            client_message_id=key,
            stored=key is not None,
            background=tier_used(self.service_tier) == "flex",
            request=self._echo(model),
        )

    def _echo(self, model: str) -> dict[str, Any]:
        """The request's settings as a response object shows them: a stored completion is a response like any other."""
        neutral = dict.fromkeys(("instructions", "conversation", "safety_identifier", "prompt_cache_key"), None)
        limit = self.max_completion_tokens or self.max_tokens
        return {
            "model": model,
            **self.shown_settings(),
            **neutral,
            "max_output_tokens": limit,
            "metadata": self.metadata or {},
            "store": True,
            "service_tier": tier_used(self.service_tier),
        }


def read(data: bytes) -> ChatRequest:
    """Raises: ApiError for what is wrong, and for what cannot be honoured"""
    asked = decode(data, ChatRequest)
    given = decode(data, dict[str, Any])
    plain = asked.response_format is None or asked.response_format.type == "text"
    refuse_unless(
        (
            ("response_format", plain, "type text"),
            ("messages.tool_calls", not any(message.tool_calls for message in asked.messages), "an empty list"),
            *((name, given.get(name) in values, " or ".join(map(json.dumps, values))) for name, values in NEUTRAL.items()),
        )
    )
    return asked


class ChatCompletions:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models
        self.routes = [Route("/v1/chat/completions", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        asked = read(await body_of(request))
        turn = asked.turn(owner_of(request.scope), self._models.served(asked.model), request.headers.get("idempotency-key"))
        try:
            run = await self._conversations.submit(turn)
        except (ConversationError, RequestError) as fault:
            fault.param = PARAMS.get(fault.param or "", fault.param)
            raise
        if asked.stream:
            usage = bool(asked.stream_options and asked.stream_options.include_usage)
            return sse.stream(until_gone(chunks(run, usage), run, cancel=not turn.stored), named=False)
        await run_out(run, request, cancel=not turn.stored)
        if run.response.status == "failed":
            raise ApiError(run.response.error or "the reply could not be finished", None, "server_error", 500)
        return json_response(completion(run))


async def chunks(run: Run, include_usage: bool) -> AsyncIterator[Chunk]:
    """The run as `chat.completion.chunk` objects: role, content, finish reason, and the usage if asked for."""
    yield _chunk(run, {"role": "assistant", "content": ""})
    async for _, entry in run.entries():
        yield _chunk(run, {"content": entry.text})
    if run.response.status == "failed":
        yield {"error": refusal(ApiError(run.response.error or "the reply could not be finished", None, "server_error", 500)).error}
        return
    yield _chunk(run, {}, _finish_reason(run))
    if include_usage:
        yield {**_head(run, "chat.completion.chunk"), "choices": [], "usage": _usage(run.response.usage)}


def completion(run: Run) -> dict[str, Any]:
    """A finished run as a `chat.completion` object."""
    message = {"role": "assistant", "content": run.reply.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(run)}
    return {**_head(run, "chat.completion"), "choices": [choice], "usage": _usage(run.response.usage)}


def _head(run: Run, kind: str) -> dict[str, Any]:
    response = run.response
    return {
        "id": f"chatcmpl-{response.id.removeprefix('resp_')}",
        "object": kind,
        "created": int(response.created_at),
        "model": response.request["model"],
        "service_tier": response.request.get("service_tier", "default"),
    }


def _chunk(run: Run, delta: dict[str, str], finish_reason: str | None = None) -> Chunk:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**_head(run, "chat.completion.chunk"), "choices": [choice]}


def _finish_reason(run: Run) -> str:
    return "length" if run.response.reason == "max_output_tokens" else "stop"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
