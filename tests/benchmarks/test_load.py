"""The load generator against a peer that says what the test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.clients import Body, ChatClient
from benchmarks.load import Load, LoadError, Result, Turn, percentile, run
from tests.benchmarks.peer import CHUNKED, DONE, PLAIN, chunk, peer, piece, says, usage


def refusals(group: BaseExceptionGroup[BaseException]) -> list[str]:
    return [str(fault) for fault in group.exceptions]


async def play(url: str, load: Load) -> Result:
    return await run(lambda: ChatClient(url, "a model"), load)


async def test_each_turn_sends_the_whole_chat_and_every_reply_is_counted() -> None:
    async with peer() as (url, bodies):
        result = await play(url, Load(conversations=3, turns=2, prompt_tokens=20, reply_tokens=4))
    assert len(bodies) == 6
    assert [len(turn.arrivals) for turn in result.turns] == [4] * 6
    assert result.tokens_per_second == pytest.approx(24 / result.seconds)
    assert len(result.first) == len(result.later) == 3
    assert result.cached == pytest.approx(10 / 30), "of turn 2: 3 messages, 30 tokens, 10 of them cached"
    second = next(body for body in bodies if len(body["messages"]) == 3)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "1 word1 word2 word3"
    assert second | {"messages": []} == {
        "model": "a model",
        "messages": [],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_seed_gives_the_same_prompts_to_everyone_and_another_seed_others() -> None:
    seen = []
    for seed in ("1", "1", "2"):
        async with peer() as (url, bodies):
            await play(url, Load(conversations=4, prompt_tokens=30, reply_tokens=2, seed=seed))
        seen.append(sorted(body["messages"][0]["content"] for body in bodies))
    assert seen[0] == seen[1] != seen[2]
    assert len(set(seen[0])) == 4


def short(body: dict[str, Any]) -> Iterator[bytes]:
    yield PLAIN + piece("one") + usage(10, 1) + DONE


def uncounted(body: dict[str, Any]) -> Iterator[bytes]:
    yield PLAIN + piece("one") + piece("two") + DONE


def cut(body: dict[str, Any]) -> Iterator[bytes]:
    yield PLAIN + piece("one")


def refused(body: dict[str, Any]) -> Iterator[bytes]:
    yield b'HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n{"error": "still loading"}'


def failed(body: dict[str, Any]) -> Iterator[bytes]:
    yield PLAIN + piece("one") + b'data: {"error": {"message": "out of memory"}}\n\n'


def strange(body: dict[str, Any]) -> Iterator[bytes]:
    yield PLAIN + b"data: {nonsense\n\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (short, "expected a reply of 2 tokens, got 1"),
        (uncounted, "expected a reply of 2 tokens, got no count"),
        (cut, "the end of the connection"),
        (refused, "status 503 and the end of the connection: .*still loading"),
        (failed, "out of memory"),
        (strange, "expected a chat completion's chunk"),
    ],
)
async def test_a_peer_that_gives_less_than_asked_fails_the_run(answer: Any, said: str) -> None:
    async with peer(answer) as (url, _):
        with pytest.raises(BaseExceptionGroup) as caught:
            await play(url, Load(conversations=1, reply_tokens=2))
    assert caught.group_contains(LoadError, match=said), refusals(caught.value)


async def test_chunks_that_split_events_anywhere_are_put_together() -> None:
    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        whole = b"".join(says(body)).removeprefix(PLAIN)
        yield CHUNKED
        for at in range(0, len(whole), 7):
            yield chunk(whole[at : at + 7])
        yield chunk(b"")

    async with peer(answer) as (url, _):
        result = await play(url, Load(conversations=1, reply_tokens=5))
    assert result.turns[0].text == "1 word1 word2 word3 word4"
    assert result.turns[0].prompt_tokens == 10


@given(st.binary(max_size=60), st.lists(st.integers(1, 12), min_size=1), st.booleans(), st.data())
def test_a_body_is_the_same_however_its_bytes_arrive(content: bytes, sizes: list[int], chunked: bool, data: st.DataObject) -> None:
    wire = PLAIN + content
    if chunked:
        parts, at = [], 0
        while at < len(content):
            size = sizes[len(parts) % len(sizes)]
            parts.append(chunk(content[at : at + size]))
            at += size
        wire = CHUNKED + b"".join(parts) + chunk(b"")
    body, got, at = Body(), b"", 0
    while at < len(wire):
        size = data.draw(st.integers(1, 30))
        got += body.take(wire[at : at + size])
        at += size
    assert (body.status, got) == (200, content)


def test_times_are_those_of_visible_text() -> None:
    turn = Turn(0, began=1.0, ended=9.0, arrivals=[2.0, 2.5, 4.0], tokens=7)
    assert turn.ttft == 1.0
    assert turn.gaps == [0.5, 1.5]
    assert turn.decode_rate == 3.0
    assert Turn(0, began=1.0, ended=9.0).ttft == 8.0, "a reply without visible text"
    with pytest.raises(LoadError, match="several pieces"):
        _ = Turn(0, began=1.0, ended=9.0, arrivals=[2.0], tokens=1).decode_rate


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_within_and_halves_at_50(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([3.0, 1.0, 2.0], 100) == 3.0
