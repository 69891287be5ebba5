"""What a pool plans to move to its tier and back."""

from __future__ import annotations

import pytest

from engine.core import CacheNode, Load, Save
from engine.cost import StepCost
from engine.scheduler import Limits, Scheduler
from tests.engine.fakes import sequence
from tests.engine.test_blocks import LONG, chain, end, known, pool_of, push_out, ran


def test_what_is_given_up_goes_to_the_tier_and_comes_back() -> None:
    pool = pool_of(3, slots=4)
    end(pool, ran(pool, LONG))
    nodes = chain(pool, LONG)
    blocks = [node.block for node in nodes]
    push_out(pool)
    assert pool.take_moves() == [Save(blocks[at], nodes[at].slot, nodes[at]) for at in (2, 1, 0)]
    assert known(pool, LONG) == 6
    assert all(node.block < 0 for node in nodes)
    table = [pool.load(node, pool.allocate(), whole=True) for node in nodes]
    assert pool.take_moves() == [Load(node.slot, node.block, node) for node in nodes]
    assert [node.block for node in nodes] == table
    pool.check([table])
    pool.release(table)
    push_out(pool)
    assert pool.take_moves() == [], "the tier has them still"
    pool.check([])


def test_two_who_want_the_same_from_the_tier_get_it_once() -> None:
    pool = pool_of(4, slots=4)
    end(pool, ran(pool, [1, 2]))
    (node,) = chain(pool, [1, 2])
    push_out(pool)
    pool.take_moves()
    one, two = pool.load(node, pool.allocate(), whole=True), pool.load(node, pool.allocate(), whole=True)
    assert one == two == node.block
    assert len(pool.take_moves()) == 1
    assert pool.owned == 1
    pool.check([[one], [two]])


def test_a_part_of_a_block_comes_without_it() -> None:
    """The rest of the block will be the one's who asked for it."""
    pool = pool_of(4, slots=4)
    end(pool, ran(pool, [1, 2]))
    (node,) = chain(pool, [1, 2])
    push_out(pool)
    pool.take_moves()
    block = pool.load(node, pool.allocate(), whole=False)
    assert pool.take_moves() == [Load(node.slot, block, node)]
    assert node.block < 0
    pool.release([block])
    assert len(pool._free) == 4
    pool.check([])


def test_a_full_tier_forgets_what_was_not_used_for_longest() -> None:
    pool = pool_of(3, slots=2)
    end(pool, ran(pool, LONG))
    push_out(pool)
    saves = pool.take_moves()
    assert len(saves) == 3, "in the end only the first two blocks are there"
    assert known(pool, LONG) == 4
    pool.check([])
    end(pool, ran(pool, [7, 8, 9, 9]))
    push_out(pool)
    assert known(pool, LONG) == 0
    assert known(pool, [7, 8, 9, 9]) == 4
    pool.check([])


def test_a_head_that_was_kept_early_is_still_given_up_after_its_tail() -> None:
    """Or all that follows it would go with it."""
    pool = pool_of(3, slots=2)
    end(pool, ran(pool, [1, 2]))
    pool.write_behind(1)
    end(pool, ran(pool, [1, 2, 3, 4]))
    push_out(pool)
    assert known(pool, [1, 2, 3, 4]) == 4
    end(pool, ran(pool, [7, 8]))
    push_out(pool)
    assert known(pool, [1, 2, 3, 4]) == 2
    assert known(pool, [7, 8]) == 2
    pool.check([])


def test_what_the_pool_holds_loses_only_its_slot() -> None:
    """And is kept again when it is given up."""
    pool = pool_of(4, slots=1)
    end(pool, ran(pool, [1, 2]))
    push_out(pool)
    (node,) = chain(pool, [1, 2])
    table = [pool.load(node, pool.allocate(), whole=True)]
    other = ran(pool, [3, 4])
    end(pool, other)
    pool.check([table])
    filled = [pool.allocate() for _ in range(pool.available)]
    assert chain(pool, [3, 4])[0].slot == 0
    assert (node.slot, node.block) == (-1, table[0])
    pool.release(filled + table)
    pool.check([])
    pool.take_moves()
    push_out(pool)
    assert [move.node for move in pool.take_moves() if isinstance(move, Save)] == [node]


def test_what_was_used_last_keeps_its_slot() -> None:
    """Used in the pool, or out of the tier; and what loses its slot while it is idle is kept again when it is given up."""
    for out in (False, True):
        pool = pool_of(4, slots=2)
        end(pool, ran(pool, [1, 2]), ran(pool, [3, 4]))
        pool.write_behind(2)
        (old,), (young,) = chain(pool, [1, 2]), chain(pool, [3, 4])
        if out:
            push_out(pool)
            pool.release([pool.load(old, pool.allocate(), whole=False)])
        else:
            pool.release(pool.share([old]))
        other = ran(pool, [5, 6])
        pool.release(other.table)
        filled = [pool.allocate() for _ in range(pool.available)]
        assert (old.slot >= 0, young.slot >= 0, other.chain[0].slot >= 0) == (True, False, True)
        assert known(pool, [3, 4]) == 0
        del filled
    pool = pool_of(3, slots=1)
    end(pool, ran(pool, [1, 2]), ran(pool, [3, 4]))
    (old,), (young,) = chain(pool, [1, 2]), chain(pool, [3, 4])
    pool.write_behind(1)
    pool.release(pool.share([old]))
    pool.allocate(), pool.allocate()
    pool.take_moves()
    assert (old.slot, young.slot) == (-1, 0)
    assert known(pool, [1, 2]) == 2
    pool.allocate()
    assert [move.node for move in pool.take_moves() if isinstance(move, Save)] == [old]


def test_when_nothing_runs_the_tier_gets_what_is_given_up_first() -> None:
    pool = pool_of(6, slots=8)
    owned = ran(pool, [9, 9])
    end_order = ran(pool, LONG)
    nodes = [*end_order.chain]
    pool.release(end_order.table)
    pool.write_behind(2)
    assert [move.node for move in pool.take_moves() if isinstance(move, Save)] == [nodes[2], nodes[1]]
    pool.write_behind(9)
    assert [move.node for move in pool.take_moves() if isinstance(move, Save)] == [nodes[0]], "what runs stays where it is"
    pool.write_behind(9)
    assert not pool.take_moves()
    assert all(node.block >= 0 for node in nodes)
    pool.check([owned.table])


def test_writing_behind_comes_to_an_end_in_a_tier_that_is_too_small() -> None:
    pool = pool_of(6, slots=2)
    end(pool, ran(pool, [1, 2, 3, 4]))
    push_out(pool)
    pool.take_moves()
    end(pool, ran(pool, [5, 6, 7, 8, 9, 9]))
    saved: list[CacheNode] = []
    while moves := (pool.write_behind(1), pool.take_moves())[1]:
        saved += [move.node for move in moves if isinstance(move, Save)]
        pool.check([])
    assert [node.tokens for node in saved] == [(9, 9), (7, 8)], "as much as there is room for"


def test_a_save_that_failed_is_made_again_while_the_block_is_there() -> None:
    pool = pool_of(2, slots=2)
    end(pool, ran(pool, [1, 2]))
    for _ in range(2):
        pool.write_behind(9)
        (save,) = pool.take_moves()
        assert isinstance(save, Save)
        pool.unsaved(save)
        pool.check([])
        assert save.node.slot < 0
    assert known(pool, [1, 2]) == 2


def test_what_could_not_be_saved_and_is_nowhere_else_is_forgotten_with_what_follows_it() -> None:
    pool = pool_of(3, slots=4)
    end(pool, ran(pool, LONG))
    push_out(pool)
    saves = pool.take_moves()
    assert isinstance(saves[1], Save)
    assert saves[1].node.tokens == (3, 4)
    pool.unsaved(saves[1])
    assert known(pool, LONG) == 2
    assert pool.tier
    assert len(pool.tier._free) == 3, "their slots are free"
    pool.check([])


def test_a_save_that_failed_says_nothing_of_a_later_one() -> None:
    """The slot went to another, and the block to another slot, before it was known."""
    pool = pool_of(3, slots=2)
    end(pool, ran(pool, [1, 2]))
    pool.write_behind(1)
    (save,) = pool.take_moves()
    assert isinstance(save, Save)
    assert pool.tier
    pool.tier.release(save.node)
    (other,) = ran(pool, [3, 4]).chain
    pool.tier.take(other)
    pool.tier.take(save.node)
    assert save.node.slot != save.slot
    pool.unsaved(save)
    assert (other.slot, save.node.slot) == (save.slot, 1 - save.slot)


def test_what_is_forgotten_leaves_its_slot_and_its_idle_block_but_not_an_owned_one() -> None:
    pool = pool_of(4, slots=4)
    first = ran(pool, LONG)
    nodes = [*first.chain]
    second = ran(pool, LONG[:4], found=nodes[:2])
    end_of = first.table[2]
    pool.release(first.table)
    pool.write_behind(9)
    pool.take_moves()
    pool.forget(nodes[1])
    pool.check([second.table])
    assert end_of in pool._free
    assert second.table[1] not in pool._free
    assert nodes[2].slot < 0
    pool.release(second.table)
    assert second.table[1] in pool._free
    pool.check([])


def test_an_idle_moment_keeps_what_only_the_pool_holds_also_in_a_small_tier() -> None:
    """In place of what was given up longest ago, whatever the pool holds besides."""
    pool = pool_of(4, slots=5)
    for first in (10, 20, 30, 40):
        end(pool, ran(pool, [first, first + 1, first + 2, first + 3]))
        pool.write_behind(8)
        pool.take_moves()
        assert not pool._unsaved
        pool.check([])
    assert known(pool, [40, 41, 42, 43]) == 4


def test_what_some_have_left_and_others_still_use_is_kept_first() -> None:
    """What follows it would be of no use without it after a restart. Nobody has left what only one ever used, and uses still."""
    pool = pool_of(8, slots=8)
    stays = ran(pool, [1, 2, 3, 4])
    pool.write_behind(9)
    assert not pool.behind
    leaves = ran(pool, LONG)
    left, shared = [*leaves.chain], [*stays.chain]
    assert left[:2] == shared
    end(pool, leaves)
    assert pool.behind
    pool.check([stays.table])
    pool.write_behind(9)
    saved = [move.node for move in pool.take_moves() if isinstance(move, Save)]
    assert saved[: len(shared)] == list(reversed(shared))
    assert set(saved) == set(left)
    pool.release(stays.table)
    pool.check([])
    assert not pool.behind


def test_what_is_idle_and_then_used_again_before_it_was_kept_is_kept_too() -> None:
    pool = pool_of(6, slots=6)
    end(pool, ran(pool, LONG))
    nodes = chain(pool, LONG)
    table = pool.share(nodes[:2])
    pool.check([table])
    pool.write_behind(9)
    moves = pool.take_moves()
    assert {move.node for move in moves if isinstance(move, Save)} == set(nodes)
    pool.unsaved(moves[0])  # type: ignore[arg-type]
    pool.check([table])
    assert pool.behind, "and tried again if it could not be"
    pool.release(table)
    pool.check([])
    pool.write_behind(9)
    assert len(pool.take_moves()) == 1


def test_of_many_given_up_at_once_only_the_last_used_are_saved_where_not_all_may_be() -> None:
    """So that what is saved follows nothing that is forgotten."""
    pool = pool_of(6, slots=6)
    end(pool, ran(pool, LONG))
    old = chain(pool, LONG)
    end(pool, ran(pool, [7, 7, 8, 8, 9, 9]))
    new = chain(pool, [7, 7, 8, 8, 9, 9])
    table = pool.allocate_all(5, saves=3)
    assert [move.node for move in pool.take_moves() if isinstance(move, Save)] == [old[0], new[2], new[1]]
    assert [node.slot >= 0 for node in (*old, *new)] == [True, False, False, False, True, True]
    assert new[0].block >= 0
    pool.check([table])


def test_no_more_is_saved_for_all_that_is_given_up_than_the_step_may() -> None:
    pool = pool_of(6, slots=6)
    end(pool, ran(pool, LONG), ran(pool, [7, 7, 8, 8, 9, 9]))
    pool.most_saves = 2
    table = [pool.allocate(), pool.allocate(), pool.allocate()]
    assert pool.saves == 2
    table += pool.allocate_all(2)
    assert (pool.saves, len(pool.take_moves()), pool.saves) == (2, 2, 0)
    pool.check([table])
    table.append(pool.allocate())
    assert pool.saves == 1, "the next step may again"
    pool.check([table])


@pytest.mark.parametrize(("load", "brought", "run"), [(1.0, 2, 2), (2.0, 2, 2), (3.0, 1, 5), (4.0, 1, 5)])
def test_the_part_of_a_block_comes_back_where_that_takes_less_than_computing_it(load: float, brought: int, run: int) -> None:
    """Three tokens of it, at a millisecond a row."""
    pool = pool_of(6, slots=6, size=4)
    cost = StepCost(((1, 1.0), (64, 64.0)), pair=0.0, read=0.0, load=load)
    scheduler = Scheduler(pool, Limits(4, 64, 64, frozenset()), cost)
    end(pool, ran(pool, [*range(7)]))
    push_out(pool)
    pool.take_moves()
    plan = scheduler.plan([sequence(1, [*range(7), 8, 9])])
    assert sum(isinstance(move, Load) for move in plan.moves) == brought
    assert [len(chunk.tokens) for chunk in plan.chunks] == [run]
