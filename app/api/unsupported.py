"""Fields of the stateless protocols that would change a reply and are not supported, with the values that leave it as it is.

Clients and libraries send many of these with their neutral value. Fields that are in no table are not understood, and ignored.
(vLLM and SGLang documentation: extra parameters)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from app.api.decoding import refuse_unless
from app.api.sizes import ABSENT

Neutral = Mapping[str, tuple[Any, ...]]
Request = TypeVar("Request", bound=msgspec.Struct)

LONGEST = 256  # bytes of a value that may be neutral

SHARED: Neutral = {
    "min_tokens": (None, 0),
    "min_new_tokens": (None, 0),
    "length_penalty": (None, 1),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "skip_special_tokens": (None, True),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}


def with_unsupported(request: type[Request], *tables: Neutral, **others: Any) -> type[Request]:
    """The type with the tables' fields too, as they stand, for `refuse_unsupported`; and with `others` of other types: name to type."""
    fields = [(name, msgspec.Raw, ABSENT) for table in tables for name in table]
    made = msgspec.defstruct(
        request.__name__, [*fields, *((name, kind, None) for name, kind in others.items())], bases=(request,), kw_only=True
    )
    return cast("type[Request]", made)


def refuse_unsupported(given: msgspec.Struct, *tables: Neutral) -> None:
    """`given`: of a type with the tables' fields. Raises: ApiError, naming the first field of a table that is not neutral"""
    neutral = {name: values for table in tables for name, values in table.items()}
    refuse_unless(
        (name, _is_one_of(getattr(given, name), values), " or ".join(map(json.dumps, values))) for name, values in neutral.items()
    )


def _is_one_of(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    if memoryview(raw).nbytes > LONGEST:
        return False
    try:
        return msgspec.json.decode(raw) in values
    except (msgspec.MsgspecError, UnicodeError):  # a number too large, what is no UTF-8
        return False
