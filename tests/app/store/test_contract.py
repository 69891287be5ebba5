"""What every store promises, checked on each of them; the durable one against a real Valkey."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.store import GoneError, RefusedError, Store, StoreError
from app.store.memory import MemoryStore
from app.store.records import Asked, Conversation, Entry, Item, Response, Usage
from app.store.valkey import ValkeyStore

fresh = count(1)


def conversation(owner: str = "ana", listed: bool = True, updated_at: float = 1.0) -> Conversation:
    return Conversation(id=f"conv_{next(fresh)}", owner=owner, created_at=1.0, updated_at=updated_at, listed=listed)


def turn(thread: Conversation, message_id: str | None = None, created_at: float = 1.0) -> tuple[Response, list[Item]]:
    number = next(fresh)
    response = Response(
        id=f"resp_{number}",
        owner=thread.owner,
        conversation=thread.id,
        previous=None,
        input=[f"msg_{number}"],
        output=f"msg_{number}_reply",
        created_at=created_at,
        request=Asked(temperature=0.5, metadata={"a": "ü"}),
        client_message_id=message_id,
    )
    return response, [Item(id=f"msg_{number}", parent=None, role="user", text="Hi 👋", created_at=created_at, response=response.id)]


def reply(response: Response, text: str = "Hello") -> Item:
    return Item(
        id=response.output,
        parent=response.input[-1],
        role="assistant",
        text=text,
        created_at=2.0,
        response=response.id,
        lead_ids=[1, 2],
        lead_digest=b"\x00\xff",
        ids=[3, 4],
        fingerprint="f",
    )


async def test_conversation_round_trip(store: Store) -> None:
    thread = conversation()
    assert await store.conversation(thread.id) is None
    await store.create_conversation(thread)
    assert await store.conversation(thread.id) == thread
    thread.title = "changed but not written"
    assert (await store.conversation(thread.id) or thread).title == ""
    await store.update_conversation(thread)
    assert await store.conversation(thread.id) == thread


async def test_a_whole_turn(store: Store) -> None:
    thread = conversation()
    response, items = turn(thread)
    thread.leaf = items[0].id
    assert await store.accept(thread, response, items) is None
    assert await store.conversation(thread.id) == thread
    assert await store.response(response.id) == response
    assert await store.items(thread.id) == {items[0].id: items[0]}
    assert await store.open_responses() == [response]

    await store.append([(response.id, 1, Entry([3], "Hel"))])
    await store.append([(response.id, 2, Entry([4], "lo")), (response.id, 3, Entry([], ""))])
    assert await store.entries(response.id) == [Entry([3], "Hel"), Entry([4], "lo"), Entry([], "")]
    assert await store.entries(response.id, after=2) == [Entry([], "")]
    assert await store.entries(response.id, after=3) == []

    response.status, response.completed_at, response.usage = "completed", 2.0, Usage(prompt_tokens=5, completion_tokens=2)
    answer = reply(response)
    await store.finish(response, answer)
    assert await store.response(response.id) == response
    assert await store.items(thread.id) == {items[0].id: items[0], answer.id: answer}
    assert await store.conversation(thread.id) == thread
    assert await store.open_responses() == []
    assert len(await store.entries(response.id)) == 3


async def test_unknown_ids_read_as_nothing(store: Store) -> None:
    for id in ("resp_none", "", "a}:log", "*", "\x00", "\ud800", "x" * 5000):
        assert await store.response(id) is None
        assert await store.conversation(id) is None
        assert await store.items(id) == {}
        assert await store.entries(id) == []
        assert await store.conversations(id, 10) == []
        assert await store.conversations("ana", 10, after=id) == []


async def test_same_message_id_gives_the_first_response(store: Store) -> None:
    thread = conversation()
    response, items = turn(thread, "m1")
    assert await store.accept(thread, response, items) is None
    other = conversation()
    again, more = turn(other, "m1")
    assert await store.accept(other, again, more) == response
    assert await store.response(again.id) is None
    assert await store.conversation(other.id) is None
    assert await store.items(other.id) == {}
    assert await store.open_responses() == [response]

    response.status = "completed"
    await store.finish(response, reply(response))
    assert await store.accept(other, again, more) == response, "the earlier response as it is now"
    assert await store.repeated("ana", "m1") == response
    assert await store.repeated("ana", "m2") is None
    assert await store.repeated("ben", "m1") is None


async def test_a_message_id_is_its_owners_own(store: Store) -> None:
    """C9: the fields of the key cannot be joined into another owner's."""
    for owner, message_id in (("a", "b:c"), ("a:b", "c"), ("1:a", "b:c"), ("a", "1:b:c")):
        thread = conversation(owner)
        assert await store.accept(thread, *turn(thread, message_id)) is None
    for _ in range(2):
        thread = conversation()
        assert await store.accept(thread, *turn(thread)) is None, "no message id: always a new response"


async def test_concurrent_submits_of_one_message_give_one_response(store: Store) -> None:
    threads = [conversation() for _ in range(12)]
    turns = [turn(thread, "same") for thread in threads]
    answers = await asyncio.gather(*(store.accept(thread, *one) for thread, one in zip(threads, turns, strict=True)))
    assert answers.count(None) == 1
    winner = turns[answers.index(None)][0]
    assert all(answer == winner for answer in answers if answer is not None)
    assert await store.open_responses() == [winner]


async def test_low_indices_are_refused_and_neighbours_written(store: Store) -> None:
    thread = conversation()
    one, two = turn(thread)[0], turn(thread)[0]
    await store.accept(thread, one, [])
    await store.accept(thread, two, [])
    await store.append([(one.id, 1, Entry([1], "a")), (one.id, 2, Entry([2], "b"))])
    for index in (0, 1, 2):
        with pytest.raises(RefusedError, match=f"{one.id}.*got {index}") as caught:
            await store.append([(one.id, index, Entry([9], "x")), (two.id, index + 1, Entry([index], "y")), ("gone", 1, Entry([], ""))])
        assert caught.value.responses == {one.id, "gone"}
    assert await store.entries(one.id) == [Entry([1], "a"), Entry([2], "b")]
    assert await store.entries(two.id) == [Entry([0], "y"), Entry([1], "y"), Entry([2], "y")]
    assert await store.entries("gone") == []
    await store.append([])


async def test_listing(store: Store) -> None:
    threads = [conversation(updated_at=float(n)) for n in range(5)]
    for thread in threads:
        await store.create_conversation(thread)
    await store.create_conversation(conversation(listed=False))
    await store.create_conversation(conversation(owner="ben"))
    newest_first = threads[::-1]
    assert await store.conversations("ana", 10) == newest_first
    assert await store.conversations("ana", 2) == newest_first[:2]
    assert await store.conversations("ana", 2, after=newest_first[1].id) == newest_first[2:4]
    assert await store.conversations("ana", 2, after=newest_first[4].id) == []
    assert await store.conversations("ana", 0) == []
    assert await store.conversations("ana", -1) == []
    threads[0].updated_at = 9.0
    await store.update_conversation(threads[0])
    assert (await store.conversations("ana", 1))[0] == threads[0]
    response, items = turn(threads[1])
    threads[1].updated_at = 10.0
    await store.accept(threads[1], response, items)
    assert (await store.conversations("ana", 1))[0] == threads[1]


async def test_what_does_not_last_is_told_when_its_time_is_over_until_it_is_deleted(store: Store) -> None:
    made = []
    for expires_at in (20.0, None, 10.0, 5.0, 4.0):
        thread = conversation(listed=expires_at == 5.0)
        response, items = turn(thread)
        response.expires_at = expires_at
        await store.accept(thread, response, items)
        made.append((thread, response))
    (_, twenty), _, (_, ten), (_, five), (thread, four) = made
    assert await store.expired(4.0, 9) == []
    assert await store.expired(25.0, 9) == [four, five, ten, twenty]
    assert await store.expired(25.0, 2) == [four, five]
    await store.delete_response(ten)
    await store.delete_response(five)
    await store.delete_conversation(thread)
    assert await store.expired(1e12, 1) == [twenty]


@pytest.mark.parametrize("listed", [True, False])
async def test_nothing_goes_on_after_what_was_deleted(store: Store, listed: bool) -> None:
    thread = conversation(listed=listed)
    first, items = turn(thread)
    await store.accept(thread, first, items)
    response, more = turn(thread)
    response.previous = first.id
    await store.delete_response(first)
    with pytest.raises(GoneError):
        await store.accept(thread, response, more, True)
    assert await store.response(response.id) is None
    assert await store.open_responses() == []
    assert await store.items(thread.id) == ({items[0].id: items[0]} if listed else {})
    assert (await store.conversation(thread.id) is not None) == listed
    response.previous = None  # by the conversation's name
    await store.delete_conversation(thread)
    with pytest.raises(GoneError):
        await store.accept(thread, response, more, True)
    assert await store.conversation(thread.id) is None
    assert await store.items(thread.id) == {}


async def test_deleting_leaves_nothing_and_nothing_comes_back(store: Store) -> None:
    thread, kept = conversation(), conversation()
    response, items = turn(thread, "m1")
    other, other_items = turn(kept, "m2")
    await store.accept(thread, response, items)
    await store.accept(kept, other, other_items)
    await store.append([(response.id, 1, Entry([1], "a")), (other.id, 1, Entry([1], "a"))])
    await store.delete_conversation(thread)

    async def nothing_left() -> None:
        assert await store.conversation(thread.id) is None
        assert await store.items(thread.id) == {}
        assert await store.response(response.id) is None
        assert await store.entries(response.id) == []
        assert await store.conversations("ana", 10) == [kept]
        assert await store.open_responses() == [other]

    await nothing_left()
    await store.finish(response, reply(response))
    await store.update_conversation(thread)
    with pytest.raises(RefusedError):
        await store.append([(response.id, 2, Entry([2], "b"))])
    await nothing_left()
    await store.delete_conversation(thread)
    await nothing_left()
    assert await store.items(kept.id) == {other_items[0].id: other_items[0]}
    assert await store.entries(other.id) == [Entry([1], "a")]
    again, more = turn(kept, "m1")
    assert await store.accept(kept, again, more) is None, "the message id went with its response"
    assert await store.accept(kept, *turn(kept, "m2")) == other


async def test_open_responses_oldest_first(store: Store) -> None:
    thread = conversation()
    for created_at in (3.0, 1.0, 2.0):
        await store.accept(thread, *turn(thread, created_at=created_at))
    assert [response.created_at for response in await store.open_responses()] == [1.0, 2.0, 3.0]


async def test_what_cannot_be_encoded_is_refused_whole(store: Store) -> None:
    thread = conversation()
    response, items = turn(thread, "m1")
    items[0].text = "\ud800"
    with pytest.raises(StoreError, match="Item"):
        await store.accept(thread, response, items)
    with pytest.raises(StoreError, match="Entry"):
        await store.append([(response.id, 1, Entry([], "\ud800"))])
    assert await store.conversation(thread.id) is None
    assert await store.open_responses() == []
    items[0].text = "fine"
    assert await store.accept(thread, response, items) is None


async def test_ping(store: Store) -> None:
    await store.ping()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, 2), st.sampled_from([None, "m1", "m2"])),
        st.tuples(st.just("append"), st.integers(0, 5), st.integers(1, 4)),
        st.tuples(st.just("finish"), st.integers(0, 5), st.none()),
        st.tuples(st.just("delete"), st.integers(0, 2), st.none()),
    ),
    max_size=20,
)


@given(steps)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_the_durable_store_does_what_the_dictionaries_do(valkey: ValkeyStore, plan: list[tuple[str, int, object]]) -> None:
    """Any sequence of writes leaves both stores with the same answers to every read."""
    await valkey._client.flushall()
    stores: list[Store] = [MemoryStore(), valkey]
    threads = [Conversation(id=f"c{n}", owner="ana" if n else "ben", created_at=1.0, updated_at=1.0, listed=n < 2) for n in range(3)]
    responses: list[Response] = []
    for clock, (action, number, detail) in enumerate(plan):
        answers: list[object] = []
        if action in ("append", "finish") and not responses:
            continue
        if action == "accept":
            thread = threads[number]
            thread.updated_at = float(clock)
            response, items = turn(thread, detail if isinstance(detail, str) else None, created_at=float(clock))
            for store in stores:
                answers.append(await store.accept(thread, response, items))
            responses.append(response)
        elif action == "append":
            batch = [(responses[number % len(responses)].id, detail, Entry([clock], str(clock)))]
            for store in stores:
                try:
                    await store.append(batch)  # type: ignore[arg-type]
                    answers.append("written")
                except RefusedError as refused:
                    answers.append(refused.responses)
        elif action == "finish":
            response = responses[number % len(responses)]
            response.status = "completed"
            for store in stores:
                await store.finish(response, reply(response))
        else:
            for store in stores:
                await store.delete_conversation(threads[number])
        assert not answers or answers[0] == answers[1]
    seen = []
    for store in stores:
        seen.append(
            (
                [await store.conversation(thread.id) for thread in threads],
                [await store.items(thread.id) for thread in threads],
                [await store.response(response.id) for response in responses],
                [await store.entries(response.id) for response in responses],
                [await store.conversations(owner, 10) for owner in ("ana", "ben")],
                await store.open_responses(),
            )
        )
    assert seen[0] == seen[1]


async def test_items_are_put_into_a_conversation_that_exists(store: Store) -> None:
    thread = conversation()
    _, items = turn(thread)
    await store.create_conversation(thread)
    thread.leaf, thread.updated_at = items[0].id, 5.0
    await store.put_items(thread, items)
    assert await store.items(thread.id) == {items[0].id: items[0]}
    assert await store.conversation(thread.id) == thread
    items[0].text = "changed"
    await store.put_items(thread, items)
    assert await store.items(thread.id) == {items[0].id: items[0]}
    other = conversation(updated_at=4.0)
    await store.create_conversation(other)
    assert [one.id for one in await store.conversations("ana", 2)] == [thread.id, other.id], "what was changed last is first"


async def test_a_deleted_conversation_takes_no_items(store: Store) -> None:
    thread = conversation()
    _, items = turn(thread)
    await store.create_conversation(thread)
    await store.delete_conversation(thread)
    await store.put_items(thread, items)
    assert await store.items(thread.id) == {}
    assert await store.conversation(thread.id) is None
    assert thread.id not in [one.id for one in await store.conversations("ana", 100)]


async def test_a_deleted_response_leaves_its_items_behind(store: Store) -> None:
    thread = conversation()
    response, items = turn(thread, "deleted")
    other, more = turn(thread)
    await store.accept(thread, response, items)
    await store.accept(thread, other, more)
    await store.append([(response.id, 1, Entry([3], "Hel")), (other.id, 1, Entry([4], "lo"))])
    await store.delete_response(response)
    assert await store.response(response.id) is None
    assert await store.entries(response.id) == []
    assert await store.open_responses() == [other]
    assert await store.repeated("ana", "deleted") is None
    assert set(await store.items(thread.id)) == {items[0].id, more[0].id}
    assert await store.entries(other.id) == [Entry([4], "lo")]
    with pytest.raises(RefusedError):
        await store.append([(response.id, 2, Entry([], "late"))])
    await store.finish(response, reply(response))  # it ends nothing that is there
    assert await store.response(response.id) is None
    assert set(await store.items(thread.id)) == {items[0].id, more[0].id}
    await store.delete_response(response)


@pytest.mark.parametrize("listed", [True, False])
async def test_only_a_listed_conversation_outlives_its_last_response(store: Store, listed: bool) -> None:
    thread = conversation(listed=listed)
    response, items = turn(thread)
    other, more = turn(thread)
    await store.accept(thread, response, items)
    await store.accept(thread, other, more)
    await store.delete_response(response)
    assert await store.conversation(thread.id) == thread
    await store.delete_response(other)
    assert (await store.conversation(thread.id) is not None) == listed
    assert bool(await store.items(thread.id)) == listed
    assert await store.open_responses() == []


async def test_deleting_a_response_leaves_a_younger_one_its_message_id(store: Store) -> None:
    thread = conversation()
    response, items = turn(thread, "mine")
    younger, more = turn(thread, "other")
    await store.accept(thread, response, items)
    await store.accept(thread, younger, more)
    renamed = Response(**{name: getattr(response, name) for name in response.__struct_fields__} | {"client_message_id": "other"})
    await store.delete_response(renamed)
    assert await store.repeated("ana", "other") == younger


async def test_a_conversation_begins_with_items_or_not_at_all(store: Store) -> None:
    thread = conversation()
    _, items = turn(thread)
    thread.leaf = items[0].id
    await store.create_conversation(thread, items)
    assert await store.items(thread.id) == {items[0].id: items[0]}
    broken = conversation()
    with pytest.raises(StoreError):
        await store.create_conversation(broken, [Item(id="msg_x", parent=None, role="user", text="\ud800", created_at=1.0, response="")])
    assert await store.conversation(broken.id) is None


async def test_what_is_no_longer_said_is_forgotten_with_its_entries(store: Store) -> None:
    thread = conversation()
    response, items = turn(thread)
    other, more = turn(thread)
    await store.accept(thread, response, items)
    await store.accept(thread, other, more)
    await store.append([(response.id, 1, Entry([3], "Hel")), (other.id, 1, Entry([4], "lo"))])
    await store.put_items(thread, items, unsaid=[response.id])
    assert await store.entries(response.id) == []
    assert await store.entries(other.id) == [Entry([4], "lo")]
    await store.append([(response.id, 2, Entry([5], "p"))])
    assert await store.entries(response.id) == [Entry([5], "p")]
