"""The command's own arguments."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import _named
from benchmarks.load import LoadError

KNOWN = ["short", "long"]


def test_a_peer_is_a_name_perhaps_works_and_a_url_or_command() -> None:
    assert _named("llama.cpp=http://127.0.0.1:8080", KNOWN) == ("llama.cpp", "http://127.0.0.1:8080", [])
    assert _named("a b@long,short=run --set x=1@2 {port}", KNOWN) == ("a b", "run --set x=1@2 {port}", ["long", "short"])


@pytest.mark.parametrize(
    ("peer", "said"),
    [("http://127.0.0.1:8080", "NAME=URL"), ("=x", "NAME=URL"), ("x=", "NAME=URL"), ("x@tall=y", "works of short, long, got tall")],
)
def test_a_peer_that_cannot_be_meant_is_refused(peer: str, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        _named(peer, KNOWN)
