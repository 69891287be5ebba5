"""Fields that are understood with a neutral value only, whatever stands in them."""

from __future__ import annotations

import pytest

from app.api.chat_completions import read
from app.api.errors import ApiError


@pytest.mark.parametrize("value", [b"1e999", b"-1e999", b'"\xff"', b'"\\ud800"', b"1" * 5000, b"[" * 500 + b"]" * 500, b"1"])
def test_what_is_not_neutral_is_refused_by_its_name(value: bytes) -> None:
    with pytest.raises(ApiError) as fault:
        read(b'{"messages": [{"role": "user", "content": "x"}], "min_tokens": ' + value + b"}")
    assert fault.value.refusal.status == 400
    assert fault.value.refusal.param in ("min_tokens", None)  # None: the body as a whole is no JSON


def test_what_is_neutral_is_taken() -> None:
    read(b'{"messages": [{"role": "user", "content": "x"}], "min_tokens": 0, "guided_json": null, "junk": 1e999}')
