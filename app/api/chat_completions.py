"""OpenAI Chat Completions over HTTP: requests read and turned into turns; `chat_reply.py` has the answers.

Stateless: each request brings its whole chat, and its runs are kept only while the request lasts, unless an `Idempotency-Key` (or
`metadata.client_message_id`) asks that a retry finds them. `store` asks for a list of completions, which there is none of, and is
ignored, like unknown fields, since real clients send many. The known ones that would change the reply, and are not supported, are refused.
Extensions, as vLLM has them: `continue_final_message`, `add_generation_prompt`; and formats of type regex and grammar.
(OpenAI API reference: Chat)
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api import chat_reply, sse
from app.api.chat_messages import ChatMessage, said_of
from app.api.choices import MOST_CHOICES, Choices
from app.api.constraints import Constraints, FormatField, ToolField, constraints
from app.api.decoding import MAX_MESSAGES, MAX_TOP_LOGPROBS, Metadata, SamplingFields, body_of, decode, digest_of, tier_used
from app.api.disconnect import begun, run_out, until_gone
from app.api.errors import ApiError
from app.api.models import Models
from app.api.sizes import FORM_BYTES, bounded
from app.api.unsupported import SHARED, Neutral, refuse_unsupported, with_unsupported
from app.conversations.service import Conversations
from app.conversations.turn import Said, Turn
from app.refusal import json_response
from app.security import owner_of
from app.store.records import Asked
from engine.core import Ending

UNSUPPORTED: Neutral = {
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
    "echo": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
}
PARAMS = {"input": "messages", "max_output_tokens": "max_tokens"}  # the domain's names, where this protocol has others


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[ChatMessage], bounded(None, min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[ToolField], bounded(FORM_BYTES)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[FormatField, bounded(FORM_BYTES)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None

    def turn(self, owner: str, model: str, idempotency_key: str | None) -> Turn:
        """The turn of its first choice; `model` is the name served. Raises: ApiError for what cannot be honoured"""
        key = (self.metadata or {}).get("client_message_id") or idempotency_key
        form = constraints(self.tools, self.tool_choice, self.parallel_tool_calls, self.response_format, "response_format")
        said = said_of(self.messages)
        return Turn(
            owner=owner,
            items=said,
            sampling=self.sampling(self.max_completion_tokens or self.max_tokens, self._logprobs, form.grammar),
            client_message_id=key,
            asked_digest=digest_of(self) if key else b"",
            stored=key is not None,
            lasting=False,
            background=tier_used(self.service_tier) == "flex",
            tools=form.tools,
            ending=self._ending(said[-1]),
            request=self._asked(model, form),
        )

    @property
    def _logprobs(self) -> int:
        """As the engine counts them: how many beside each token, or -1."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("expected logprobs: true with top_logprobs, got top_logprobs without it", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else -1

    def _ending(self, last: Said) -> Ending:
        if not self.continue_final_message:
            return Ending.CLOSED if self.add_generation_prompt is False else Ending.REPLY
        if self.add_generation_prompt:
            message = (
                "expected continue_final_message or add_generation_prompt, got both: a message cannot go on behind the opening of the next"
            )
            raise ApiError(message, "continue_final_message")
        if last.role != "assistant" or last.call_ids or not last.text:
            message = (
                "expected a last message of the assistant's, with text and no calls, to go on with continue_final_message, got another"
            )
            raise ApiError(message, "continue_final_message")
        return Ending.CONTINUE

    def _asked(self, model: str, form: Constraints) -> Asked:
        """The request's settings as a response object shows them: a stored completion is a response like any other."""
        return Asked(
            model=model,
            **self.shown_settings(),
            top_logprobs=self.top_logprobs or 0,
            shows_logprobs=bool(self.logprobs),
            max_output_tokens=self.max_completion_tokens or self.max_tokens,
            tools=form.shown_tools,
            tool_choice=form.shown_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            text={"format": form.shown_format},
            metadata=self.metadata or {},
            service_tier=tier_used(self.service_tier),
        )


BODY = with_unsupported(ChatRequest, UNSUPPORTED, SHARED)


def read(data: bytes) -> ChatRequest:
    """Raises: ApiError for what is wrong, and for what cannot be honoured"""
    asked = decode(data, BODY)
    refuse_unsupported(asked, UNSUPPORTED, SHARED)
    return asked


class ChatCompletions:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models
        self.routes = [Route("/v1/chat/completions", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        asked = read(await body_of(request))
        turn = asked.turn(owner_of(request.scope), self._models.served(asked.model), request.headers.get("idempotency-key"))
        grammar = "response_format" if asked.response_format else "tools"  # which of them asked for one
        choices = Choices(self._conversations, [turn], asked.n or 1, {**PARAMS, "grammar": grammar})
        await begun(choices.begin(), request, cancel=not turn.stored)
        if asked.stream:
            usage = bool(asked.stream_options and asked.stream_options.include_usage)
            return sse.stream(until_gone(chat_reply.chunks(choices, usage), choices, cancel=not turn.stored), named=False)
        await run_out(choices, request, cancel=not turn.stored)
        return json_response(chat_reply.completion(choices))
