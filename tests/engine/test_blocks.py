"""Who owns which block; `test_moves.py` has what goes to a tier and comes back."""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.core import CacheNode, Copy, Sequence
from engine.prefix_cache import PrefixCache
from engine.tier import Tier
from tests.engine.fakes import sequence

SIZE = 2
LONG = [1, 2, 3, 4, 5, 6]


def pool_of(blocks: int, slots: int = 0, shared: list[int] | None = None, size: int = SIZE) -> BlockPool:
    return BlockPool(blocks, size, PrefixCache(size, [shared] if shared else []), Tier(slots) if slots else None)


def ran(pool: BlockPool, tokens: list[int], salt: bytes = b"a", found: list[CacheNode] | None = None) -> Sequence:
    """A running sequence whose tokens were all computed, but for what it shares."""
    made = sequence(0, tokens, salt=salt)
    made.shared = pool.cache.shared_blocks(tokens)
    made.chain = found or []
    made.table = pool.share(made.chain)
    made.table += [pool.allocate() for _ in range(pool.blocks_for(len(tokens)) - len(made.table))]
    made.computed = len(tokens)
    pool.remember(made)
    return made


def end(pool: BlockPool, *sequences: Sequence) -> None:
    for each in sequences:
        pool.keep_tail(each)
        pool.release(each.table)
        each.table, each.chain = [], []


def known(pool: BlockPool, tokens: list[int], salt: bytes = b"a") -> int:
    return pool.cache.match(salt, tokens, pool.cache.shared_blocks(tokens)).tokens(SIZE)


def chain(pool: BlockPool, tokens: list[int]) -> list[CacheNode]:
    return pool.cache.match(b"a", tokens).chain


def push_out(pool: BlockPool) -> None:
    """Everything that is idle leaves the pool."""
    pool.release([pool.allocate() for _ in range(pool.available)])


def test_every_block_is_free_idle_or_owned() -> None:
    pool = pool_of(5)
    first = ran(pool, LONG)
    pool.check([first.table])
    assert (pool.owned, pool.available) == (3, 2)
    second = ran(pool, [*LONG[:4], 9], found=chain(pool, LONG)[:2])
    assert second.table[:2] == first.table[:2]
    assert (pool.owned, pool.available) == (4, 1)
    end(pool, first)
    pool.check([second.table])
    assert (pool.owned, pool.available) == (3, 2)
    end(pool, second)
    pool.check([])
    assert (pool.owned, pool.available) == (0, 5)


def test_what_was_freed_last_is_handed_out_first() -> None:
    pool = pool_of(5)
    used = [pool.allocate() for _ in range(2)]
    pool.release(used)
    upcoming = pool.upcoming(9)
    assert set(upcoming[:2]) == set(used)
    assert [pool.allocate() for _ in range(5)] == upcoming
    assert pool.upcoming(9) == []


def test_the_tail_is_given_up_before_the_head() -> None:
    pool = pool_of(3)
    end(pool, ran(pool, LONG))
    for left in (4, 2, 0):
        pool.allocate()
        assert known(pool, LONG) == left


def test_a_prefix_outlives_all_that_builds_on_it() -> None:
    """Whoever used it last, and in whatever order its users end."""
    pool = pool_of(6)
    one = ran(pool, [1, 2, 3, 4])
    two = ran(pool, [1, 2, 5, 6], found=one.chain[:1])
    end(pool, two, one)
    end(pool, ran(pool, [1, 2, 7, 8], found=chain(pool, [1, 2])))
    for gone in ([5, 6], [3, 4], [7, 8]):
        while pool._free:
            pool.allocate()
        pool.allocate()
        assert known(pool, [1, 2, *gone]) == 2
    pool.allocate()
    assert known(pool, [1, 2]) == 0


def test_what_was_used_last_is_given_up_last() -> None:
    pool = pool_of(4)
    end(pool, ran(pool, [1, 2, 3, 4]), ran(pool, [5, 6, 7, 8]))
    pool.release(pool.share(chain(pool, [1, 2, 3, 4])))
    pool.allocate(), pool.allocate()
    assert known(pool, [5, 6, 7, 8]) == 0
    assert known(pool, [1, 2, 3, 4]) == 4


def test_the_same_content_is_held_once() -> None:
    """Two that computed it at the same time: one's block goes back."""
    pool = pool_of(8)
    first, second = ran(pool, LONG), ran(pool, LONG)
    assert second.table == first.table
    assert pool.owned == 3
    other = ran(pool, LONG, b"b")
    assert not {*other.table} & {*first.table}, "another owner's is another block"
    end(pool, first, second, other)


def test_a_partly_filled_last_block_is_kept() -> None:
    pool = pool_of(8)
    end(pool, ran(pool, LONG[:5]))
    found = pool.cache.match(b"a", LONG)
    assert (len(found.chain), found.part_tokens) == (2, 1)
    assert found.part
    assert found.part.block not in pool._free


def test_a_last_block_gives_way_to_one_that_has_its_tokens_too() -> None:
    """And is not kept beside one."""
    pool = pool_of(8, size=4)
    for tokens in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2]):
        end(pool, ran(pool, tokens))
        pool.check([])
        assert len(pool._free) == 7
    assert pool.cache.match(b"a", [1, 2, 3, 4]).tokens(4) == 4


def test_who_shares_a_block_takes_none_that_is_available() -> None:
    pool = pool_of(4)
    end(pool, ran(pool, LONG))
    nodes = chain(pool, LONG)
    assert pool.evictable(nodes) == 3
    table = pool.share(nodes)
    assert (pool.available, pool.evictable(nodes)) == (1, 0)
    again = pool.share(nodes)
    assert pool.available == 1
    pool.release(again)
    assert pool.available == 1
    pool.release(table)
    assert pool.available == 4


def test_what_is_given_up_is_forgotten() -> None:
    pool = pool_of(3)
    end(pool, ran(pool, LONG))
    push_out(pool)
    assert known(pool, LONG) == 0
    assert not pool.take_moves()
    pool.check([])


def test_a_copy_within_a_block_is_no_move() -> None:
    """Its source was given up for it, so what it is to have is there already."""
    pool = pool_of(3)
    pool.copy(1, 1)
    pool.copy(1, 2)
    assert pool.take_moves() == [Copy(1, 2)]
    assert pool.take_moves() == []


# What turned out to be wrong


def test_what_a_sequence_ran_on_can_be_forgotten() -> None:
    """All that who asks the same again would run on: its blocks, the one it copied from, and those in the tier."""
    pool = pool_of(8, slots=8)
    end(pool, ran(pool, [*LONG, 7]))
    push_out(pool)
    nodes = chain(pool, LONG)
    table = [pool.load(nodes[0], pool.allocate(), whole=True)]
    broken = sequence(1, [*LONG, 7, 8])
    broken.chain, broken.table = [nodes[0]], table
    pool.distrust(broken)
    end(pool, broken)
    pool.check([])
    assert list(pool.cache.nodes()) == []
    assert len(pool._free) == 8


def test_what_another_runs_on_too_is_not_forgotten_before_both_say_so() -> None:
    pool = pool_of(8)
    one = ran(pool, LONG)
    two = ran(pool, [*LONG[:4], 9, 9], found=one.chain[:2])
    pool.distrust(one)
    end_of = one.table[2]
    pool.keep_tail(one)
    pool.release(one.table)
    pool.check([two.table])
    assert end_of in pool._free
    assert known(pool, LONG) == 4
    pool.distrust(two)
    end(pool, two)
    assert list(pool.cache.nodes()) == []


def test_a_last_block_that_was_copied_from_is_forgotten() -> None:
    pool = pool_of(8)
    end(pool, ran(pool, [7]))
    pool.distrust(sequence(1, [7, 8]))
    assert list(pool.cache.nodes()) == []
    assert len(pool._free) == 8


def test_who_copied_from_a_running_sequences_block_leaves_that_alone() -> None:
    pool = pool_of(8)
    other = ran(pool, [1, 2])
    pool.distrust(sequence(1, [1, 3]))
    pool.check([other.table])
    assert known(pool, [1, 2]) == 2


def test_a_shared_prefix_is_forgotten_too_and_so_is_what_an_owner_has_after_it() -> None:
    pool = pool_of(8, shared=[1, 2])
    end(pool, ran(pool, [1, 2, 3, 4], b"b"))
    broken = ran(pool, [1, 2, 5, 6])
    pool.distrust(broken)
    pool.release(broken.table)
    pool.check([])
    assert known(pool, [1, 2, 5, 6]) == 0
    end(pool, ran(pool, [1, 2]))
    assert known(pool, [1, 2, 5, 6]) == 2
    assert known(pool, [1, 2, 3, 4], b"b") == 4, "another owner's own blocks stay"
