"""Who is served when, shown on the whole scheduler: nobody starves, priorities, fair shares. In steps, never in seconds."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from engine.core import Phase
from tests.engine.crowds import REPLY, Crowd, Server, ended
from tests.engine.test_scheduler import BLOCK

AGE, NEVER = 20, 10**9
HEAD = [9, 8, 7, 6] * 3  # what hot prompts begin with

# Nobody starves

PLACE = REPLY + 2  # steps until one of those who run has ended: it may have waited a step for its prompt, or had two


def turn(batch: int, before: int = 4) -> int:
    """Steps until it is the turn of a request that has aged, behind those that came before it, and there is a place."""
    return AGE + PLACE * (1 + -(-before // batch))


@pytest.mark.parametrize("batch", [1, 4])
def test_the_longest_prefix_policy_does_not_starve_a_cold_request(batch: int) -> None:
    """E5: endless hot arrivals. Without ageing it would wait for ever."""
    for age in (AGE, NEVER):
        server = Server(batch=batch, policy="lpm", age=age)
        hot = Crowd(server, prompt=2, head=HEAD)
        server.steps(2 * REPLY, hot)
        cold = server.ask(prompt=12)
        server.step(cold)
        if age == NEVER:
            server.steps(20 * turn(batch), hot)
            assert not cold.output
        else:
            server.until(lambda asked=cold: asked.output, hot, within=turn(batch))  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("waited", [1, 2 * AGE])
def test_a_reply_that_gave_its_place_away_goes_on_at_the_next_one(policy: str, waited: int) -> None:
    """Though its owner has new requests of which more is known, some of which have waited for long."""
    server = Server(batch=2, blocks=400, policy=policy, age=AGE)
    hot = Crowd(server, prompt=2, head=4 * HEAD)
    known, old, new = server.ask(prompt=2, head=4 * HEAD), server.ask(reply=100), server.ask(reply=100)
    server.step(known)
    server.until(ended(known))
    server.step(old, new)
    server.steps(waited, hot)
    other = server.ask(reply=5, owner=b"b")
    server.step(other)
    server.until(lambda: new.phase is Phase.WAITING, hot, within=2)
    said = len(new.output)
    server.until(ended(other), hot)
    assert len(new.output) == said > 0
    server.until(lambda: len(new.output) > said, hot, within=2)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("blocks", [64, 12])
def test_background_requests_do_not_starve_beside_endless_interactive_ones(batch: int, blocks: int) -> None:
    """One starts once it has aged, and keeps its place to its end: it loses no work to those who come later."""
    for age in (AGE, NEVER):
        server = Server(batch=batch, blocks=blocks, age=age)
        interactive = Crowd(server, prompt=6)
        server.steps(2 * REPLY, interactive)
        background = server.ask(prompt=20, reply=15, priority=1)
        server.step(background)
        if age == NEVER:
            server.steps(20 * turn(batch), interactive)
            assert not server.rows[background.id]
        else:
            server.until(lambda: server.rows[background.id], interactive, within=turn(batch))  # noqa: B023
            server.until(ended(background), interactive, within=20 // (16 - batch) + 1 + 15)
            assert server.rows[background.id] == 20 + 15 - 1


def test_a_background_prompt_that_has_begun_does_not_starve_beside_interactive_prompts() -> None:
    """These fill each step, and end with it, so that there is always a place."""
    for age in (AGE, NEVER):
        server = Server(budget=17, blocks=200, context=700, age=age)
        interactive = Crowd(server, prompt=16, reply=1, waiting=2)
        background = server.ask(prompt=100, priority=1)
        server.step(background)
        server.step(server.ask(prompt=17, reply=600))
        server.steps(AGE - 2, interactive)
        assert server.rows[background.id] == 17
        if age == NEVER:
            server.steps(20 * AGE, interactive)
            assert server.rows[background.id] == 17
        else:
            server.until(ended(background), interactive, within=1 + -(-83 // 16) + REPLY)


def test_a_background_request_that_was_crowded_out_often_does_not_wait_for_an_empty_server() -> None:
    """Once it has aged, those who crowded it out give way to it."""
    server = Server(batch=4, age=AGE)
    interactive = Crowd(server, prompt=6)
    server.step(*(server.ask(reply=reply) for reply in (3, 6, 9, 12)))  # from now on they end one after the other
    server.steps(2 * REPLY, interactive)
    background = server.ask(prompt=10, reply=15, priority=1)
    background.crowded_out = 6
    server.step(background)
    server.until(lambda: server.rows[background.id], interactive, within=turn(4))
    assert len(server.scheduler.running) >= 3, "but for the one whose place it has"


def test_a_background_request_comes_to_an_end_however_often_it_is_preempted() -> None:
    """Interactive ones come in bursts that need the whole pool: what it ran in between is lost each time."""
    for age in (AGE, NEVER):
        server = Server(batch=1, blocks=24, budget=8, context=96, age=age)
        background = server.ask(prompt=60, reply=10, priority=1)
        server.step(background)
        bursts = 0
        while background.phase is not Phase.FINISHED and bursts < 40:
            server.step(server.ask(prompt=80, reply=1, owner=b"%d" % bursts))
            server.steps(10 + 5)
            bursts += 1
        assert (background.phase is Phase.FINISHED) == (age == AGE)
        assert bursts <= 2 * AGE // 10 + 2 or age == NEVER


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("priority", [0, 1])
def test_an_owner_does_not_starve_beside_endless_newcomers(policy: str, priority: int) -> None:
    """Each of another owner, so each with a turn. Of its requests, one after the other comes to its turn."""
    server = Server(batch=2, policy=policy, age=AGE)
    newcomers = Crowd(server, newcomers=True, prompt=8, priority=priority)
    server.steps(3 * REPLY, newcomers)
    three = [server.ask(prompt=8, reply=3 * REPLY, priority=priority) for _ in range(3)]
    server.step(*three)
    for at, asked in enumerate(three):
        within = turn(2) if at == 0 else 3 * REPLY + turn(2)  # the owner has aged when it has nothing running
        server.until(lambda: asked.output, newcomers, within=within)  # noqa: B023


def test_an_owner_that_has_waited_too_long_goes_before_prompts_that_have_begun() -> None:
    """These take many steps each, of owners that were served less."""
    server = Server(batch=2, budget=16, blocks=400, context=300, age=AGE)
    running, asked = server.ask(prompt=150, reply=2 * AGE), server.ask()
    newcomers = Crowd(server, newcomers=True, prompt=150, reply=1)
    server.step(running, asked)
    server.until(ended(running), newcomers)
    assert not asked.output
    server.steps(2, newcomers)
    assert asked.output


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("owner", [b"a", b"b"])
def test_large_prompts_are_not_overtaken_for_ever_by_small_ones(policy: str, owner: bytes) -> None:
    """When blocks are short, those that need few could always start, and never leave enough."""
    server = Server(batch=8, blocks=20, age=AGE, policy=policy)
    small = Crowd(server, prompt=4, head=HEAD)
    server.steps(2 * REPLY, small)
    large = server.ask(prompt=70, reply=4, owner=owner)
    server.step(large)
    server.until(lambda: large.output, small, within=turn(batch=4) + 70 // 8 + 1)
    server.until(ended(large), small, within=4)


# Priorities


def test_an_interactive_request_is_served_before_background_ones_that_wait() -> None:
    """However many they are and however long they have waited."""
    server = Server(batch=2, age=AGE)
    crowd = [server.ask(prompt=4, reply=5 * AGE, priority=1) for _ in range(40)]
    server.step(*crowd)
    server.steps(4 * AGE)
    asked = server.ask()
    server.step(asked)
    assert asked.output
    assert server.preemptions == 1


@pytest.mark.parametrize(("short", "lost"), [({"batch": 2}, 0), ({"blocks": 14}, 2)], ids=["places", "blocks"])
def test_a_background_request_gives_its_place_to_an_interactive_one_and_goes_on_later(short: dict[str, int], lost: int) -> None:
    """At once, when the batch is full or blocks are short; the newest does. It goes on where it was, but for blocks that were taken."""
    server = Server(**{"context": 60, **short})
    old, new = (server.ask(prompt=13, reply=reply, priority=1) for reply in (12, 20))
    server.step(old, new)
    server.until(lambda: len(new.output) == 8)
    begun, computed = list(new.output), new.computed
    asked = server.ask(prompt=14, reply=3)
    server.step(asked)
    assert asked.output
    assert [(old.preemptions, old.phase), (new.preemptions, new.phase)] == [(0, Phase.RUNNING), (1, Phase.WAITING)]
    server.until(lambda: new.phase is Phase.RUNNING)
    assert asked.phase is Phase.FINISHED
    (start,) = (chunk.start for chunk in server.chunks if chunk.sequence is new)
    assert computed - lost * BLOCK <= start <= computed
    server.until(ended(old, new))
    assert new.output[: len(begun)] == begun
    assert (new.preemptions, server.rows[new.id]) == (1, 13 + 20 - 1 + computed - start)


@pytest.mark.parametrize(("owner", "priority"), [(b"a", 0), (b"a", 1), (b"b", 1)])
def test_no_place_is_taken_from_interactive_requests(owner: bytes, priority: int) -> None:
    """By their owner's others, nor by background ones, whatever share their owner has."""
    server = Server(batch=4)
    server.step(*(server.ask(prompt=4, reply=30) for _ in range(4)))
    server.step(server.ask(owner=owner, priority=priority))
    server.steps(20)
    assert server.preemptions == 0


def test_a_background_request_is_not_let_in_and_crowded_out_again_and_again() -> None:
    """E4: in a pool that interactive ones fill from time to time, it waits for twice the room each time."""
    server = Server(batch=16, budget=32, blocks=40, context=160, age=NEVER)
    background = server.ask(prompt=40, reply=100, priority=1)
    server.step(background)
    for _ in range(200):
        server.step(server.ask(prompt=4, reply=24))
        server.steps(3)
    assert 0 < background.preemptions <= math.log2(40) + 1


def test_several_interactive_requests_take_a_place_each_step() -> None:
    server = Server(batch=4, budget=64)
    server.step(*(server.ask(prompt=4, reply=40, priority=1) for _ in range(4)))
    three = [server.ask(prompt=4) for _ in range(3)]
    server.step(*three)
    server.steps(2)
    assert all(asked.output for asked in three)
    assert server.preemptions == 3


def test_background_prompts_wait_for_interactive_ones_in_a_step() -> None:
    """A long background prompt that has begun takes what they leave of each step, also when it has run for longer than ageing takes."""
    server = Server(batch=4, budget=16, blocks=300, context=1200, age=AGE)
    server.step(server.ask(prompt=900, priority=1))
    server.step(server.ask(reply=200))
    server.steps(2 * AGE)
    asked = server.ask(prompt=15)
    server.step(asked)
    assert asked.output


def test_beside_interactive_requests_one_background_request_at_a_time_has_a_place() -> None:
    server = Server(batch=4, age=AGE)
    interactive, background = Crowd(server, prompt=6), Crowd(server, prompt=6, priority=1, waiting=20)
    server.steps(3 * REPLY, interactive)
    for _ in range(20 * AGE):
        server.steps(1, interactive, background)
        assert sum(asked.priority for asked in server.scheduler.running) <= 1
    done = sum(asked.priority and asked.phase is Phase.FINISHED for asked in server.asked)
    assert 20 * AGE / (AGE + turn(4)) - 1 <= done <= 20


# Fair shares

MANY = 50


@pytest.mark.parametrize(
    ("options", "prompt", "reply"),
    [
        ({}, 6, 60),  # all places are taken by long replies
        ({"budget": 32, "blocks": 800, "context": 400}, 300, 60),  # long prompts, partly run
        ({"batch": 32, "budget": 64, "blocks": 60, "context": 200}, 100, 60),  # there are places, but no blocks
        ({"batch": 2}, 6, 60),
    ],
    ids=["places", "prompts", "blocks", "two places"],
)
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("after", [0, 7, 40])
def test_a_crowd_of_one_owner_does_not_hold_up_another(options: dict[str, int], prompt: int, reply: int, policy: str, after: int) -> None:
    """One of 50 conversations, and one that comes later."""
    server = Server(policy=policy, age=NEVER, **options)
    server.step(*(server.ask(prompt, reply) for _ in range(MANY)))
    server.steps(after)
    asked = server.ask(prompt=12, reply=5, owner=b"b")
    server.step(asked)
    # A step until the crowd has been served more, one for a place, one until its prompt is first. Blocks come free when one of the crowd
    # ends, or when those that run need more: each step with a decode brings that nearer.
    within = 2 + (12 + prompt if "blocks" in options and options["blocks"] < 100 else 0)
    server.until(lambda: asked.output, within=within)
    assert server.scheduler.waiting


def backlogged(server: Server, steps: int, *crowds: Crowd) -> Counter[bytes]:
    """Tokens served to each owner meanwhile."""
    before = server.served.copy()
    server.steps(steps, *crowds)
    return server.served - before


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("blocks", [400, 40])
@pytest.mark.parametrize("kinds", [((6, 30), (6, 30)), ((80, 4), (4, 40)), ((80, 4), (80, 4)), ((4, 60), (30, 10))], ids=str)
def test_owners_who_always_wait_are_served_alike(batch: int, blocks: int, kinds: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Whatever each asks for; and giving way for its sake is rare: at most once for each that starts."""
    server = Server(batch=batch, blocks=blocks, context=140)
    crowds = [Crowd(server, owner=owner, prompt=prompt, reply=reply) for owner, (prompt, reply) in zip((b"a", b"b"), kinds, strict=True)]
    server.steps(100, crowds[0])
    most = max(prompt + reply for prompt, reply in kinds)
    for steps in (50, 1000):
        served = backlogged(server, steps, *crowds)
        assert abs(served[b"a"] - served[b"b"]) <= most + 16, "what one request takes, and a step"
    gave_way = server.preemptions - sum(asked.crowded_out for asked in server.asked)
    assert gave_way <= sum(asked.phase is Phase.FINISHED for asked in server.asked)


def test_owners_do_not_take_each_others_places_in_turns() -> None:
    """Where places do not go into shares: each has more than its share, because a third leaves its own to them."""
    server = Server(batch=8, blocks=200, context=800)
    crowds = [Crowd(server, owner=owner, prompt=6, reply=40) for owner in (b"a", b"b")]
    server.step(server.ask(prompt=4, reply=700, owner=b"light"))
    server.steps(600, *crowds)
    assert server.preemptions <= sum(asked.phase is Phase.FINISHED for asked in server.asked)


def test_a_place_beyond_its_share_is_left_to_an_owner_that_was_served_less() -> None:
    server = Server(batch=4, budget=400, blocks=200, context=500)
    server.step(*(server.ask(prompt=4, reply=90) for _ in range(3)), server.ask(prompt=300, reply=90, owner=b"b"))
    server.step(server.ask(owner=b"b"))
    server.steps(80)
    assert server.preemptions == 0


def test_the_newest_of_a_crowd_gives_way() -> None:
    """To each owner in turn, also when there are more owners than places."""
    server = Server(batch=3, age=NEVER)
    crowd = [server.ask(reply=100) for _ in range(3)]
    server.step(*crowd)
    others = [server.ask(reply=100, owner=owner) for owner in (b"b", b"c", b"d", b"e")]
    server.step(*others)
    server.steps(5)
    assert [asked.preemptions for asked in crowd] == [0, 1, 1]
    assert [bool(asked.output) for asked in others] == [True, True, False, False]


def test_an_owner_has_no_credit_for_the_time_it_was_away() -> None:
    """Nor one that asked for little, nor one that comes while another waits for its first turn in the background."""
    server = Server(batch=4, age=NEVER)
    old = Crowd(server, prompt=6, reply=20)
    server.step(server.ask(prompt=6, reply=500, owner=b"light"), server.ask(owner=b"patient", priority=1))
    server.steps(400, old)
    assert server.served[b"a"] > 900
    crowds = [old, *(Crowd(server, owner=owner, prompt=6, reply=20) for owner in (b"light", b"patient", b"new"))]
    served = backlogged(server, 600, *crowds)
    assert max(served.values()) - min(served.values()) <= 26 + 16
    assert set(served) == {b"a", b"light", b"patient", b"new"}


def test_an_owner_that_comes_and_goes_has_one_place_given_to_it_each_time() -> None:
    """No thrash: the crowd loses at most one place for each of its requests."""
    server = Server(batch=4, blocks=200)
    crowd = Crowd(server, prompt=6, reply=40)
    server.steps(20, crowd)
    for times in range(1, 40):
        asked = server.ask(owner=b"b", reply=3)
        server.step(asked)
        server.until(ended(asked), crowd, within=3 + 3)
        server.steps(times % 5, crowd)
        assert server.preemptions <= times


@pytest.mark.parametrize("owners", [2, 3, 5])
def test_every_owner_has_its_share_of_the_batch(owners: int) -> None:
    """They come one after the other, each with more than all places hold."""
    server = Server(batch=6, budget=64, age=NEVER)
    for owner in range(owners):
        server.step(*(server.ask(prompt=4, reply=150, owner=b"%d" % owner) for _ in range(8)))
    server.steps(30)
    places = Counter(asked.salt for asked in server.scheduler.running)
    assert all(places[b"%d" % owner] >= 6 // owners for owner in range(owners))
