"""Fields of the stateless protocols that would change a reply and are not supported, with the values that leave it as it is.

Clients and libraries send many of these with their neutral value. Fields that are in no table are not understood, and ignored.
(vLLM and SGLang documentation: extra parameters)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from app.api.decoding import refuse_unless

Neutral = Mapping[str, tuple[Any, ...]]

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


def refuse_unsupported(given: Mapping[str, Any], *tables: Neutral) -> None:
    """Raises: ApiError, naming the first field of a table that is not neutral"""
    values = {name: neutral for table in tables for name, neutral in table.items()}
    refuse_unless((name, given.get(name) in neutral, " or ".join(map(json.dumps, neutral))) for name, neutral in values.items())
