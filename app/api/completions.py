"""OpenAI's legacy Completions over HTTP: a prompt as it is, text or token ids, and what follows it.

Owns the reading of requests and the shapes of what is returned, log probabilities of prompts included. Text is plain text: nothing in it
becomes a control token; ids may be any of the vocabulary. Nothing is stored, not for an `Idempotency-Key` either. Unknown fields are
ignored, and known ones refused, as `chat_completions.py` does. An extension is `response_format`.
(OpenAI API reference: Completions)
"""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api import sse
from app.api.chat_completions import PARAMS, StreamOptions
from app.api.chat_reply import usage_object
from app.api.choices import MOST_CHOICES, Choices, finish_reason, renaming
from app.api.constraints import FormatField, constraints
from app.api.decoding import MAX_TOP_LOGPROBS, SHOWN_CHARACTERS, SamplingFields, body_of, decode, refuse_unless, shown
from app.api.disconnect import begun, run_out, until_gone
from app.api.errors import ApiError
from app.api.models import Models
from app.api.sizes import FORM_BYTES, bounded
from app.api.unsupported import SHARED, Neutral, refuse_unsupported, with_unsupported
from app.api.wire import Wire
from app.conversations.run import Run
from app.conversations.service import Conversations
from app.conversations.turn import Turn
from app.refusal import json_response
from app.security import owner_of
from app.store.records import Asked
from engine.batcher import Batcher

DEFAULT_TOKENS = 16
UNSUPPORTED: Neutral = {
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
    "prompt_embeds": (None,),
}
NAMES = {**PARAMS, "input": "prompt", "grammar": "response_format", "top_logprobs": "logprobs"}

EXPECTED = "expected a prompt of text, of token ids, or a list of either"

T = TypeVar("T")
Ids = tuple[int, ...]


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: msgspec.Raw  # text, token ids, or a list of either
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: Annotated[FormatField, bounded(FORM_BYTES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def prompts(self) -> list[str | Ids]:
        """Raises: ApiError for what is none, for a list of several kinds, or of too many"""
        given = bytes(self.prompt)
        try:
            if given.startswith(b'"'):
                return [decode(given, str)]
            match re.findall(rb"\A\[\s*(.)", given):
                case [b'"']:
                    return [*self._few(decode(given, list[str]))]
                case [b"["]:
                    self._few(range(given.count(b"[") - 1))  # a million lists are not to be made to be counted
                    return [tuple(ids) for ids in self._few(decode(given, list[list[int]]))]
                case [start] if start != b"]":
                    return [tuple(decode(given, list[int]))]
        except ApiError as fault:
            if fault.refusal.param == "prompt" or fault.refusal.code != "invalid_value":
                raise
            at = fault.refusal.param or ""  # what comes after the first is not wrong, but of another kind
            place = f"prompt.{at}" if at == "0" or "." in at else "prompt"
            raise ApiError(f"{fault} in {place}: {EXPECTED}", place) from None
        got = shown(decode(given, Any)) if len(given) <= SHOWN_CHARACTERS else "something else"
        raise ApiError(f"{EXPECTED}, got {got}", "prompt")

    def _few(self, prompts: Sequence[T]) -> Sequence[T]:
        if len(prompts) * (self.n or 1) > MOST_CHOICES:
            got = f"{len(prompts)} prompts with n: {self.n or 1}"
            raise ApiError(f"expected at most {MOST_CHOICES} choices in all, got {got}", "prompt")
        return prompts

    def turn(self, owner: str, model: str, prompt: Ids) -> Turn:
        """The turn of a prompt's first choice. Raises: ApiError for what cannot be honoured"""
        tokens = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        if not (tokens or self.echo):
            raise ApiError("expected max_tokens of at least 1, or echo: true with 0, got 0 without it", "max_tokens")
        form = constraints(None, None, None, self.response_format, "response_format")
        sampling = self.sampling(tokens, -1 if self.logprobs is None else self.logprobs, form.grammar)
        scored = bool(self.echo) and self.logprobs is not None
        return Turn(
            owner=owner,
            items=[],
            sampling=dataclasses.replace(sampling, prompt_logprobs=scored),
            stored=False,
            generate=tokens > 0,
            raw=prompt,
            request=Asked(model=model, **self.shown_settings(), max_output_tokens=tokens),
        )


BODY = with_unsupported(CompletionRequest, UNSUPPORTED, SHARED)


def read(data: bytes) -> CompletionRequest:
    """Raises: ApiError for what is wrong, and for what cannot be honoured"""
    asked = decode(data, BODY)
    refuse_unsupported(asked, UNSUPPORTED, SHARED)
    refuse_unless([("best_of", asked.best_of in (None, 1, asked.n), f"null, 1 or n: {shown(asked.n or 1)}")])
    return asked


class Completions:
    def __init__(self, conversations: Conversations, models: Models, batcher: Batcher) -> None:
        """`batcher`: to tell text from tokens."""
        self._conversations = conversations
        self._models = models
        self._batcher = batcher
        self.routes = [Route("/v1/completions", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        asked = read(await body_of(request))
        owner, model = owner_of(request.scope), self._models.served(asked.model)
        given = asked.prompts()
        with renaming(NAMES):
            prompts = [await self._ids(prompt) for prompt in given]
        turns = [asked.turn(owner, model, ids) for ids in prompts]
        choices = Choices(self._conversations, turns, asked.n or 1, NAMES)
        await begun(choices.begin(), request, cancel=True)
        try:
            echoes = [await self._echo(*prompt) for prompt in zip(given, prompts, strict=True)] if asked.echo else []
        except BaseException:
            choices.cancel()
            raise
        tellers = [CompletionTeller(asked, echoes[index // (asked.n or 1)] if echoes else None) for index in choices.indices]
        if asked.stream:
            usage = bool(asked.stream_options and asked.stream_options.include_usage)
            return sse.stream(until_gone(chunks(choices, tellers, usage), choices, cancel=True), named=False)
        await run_out(choices, request, cancel=True)
        return json_response(completion(choices, tellers))

    async def _ids(self, prompt: str | Ids) -> Ids:
        return tuple(await self._batcher.encode(prompt)) if isinstance(prompt, str) else prompt

    async def _echo(self, prompt: str | Ids, ids: Ids) -> Echo:
        first = await self._batcher.decode(ids[:1])
        return Echo(prompt if isinstance(prompt, str) else await self._batcher.decode(ids), first)


@dataclasses.dataclass(slots=True, frozen=True)
class Echo:
    """A prompt as a reply repeats it."""

    text: str
    first: str  # its first token alone; part of a character is none

    def first_piece(self, others: bytes) -> bytes:
        """The bytes of its first token, of which no log probability tells, given those of the others."""
        whole = self.text.encode()
        return whole[: len(whole) - len(others)] if whole.endswith(others) else self.first.encode()


class Likely(Protocol):
    """A token and how likely it was."""

    @property
    def piece(self) -> bytes: ...

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[Likely]: ...


class CompletionTeller:
    """One choice's text and log probabilities, in parts, of which the first begins with the prompt if it is to be echoed."""

    def __init__(self, asked: CompletionRequest, echo: Echo | None) -> None:
        self._scores = None if asked.logprobs is None else Scores()
        self._echo = echo
        self._empty = asked.max_tokens == 0

    def tell(self, prompt_run: Run, text: str, logprobs: Iterable[Likely] = ()) -> tuple[str, Wire | None]:
        if self._scores is None:
            shown = None
        else:
            echoed = self._scores.of_prompt(self._echo, prompt_run.prompt_logprobs) if self._echo else {}
            shown = _joined(echoed, self._scores.of(logprobs))
        said = (self._echo.text if self._echo else "") + text
        self._echo = None
        return said, shown

    def reason(self, run: Run) -> str:
        reason = finish_reason(run.response)
        return "length" if self._empty else reason


class Scores:
    """Log probabilities in the legacy shape, and where in the choice's text each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters that are whole

    def of_prompt(self, prompt: Echo, logprobs: Sequence[Likely | None]) -> Wire:
        others = [logprob for logprob in logprobs if logprob]
        first = prompt.first_piece(b"".join(other.piece for other in others))
        begins = {"tokens": [_spelt(first)], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [self._pass(first)]}
        return _joined(begins, self.of(others))

    def of(self, logprobs: Iterable[Likely]) -> Wire:
        shape: Wire = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in logprobs:
            shape["tokens"].append(_spelt(token.piece))
            shape["token_logprobs"].append(token.logprob)
            top = {_spelt(other.piece): other.logprob for other in reversed(token.top)}  # of two that look the same, the likelier
            shape["top_logprobs"].append(top | {_spelt(token.piece): token.logprob})
            shape["text_offset"].append(self._pass(token.piece))
        return shape

    def _pass(self, piece: bytes) -> int:
        """Where a token begins."""
        begins = self._offset
        self._offset += len(self._decoder.decode(piece))
        return begins


async def chunks(choices: Choices, tellers: Sequence[CompletionTeller], include_usage: bool) -> AsyncGenerator[Wire, None]:
    """The runs in parts, each a `text_completion`; then the usage, if asked for.

    Raises: as `Choices.entries`, and ApiError if a run failed
    """
    head = _head(choices.runs[0]) | ({"usage": None} if include_usage else {})
    async for index, entry in choices.entries():
        teller, run = tellers[index], choices.runs[index]
        reason = None if entry else teller.reason(run)
        text, logprobs = teller.tell(choices.prompt_run(index), entry.text if entry else "", entry.logprobs if entry else ())
        yield {**head, "choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage_object(choices.usage)}


def completion(choices: Choices, tellers: Sequence[CompletionTeller]) -> Wire:
    """Finished runs as a `text_completion` object. Raises: ApiError if one failed"""
    told = []
    for index, run in sorted(choices.runs.items()):
        teller = tellers[index]
        reason = teller.reason(run)
        tokens = [logprob for entry in run.logged for logprob in entry.logprobs]
        text, logprobs = teller.tell(choices.prompt_run(index), run.reply.text, tokens)
        told.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    return {**_head(choices.runs[0]), "choices": told, "usage": usage_object(choices.usage)}


def _head(run: Run) -> Wire:
    response = run.response
    return {
        "id": f"cmpl-{response.id.removeprefix('resp_')}",
        "object": "text_completion",
        "created": int(response.created_at),
        "model": response.request.model,
    }


def _joined(first: Wire, second: Wire) -> Wire:
    return {name: [*first.get(name, ()), *values] for name, values in second.items()}


def _spelt(piece: bytes) -> str:
    """A token as text; one that is part of a character only, as OpenAI spells it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
