"""Reading what clients send: JSON to typed messages, with errors that say what was expected and what came.

Owns the sampling fields that every protocol shares. Bounds are part of the types, so that an absurd number is refused before anything
is done with it; `sizes.py` has those of what takes long to decode at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.requests import Request

from app.api.errors import ApiError
from app.api.sizes import MOST_BYTES, bounded, check_sizes
from app.store.records import Role
from engine.core import Grammar, SamplingParams

T = TypeVar("T")

SHOWN_CHARACTERS = 80
MAX_CALL_ID = 256  # characters
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_IDS = 1024
MAX_MESSAGES = 4096  # of one request
DELIVERY = ("type", "stream_id", "stream", "stream_options", "background")  # fields that say how a reply is to come, not which
ABSENT = object()  # in place of a value

Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
TIERS = {"auto": "default", "default": "default", "priority": "default", "flex": "flex"}  # service tiers, as asked for: as used
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """OpenAI's sampling fields and the extensions that open servers share (top_k, min_p, repetition_penalty, ...)."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_IDS)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_IDS)] | None = None
    ignore_eos: bool | None = None

    def shown_settings(self) -> dict[str, Any]:
        """The settings that a response object shows."""
        return {
            "temperature": _or(self.temperature, 1.0),
            "top_p": _or(self.top_p, 1.0),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
        }

    def sampling(self, max_tokens: int | None, logprobs: int = -1, grammar: Grammar | None = None) -> SamplingParams:
        """max_tokens None: to the end of the context. Without a seed each request draws its own."""
        return SamplingParams(
            max_tokens=max_tokens or 0,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, self.top_k or 0),
            top_p=_or(self.top_p, 1.0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias={_token_id(key): bias for key, bias in (self.logit_bias or {}).items()},
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            grammar=grammar,
        )


class Part(msgspec.Struct):
    """One part of a message's content. Only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None  # a reply's, in which it says that it will not


Content = str | Annotated[list[Part], bounded(None)]

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def message_of(role: str | None, content: Content | None, param: str) -> tuple[Role, str]:
    """A message's role in the ledger's words, and its text. Raises: ApiError, naming the message as `param`"""
    if role not in ROLES:
        raise ApiError(f"expected a role of {', '.join(ROLES)}, got {shown(role)} in {param}", f"{param}.role")
    return ROLES[role], text_of(content, f"{param}.content", reply=role == "assistant")


def refuse_unless(neutral: Iterable[tuple[str, bool, str]]) -> None:
    """For fields that are understood with a neutral value only: (field, it is neutral, which values are). Raises: ApiError"""
    for field, holds, expected in neutral:
        if not holds:
            raise ApiError(f"{field} is supported only as {expected}, got something else", field, "unsupported_value")


def tier_used(asked: str | None) -> str:
    """The service tier for the one asked for: flex is for work in the background. Raises: ApiError"""
    tier = TIERS.get("auto" if asked is None else asked)
    if tier is None:
        raise ApiError(f"expected a service_tier of {', '.join(TIERS)}, got {shown(asked)}", "service_tier", "unsupported_value")
    return tier


def text_of(content: Content | None, param: str, reply: bool = False) -> str:
    """The text of a string or of text parts, and of the refusals of a `reply`. Raises: ApiError for any other part"""
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        text = part.refusal if reply and part.type == "refusal" else part.text if part.type in TEXT_PARTS else None
        if text is None:
            raise ApiError(
                f"expected text parts ({', '.join(TEXT_PARTS)}) in {param}, got {shown(part.type)}", param, "unsupported_content"
            )
        texts.append(text)
    return "".join(texts)


def digest_of(asked: msgspec.Struct) -> bytes:
    """Of what is asked for, however the reply is to come: the same request, sent again, has the same. Raises: ApiError"""
    delivery = {name: None for name in DELIVERY if name in asked.__struct_fields__}
    try:
        data = msgspec.json.encode(replace(asked, **delivery), order="deterministic")
    except RecursionError:
        raise ApiError("expected a JSON object, got one nested too deeply", None, "invalid_json") from None
    return hashlib.blake2b(data, digest_size=16).digest()


async def body_of(request: Request) -> bytes:
    """An HTTP request's body. Raises: ApiError when it is longer than a WebSocket frame may be"""
    limit: int = request.app.state.max_body_bytes
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise ApiError(f"expected a body of at most {limit} bytes, got more", None, "request_too_large", 413)
    return bytes(body)


def decode(data: bytes | str, type: type[T]) -> T:
    """Raises: ApiError, naming the field, what it should be and what it is"""
    large = len(data) > MOST_BYTES
    try:
        try:
            if large and issubclass(type, msgspec.Struct):
                check_sizes(data, type)
            return msgspec.json.decode(data, type=type)
        except msgspec.ValidationError as fault:
            raise _invalid(str(fault), ABSENT if large else msgspec.json.decode(data)) from None
    except (msgspec.DecodeError, UnicodeError) as fault:
        raise ApiError(
            f"expected a JSON object in UTF-8 without lone surrogates, got something else: {fault}", None, "invalid_json"
        ) from None
    except RecursionError:
        raise ApiError("expected a JSON object, got one nested too deeply", None, "invalid_json") from None


def whole_number(query: Mapping[str, str], name: str, default: int, most: int = 2**31) -> int:
    """A query parameter. Raises: ApiError"""
    text = query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or int(text) > most:
        raise ApiError(f"expected a whole number of 0 to {most} in {name}, got {text[:SHOWN_CHARACTERS]!r}", name)
    return int(text)


def _invalid(fault: str, raw: Any) -> ApiError:
    """`raw`: what was decoded, if that is at hand."""
    message, _, path = fault.partition(" - at `")
    keys = re.findall(r"\w+|(?<=\[)\d+(?=\])", path.removeprefix("$"))
    where, value = ".".join(keys), raw
    for key in keys:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
    if unknown := re.fullmatch(r"(Object contains unknown field) `(.*)`", message, re.DOTALL):
        keys.append(_cut(unknown[2]))
        message = f"{unknown[1]} `{keys[-1]}`"
    got = "" if unknown or ", got" in message or "missing required" in message or raw is ABSENT else f", got {shown(value)}"
    return ApiError(f"{message[:1].lower()}{message[1:]}{got}{f' in {where}' if where else ''}", ".".join(keys) or None)


@contextmanager
def within(field: str) -> Iterator[None]:
    """Errors of what is read in `field` name its fields by their whole path."""
    try:
        yield
    except ApiError as fault:
        if fault.refusal.param is not None:
            fault.refusal = dataclasses.replace(fault.refusal, param=f"{field}.{fault.refusal.param}")
        raise


def shown(value: Any) -> str:
    if isinstance(value, str):
        value = value[: SHOWN_CHARACTERS + 1]
    return _cut(msgspec.json.encode(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _token_id(key: str) -> int:
    if not re.fullmatch(r"\d{1,9}", key, re.ASCII):
        raise ApiError(f"expected token ids as keys of logit_bias, got {key[:SHOWN_CHARACTERS]!r}", "logit_bias")
    return int(key)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
