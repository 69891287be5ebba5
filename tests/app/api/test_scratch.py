"""What a connection keeps of responses that are not stored."""

from __future__ import annotations

from app.api.responses.scratch import Scratch
from app.conversations.run import Run
from app.conversations.turn import Said, new_conversation, new_id, new_items
from app.store.records import Asked, Response


async def made(scratch: Scratch, lane: str | None, text: str = "hi") -> str:
    """A response of the lane, ended. Returns its id."""
    conversation = new_conversation("ana", listed=False)
    asked, reply = new_items([Said("user", text), Said("assistant", "yes")], None)
    response = Response(
        id=new_id("resp"),
        owner="ana",
        conversation=conversation.id,
        previous=None,
        input=[asked.id],
        output=reply.id,
        created_at=0.0,
        request=Asked(),
    )
    await scratch.shelf.store.accept(conversation, response, [asked, reply])
    await scratch.keep(Run(response, reply), lane)
    return response.id


async def known(scratch: Scratch, *ids: str) -> list[bool]:
    return [await scratch.shelf.store.response(id) is not None for id in ids]


async def test_the_oldest_go_first_and_each_lanes_latest_last() -> None:
    scratch = Scratch(most_responses=4)
    quiet = await made(scratch, "quiet")
    busy = [await made(scratch, "busy") for _ in range(5)]
    assert await known(scratch, quiet, *busy) == [True, False, False, True, True, True]
    default = await made(scratch, None)
    assert await known(scratch, quiet, *busy, default) == [True, False, False, False, True, True, True]
    lanes = [await made(scratch, f"lane {number}") for number in range(3)]
    assert await known(scratch, quiet, busy[-1], default, *lanes) == [False, False, True, True, True, True]


async def test_memory_is_bounded_in_bytes() -> None:
    scratch = Scratch(most_bytes=100_000)
    ids = [await made(scratch, None, "x" * 20_000) for _ in range(50)]
    there = await known(scratch, *ids)
    assert there == sorted(there), "the oldest go first"
    assert 1 <= sum(there) <= 5
    huge = await made(scratch, None, "x" * 200_000)
    assert not any(await known(scratch, *ids, huge)), "what does not fit is not kept"


async def test_only_the_lane_that_made_it_evicts() -> None:
    scratch = Scratch()
    named, default = await made(scratch, "a"), await made(scratch, None)
    for id, lane in ((named, None), (named, "b"), (default, "a"), ("resp_unknown", None)):
        await scratch.evict(id, lane)
    assert await known(scratch, named, default) == [True, True]
    await scratch.evict(named, "a")
    await scratch.evict(default, None)
    assert await known(scratch, named, default) == [False, False]
    await scratch.evict(default, None)
