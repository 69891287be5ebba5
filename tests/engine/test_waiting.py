from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.core import Phase, Sequence
from engine.waiting import LOOKED_AT, Waiting
from tests.engine.fakes import sequence

AGE = 10


def one(id: int, owner: bytes = b"a", priority: int = 0) -> Sequence:
    asked = sequence(id, [1], salt=owner)
    asked.priority = priority
    return asked


def queue(*sequences: Sequence, policy: str = "fcfs", known: dict[int, int] | None = None) -> Waiting:
    """They all came in step 0."""
    waiting = Waiting(policy, lambda asked: (known or {}).get(asked.id, 0), AGE)
    for asked in sequences:
        waiting.arrive(asked, 0)
    return waiting


def start(waiting: Waiting, asked: Sequence) -> None:
    waiting.start(asked)
    asked.phase = Phase.RUNNING


def end(waiting: Waiting, asked: Sequence) -> None:
    asked.phase = Phase.FINISHED
    waiting.stop(asked)


def preempt(waiting: Waiting, asked: Sequence) -> None:
    asked.phase, asked.preemptions = Phase.WAITING, asked.preemptions + 1
    waiting.add(asked)
    waiting.stop(asked)


def order(waiting: Waiting, step: int = 1, rows: int = 1) -> list[int]:
    """In which they start if each ends right away, having run some tokens."""
    ids = []
    while asked := waiting.next(step):
        ids.append(asked.id)
        start(waiting, asked)
        waiting.serve(asked, rows, step)
        end(waiting, asked)
    return ids


def past(waiting: Waiting, steps: Iterable[int], busy: bool = False) -> list[bool]:
    """Let steps go by; whether a background request was promoted in each."""
    return [waiting.due(busy) and waiting.promote([], step) for step in steps]


def test_nobody_waits() -> None:
    waiting = queue()
    assert waiting.next(1) is None
    assert not waiting
    assert (list(waiting), waiting.owners) == ([], 0)


def test_an_owners_requests_go_in_order_of_arrival_also_one_that_comes_back() -> None:
    first, second, third = (one(id) for id in range(3))
    waiting = queue(first, second, third)
    start(waiting, first)
    start(waiting, second)
    preempt(waiting, second)
    assert list(waiting) == [second, third]
    preempt(waiting, first)
    assert order(waiting) == [0, 1, 2]


def test_interactive_ones_go_first_whatever_their_owner_was_served() -> None:
    late, busy = one(5, b"b"), one(9, b"c")
    waiting = queue(one(0, priority=1), one(1, b"b", 1), late, one(7), busy)
    start(waiting, busy)
    waiting.serve(busy, 1000, 1)
    waiting.arrive(one(8, b"c"), 1)
    assert order(waiting)[:3] == [5, 7, 8]


def test_the_owner_that_was_served_least_is_next() -> None:
    waiting = queue(*(one(id) for id in range(5)), *(one(id, b"b") for id in range(5, 8)))
    assert order(waiting) == [0, 5, 1, 6, 2, 7, 3, 4]


def test_each_token_counts() -> None:
    """Three of b's for one of a's, which takes three times as long."""
    waiting = queue(*(one(id) for id in range(3)), *(one(id, b"b") for id in range(3, 12)))
    ids = []
    while asked := waiting.next(1):
        ids.append(asked.id)
        waiting.remove(asked)
        if asked.salt in {other.salt for other in waiting}:
            waiting.serve(asked, 3 if asked.salt == b"a" else 1, 1)
    assert ids == [0, 3, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11]


def test_whoever_comes_joins_level_with_the_least_served_of_those_who_wait() -> None:
    """So that neither a newcomer nor one that ran little lately has more than its turn; nor less."""
    old, light = one(0), one(1, b"light")
    waiting = queue(old, light, one(2), one(3))
    for asked in (old, light):
        start(waiting, asked)
    waiting.serve(old, 500, 1)
    waiting.serve(light, 3, 1)
    waiting.arrive(one(4, b"new"), 1)
    waiting.arrive(one(5, b"new"), 1)
    waiting.arrive(one(6, b"light"), 1)
    waiting.arrive(one(7, b"light"), 1)
    assert order(waiting) == [2, 4, 6, 3, 5, 7]


def test_it_has_no_claim_beyond_what_it_had_and_no_more_than_others() -> None:
    """Neither less than it was served, nor less than the least served of those who wait."""
    heavy, running, least, more = one(0, b"heavy"), one(1, b"more"), one(2), one(3, b"more")
    waiting = queue(heavy, running, least, more)
    for asked, tokens in ((heavy, 500), (running, 20)):
        start(waiting, asked)
        waiting.serve(asked, tokens, 1)
    new, again = one(4, b"new"), one(5, b"heavy")
    waiting.arrive(new, 1)
    waiting.arrive(again, 1)
    assert [waiting.served(asked) for asked in (least, new, more, again)] == [0, 0, 20, 500]


def test_where_nobody_waits_nobody_has_a_claim() -> None:
    """On account of the time before: whoever wanted to be served was."""
    heavy, light = one(0, b"heavy"), one(1, b"light")
    waiting = queue(heavy, light)
    for asked, tokens in ((heavy, 500), (light, 3)):
        start(waiting, asked)
        waiting.serve(asked, tokens, 1)
    owners = (b"light", b"heavy", b"new")  # the newest first
    for id in range(2, 11):
        waiting.arrive(one(id, owners[id % 3]), 1)
    assert order(waiting) == list(range(2, 11))


def test_who_is_present_but_has_nothing_waiting_saves_up_no_turns() -> None:
    """Also not through one that waits behind those of a higher priority."""
    old = one(0)
    waiting = queue(old, one(1, b"patient", 1))
    start(waiting, old)
    waiting.serve(old, 500, 1)
    for asked in (one(2), one(3), one(4, b"patient"), one(5, b"patient"), one(6, b"new"), one(7, b"new")):
        waiting.arrive(asked, 1)
    assert order(waiting) == [2, 4, 6, 3, 5, 7, 1]


def test_being_preempted_is_no_coming() -> None:
    """Whoever loses a place keeps the claim that it has by what it was served."""
    heavy, light = one(0), one(1, b"light")
    waiting = queue(heavy, light, one(2))
    for asked in (heavy, light):
        start(waiting, asked)
    waiting.serve(heavy, 500, 1)
    preempt(waiting, light)
    assert waiting.served(light) == 0


def test_background_tokens_do_not_count_against_interactive_requests() -> None:
    crowd, other = one(0, b"a", 1), one(1, b"b", 1)
    waiting = queue(crowd, other, one(2), one(3, b"b"))
    start(waiting, crowd)
    waiting.serve(crowd, 1000, 1)
    assert order(waiting) == [2, 3, 1]


def test_an_owner_is_known_as_long_as_it_waits_or_runs() -> None:
    asked, running = one(0), one(1, b"b")
    waiting = queue(asked, running)
    start(waiting, running)
    assert (waiting.owners, waiting.running(running), waiting.running(asked)) == (2, 1, 0)
    assert asked in waiting
    assert running not in waiting
    waiting.remove(asked)
    assert waiting.owners == 1
    end(waiting, running)
    assert waiting.owners == 0


# Ageing


@pytest.mark.parametrize("priority", [0, 1])
def test_an_owner_with_nothing_running_is_next_after_a_time(priority: int) -> None:
    """Whatever it was served; of two, the one that has waited for longer. Among requests of one priority, that is."""
    served, patient = one(0, b"served", priority), one(5, b"patient", priority)
    waiting = queue(served, one(3, priority=priority), one(4, priority=priority))
    start(waiting, served)
    waiting.serve(served, 1000, 1)
    preempt(waiting, served)
    waiting.arrive(patient, 2)
    assert [asked.id for asked in (waiting.next(step) for step in (1, 10, 11)) if asked] == [3, 3, 3]  # all wait, and 3 came first
    start(waiting, next(asked for asked in waiting if asked.id == 3))
    assert [asked.id for asked in (waiting.next(step) for step in (10, 11, 12)) if asked] == [4, 0, 0]
    start(waiting, served)
    assert [asked.id for asked in (waiting.next(step) for step in (11, 12)) if asked] == [4, 5]
    waiting.arrive(one(6), 12)
    assert [asked.id for asked in [waiting.next(12)] if asked] == [6 if priority else 5]


def test_the_longest_known_prefix_is_next_but_for_who_has_waited_long() -> None:
    waiting = queue(*(one(id) for id in range(4)), policy="lpm", known={2: 30, 3: 20, 4: 90})
    waiting.arrive(one(4), 5)
    assert [asked.id for asked in (waiting.next(step) for step in (1, AGE - 1, AGE)) if asked] == [4, 4, 0]
    assert order(waiting, AGE) == [0, 1, 2, 3, 4]


def test_of_equally_known_prefixes_the_first_to_come_is_next() -> None:
    assert order(queue(*(one(id) for id in range(4)), policy="lpm", known={1: 8, 3: 8})) == [1, 3, 0, 2]


def test_one_that_ran_lately_does_not_hide_those_behind_it_who_have_waited_long() -> None:
    """It waits again because its KV could not be moved, which is no preemption."""
    older, cold, hot = one(0), one(1), one(2)
    waiting = queue(older, cold, hot, policy="lpm", known={2: 50})
    start(waiting, older)
    waiting.serve(older, 5, AGE - 1)
    preempt(waiting, older)
    older.preemptions = 0
    asked = waiting.next(AGE)
    assert asked is cold


@pytest.mark.parametrize("step", [1, AGE - 1, AGE, 3 * AGE])
def test_who_was_preempted_goes_before_its_owners_new_requests_whatever_is_known_of_these(step: int) -> None:
    """And however long they have waited: somebody may be reading it. Wherever it stands among them; of several, the first to come."""
    begun, later, new = one(LOOKED_AT + 7), one(LOOKED_AT + 9), [one(id) for id in range(LOOKED_AT + 5)]
    waiting = queue(*new, begun, later, policy="lpm", known={asked.id: 50 for asked in [*new, later]})
    for asked in (later, begun):
        start(waiting, asked)
        waiting.serve(asked, 5, step)
        preempt(waiting, asked)
    assert order(waiting, step)[:3] == [begun.id, later.id, 0]


def test_who_was_preempted_has_no_claim_on_other_owners_turns() -> None:
    begun = one(0)
    waiting = queue(begun, one(1), one(2, b"b"), one(3, b"b"), policy="lpm", known={1: 50, 3: 50})
    start(waiting, begun)
    waiting.serve(begun, 5, 1)
    preempt(waiting, begun)
    assert order(waiting, rows=4) == [3, 2, 0, 1]


def test_the_longest_prefix_is_looked_for_among_the_first_ones_of_the_next_owner_only() -> None:
    """Or the search would take longer than a step."""
    asked: list[int] = []

    def known(sequence: Sequence) -> int:
        asked.append(sequence.id)
        return sequence.id

    held: list[int] = []
    waiting = Waiting("lpm", known, AGE, lambda sequence: bool(held.append(sequence.id)))
    for id in range(500):
        waiting.arrive(one(id, b"ab"[id % 2 : id % 2 + 1]), 0)
    found = waiting.next(1)
    assert found
    assert found.id == 2 * (LOOKED_AT - 1)
    assert len(asked) == LOOKED_AT
    assert len(held) <= LOOKED_AT + 2, "nor is it asked of all whether they are held back"


# Promotion


def test_background_requests_are_promoted_one_at_a_time_beside_interactive_ones() -> None:
    waiting = queue(*(one(id, priority=1) for id in range(3)), one(3), one(4))
    assert past(waiting, range(1, AGE + 1)) == [False] * (AGE - 1) + [True]
    first = waiting.next(AGE)
    assert first
    assert (first.id, waiting.priority(first), first.priority) == (0, 0, 1)
    assert not any(past(waiting, range(AGE + 1, 5 * AGE))), "one at a time"
    start(waiting, first)
    assert not any(past(waiting, range(5 * AGE, 9 * AGE))), "until it has ended"
    preempt(waiting, first)
    assert (waiting.priority(first), waiting.next(9 * AGE)) == (0, first)
    start(waiting, first)
    end(waiting, first)
    assert past(waiting, [9 * AGE]) == [True]
    assert [asked.id for asked in waiting if not waiting.priority(asked)] == [1, 3, 4]


def test_two_promotions_are_some_steps_apart() -> None:
    waiting = queue(*(one(id, priority=1) for id in range(5)), one(5))
    promoted = []
    for step in range(1, 4 * AGE + 1):
        if any(past(waiting, [step])):
            promoted.append(step)
            asked = waiting.next(step)
            assert asked
            start(waiting, asked)
            end(waiting, asked)
    assert promoted == [AGE, 2 * AGE, 3 * AGE, 4 * AGE]


@pytest.mark.parametrize("owner", [b"a", b"b"])
def test_nothing_is_promoted_where_there_is_nothing_interactive(owner: bytes) -> None:
    """However long they have waited; and whoever comes then has them all behind it."""
    waiting = queue(*(one(id, priority=1) for id in range(3)))
    assert not any(past(waiting, range(1, 10 * AGE)))
    waiting.arrive(one(3, owner), 10 * AGE)
    assert past(waiting, [10 * AGE]) == [False]
    assert order(waiting, 10 * AGE)[0] == 3


def test_a_prompt_that_has_begun_is_promoted_if_it_gets_nothing() -> None:
    begun, fed, other = one(0, priority=1), one(1, priority=1), one(2)
    waiting = queue(begun, fed, other)
    for asked in (begun, fed):
        start(waiting, asked)
    for step in range(1, AGE + 1):
        waiting.serve(fed, 1, step)
        assert (waiting.due(busy=True) and waiting.promote([fed, begun], step)) == (step == AGE)
    assert (waiting.priority(begun), waiting.priority(fed)) == (0, 1)
    assert waiting.rank(begun, AGE) < waiting.rank(other, AGE)


def test_what_a_preempted_background_request_gets_does_not_put_its_promotion_off() -> None:
    """It may be taken away again each time."""
    background = one(0, priority=1)
    waiting = queue(background, one(1))
    for step in range(1, AGE):
        start(waiting, background)
        waiting.serve(background, 1, step)
        preempt(waiting, background)
        waiting.due(busy=True)
    assert past(waiting, range(AGE, AGE + 2), busy=True) == [False, True]  # its first tokens were run in step 1


def test_a_promoted_request_counts_as_interactive_for_its_owner_too() -> None:
    """It joins as one that comes, and what it takes is taken from its owner's turns."""
    old, background = one(0), one(1, b"b", 1)
    waiting = queue(old, background, one(2))
    start(waiting, old)
    waiting.serve(old, 100, 1)
    assert past(waiting, range(1, AGE + 1))[-1]
    assert waiting.served(background) == 100
    start(waiting, background)
    waiting.serve(background, 7, AGE)
    waiting.arrive(one(3, b"b"), AGE)
    assert waiting.served(background) == 107


@pytest.mark.parametrize("rows", [1, 5])
def test_promotions_are_shared_among_owners(rows: int) -> None:
    waiting = queue(*(one(id, priority=1) for id in range(4)), one(4, b"b", 1), one(5, b"b", 1), one(6), one(7))
    ids = []
    for step in range(1, 4 * AGE + 1):
        if any(past(waiting, [step])):
            asked = next(asked for asked in waiting if asked.priority and not waiting.priority(asked))
            ids.append(asked.id)
            start(waiting, asked)
            waiting.serve(asked, rows, step)
            end(waiting, asked)
    assert sorted(ids) == [0, 1, 4, 5]
