"""The load on the real server. (slow)"""

from __future__ import annotations

import pytest

from benchmarks.clients import CLIENTS
from benchmarks.load import Load, Result, run
from benchmarks.servers import hocket
from tests.serving import Server

pytestmark = pytest.mark.slow


async def test_both_protocols_have_the_same_conversations(server: Server) -> None:
    results: dict[str, Result] = {}
    for protocol in ("chat", "responses"):
        with hocket(server.url, [], protocol) as contender:
            assert contender.pid == server.process.pid if server.process else False
            assert (contender.memory() or 0) > 50_000_000
            results[protocol] = await run(contender.client, Load(2, turns=2, prompt_tokens=20, reply_tokens=12))
    chat, responses = (sorted(turn.text for turn in results[protocol].turns if turn.number == 0) for protocol in CLIENTS)
    assert chat == responses
    for result in results.values():
        assert [turn.tokens for turn in result.turns] == [12] * 4
        assert result.cached is not None
        assert result.cached > 0
