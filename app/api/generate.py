"""`POST /generate`: a prompt as it is, text or token ids, and the text and ids that follow it, as vLLM's and SGLang's servers have it.

Owns its fields and shapes. The sampling fields may stand in the request, or in `sampling_params` as SGLang's clients send them. In a stream
each event has the whole text so far, as with both of those servers. Nothing is stored. Unknown fields are ignored, and
known ones refused, as `chat_completions.py` does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api import sse
from app.api.choices import finish_reason, renaming
from app.api.constraints import Source
from app.api.decoding import SamplingFields, body_of, decode
from app.api.disconnect import begun, run_out, until_gone
from app.api.errors import ApiError
from app.api.models import Models
from app.api.sizes import bounded
from app.api.unsupported import SHARED, Neutral, refuse_unsupported, with_unsupported
from app.api.wire import Wire
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Turn
from app.refusal import json_response
from app.security import owner_of
from app.store.records import Asked
from engine.core import Grammar

DEFAULT_TOKENS = 128  # as SGLang's
UNSUPPORTED: Neutral = {
    "n": (None, 1),
    "ebnf": (None,),
    "structural_tag": (None,),
    "input_embeds": (None,),
    "image_data": (None, []),
    "return_logprob": (None, False),
    "return_hidden_states": (None, False),
    "lora_path": (None,),
}
NAMES = {"input": "prompt", "max_output_tokens": "max_new_tokens"}


class GenerateFields(SamplingFields, kw_only=True):
    """What may stand in `sampling_params` too."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    json_schema: Source | None = None  # as JSON text
    regex: Source | None = None

    @property
    def grammar(self) -> Grammar | None:
        """Raises: ApiError"""
        if self.json_schema and self.regex:
            raise ApiError("expected json_schema or regex, got both", "regex")
        if self.json_schema:
            return Grammar("json_schema", self.json_schema)
        return Grammar("regex", self.regex) if self.regex else None


class GenerateRequest(GenerateFields, kw_only=True):
    prompt: str | Annotated[list[int], bounded(None)] | None = None
    text: str | None = None
    input_ids: Annotated[list[int], bounded(None)] | None = None
    model: str | None = None
    sampling_params: GenerateFields | None = None
    stream: bool | None = None

    def turn(self, owner: str, model: str) -> Turn:
        """Raises: ApiError for what cannot be honoured"""
        tokens = self.max_new_tokens or self.max_tokens or DEFAULT_TOKENS
        return Turn(
            owner=owner,
            items=[],
            sampling=self.sampling(tokens, grammar=self.grammar),
            stored=False,
            raw=self._raw,
            request=Asked(model=model, **self.shown_settings(), max_output_tokens=tokens),
        )

    @property
    def _raw(self) -> str | tuple[int, ...]:
        given = [one for one in (self.prompt, self.text, self.input_ids) if one is not None]
        if len(given) != 1:
            raise ApiError(f"expected one of prompt, text and input_ids, got {len(given)} of them", "prompt")
        return given[0] if isinstance(given[0], str) else tuple(given[0])


NESTED = with_unsupported(GenerateFields, UNSUPPORTED, SHARED)
BODY = with_unsupported(GenerateRequest, UNSUPPORTED, SHARED, sampling_params=NESTED | None)


def read(data: bytes) -> GenerateRequest:
    """With the fields of `sampling_params` among its own. Raises: ApiError for what is wrong, and for what cannot be honoured"""
    asked = decode(data, BODY)
    refuse_unsupported(asked, UNSUPPORTED, SHARED)
    if asked.sampling_params is None:
        return asked
    refuse_unsupported(asked.sampling_params, UNSUPPORTED, SHARED)
    nested = {name: value for name in GenerateFields.__struct_fields__ if (value := getattr(asked.sampling_params, name)) is not None}
    twice = next((name for name in nested if getattr(asked, name) is not None), None)
    if twice:
        raise ApiError(f"expected {twice} in the request or in its sampling_params, got both", twice)
    return replace(asked, **nested)


class Generate:
    def __init__(self, conversations: Conversations, models: Models) -> None:
        self._conversations = conversations
        self._models = models
        self.routes = [Route("/generate", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        asked = read(await body_of(request))
        turn = asked.turn(owner_of(request.scope), self._models.served(asked.model))
        with renaming({**NAMES, "grammar": "json_schema" if asked.json_schema else "regex"}):
            run = await begun(self._conversations.submit(turn), request, cancel=True)
        if asked.stream:
            return sse.stream(until_gone(parts(run), run, cancel=True), named=False)
        await run_out(run, request, cancel=True)
        return json_response(_generated(run, run.reply.text, run.reply.ids or [], finish_reason(run.response)))


async def parts(run: Run) -> AsyncGenerator[Wire, None]:
    """All that there is of the run, each time there is more. Raises: ApiError if it failed"""
    text, ids = "", list[int]()
    async for _, entry in run.entries():
        text += entry.text
        ids += entry.ids
        yield _generated(run, text, ids, None)
    reason = finish_reason(run.response)
    yield _generated(run, run.reply.text, run.reply.ids or [], reason)


def _generated(run: Run, text: str, ids: Sequence[int], reason: str | None) -> Wire:
    usage = run.response.usage
    meta = {
        "id": run.id,
        "finish_reason": reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens if reason else len(ids),
        "cached_tokens": usage.cached_tokens,
    }
    return {"text": text, "output_ids": ids, "meta_info": meta}
