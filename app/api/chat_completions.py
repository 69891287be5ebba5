"""OpenAI Chat Completions over HTTP, streaming and not.

Stateless: each request brings its whole chat, and its run is kept only while the request lasts, unless an `Idempotency-Key` asks that a
retry finds it. Unknown fields are ignored, since real clients send many; the known ones
that would change the reply, and are not supported, are refused.
(OpenAI API reference: Chat)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api import sse
from app.api.decoding import MAX_MESSAGES, Content, Metadata, SamplingFields, body_of, decode, message_of, refuse_unless
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

ONLY_NULL = (
    "prediction",
    "web_search_options",
    "suffix",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "chat_template_kwargs",
    "truncate_prompt_tokens",
)
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

    # Understood with their neutral value only.
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    audio: Any = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    function_call: Any = None
    prediction: Any = None
    web_search_options: Any = None
    suffix: str | None = None
    best_of: int | None = None
    min_tokens: int | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: float | None = None
    echo: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def turn(self, owner: str, model: str, idempotency_key: str | None) -> Turn:
        """Raises: ApiError for what cannot be honoured"""
        self._refuse_unsupported()
        key = (self.metadata or {}).get("client_message_id") or idempotency_key
        return Turn(
            owner=owner,
            items=[message_of(message.role, message.content, f"messages.{at}") for at, message in enumerate(self.messages)],
            sampling=self.sampling(self.max_completion_tokens or self.max_tokens),
            client_message_id=key,
            stored=key is not None,
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
        }

    def _refuse_unsupported(self) -> None:
        refuse_unless(
            (
                ("logprobs", not self.logprobs, "false"),
                ("top_logprobs", not self.top_logprobs, "0"),
                ("response_format", self.response_format is None or self.response_format.type == "text", "type text"),
                ("tools", not self.tools, "an empty list"),
                ("tool_choice", self.tool_choice in (None, "auto", "none"), "auto or none"),
                ("functions", not self.functions, "an empty list"),
                ("audio", self.audio is None, "null"),
                ("modalities", self.modalities in (None, ["text"]), "text"),
                ("messages.tool_calls", not any(message.tool_calls for message in self.messages), "an empty list"),
                ("reasoning_effort", self.reasoning_effort in (None, "none"), "none"),
                ("verbosity", self.verbosity in (None, "medium"), "medium"),
                ("function_call", self.function_call in (None, "auto", "none"), "auto or none"),
                ("best_of", self.best_of in (None, 1), "1"),
                ("min_tokens", not self.min_tokens, "0"),
                ("length_penalty", self.length_penalty in (None, 1), "1"),
                ("typical_p", self.typical_p in (None, 1), "1"),
                ("echo", not self.echo, "false"),
                ("continue_final_message", not self.continue_final_message, "false"),
                ("add_generation_prompt", self.add_generation_prompt is not False, "true"),
                ("include_stop_str_in_output", not self.include_stop_str_in_output, "false"),
                ("skip_special_tokens", self.skip_special_tokens is not False, "true"),
                ("use_beam_search", not self.use_beam_search, "false"),
                *((name, getattr(self, name) is None, "null") for name in ONLY_NULL),
            )
        )


class ChatCompletions:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models
        self.routes = [Route("/v1/chat/completions", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        asked = decode(await body_of(request), ChatRequest)
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
