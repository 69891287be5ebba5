from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from engine.core import CacheNode
from engine.prefix_cache import PrefixCache
from engine.tier import Record, Tier
from tests.engine.test_prefix_cache import add, known

SIZE = 2


def record(node: CacheNode) -> Record:
    """As a file store writes it down."""
    assert node.parent
    return Record(node.slot, node.id, node.parent.id, node.root.salt, node.tokens)


def keep(tier: Tier, nodes: Iterable[CacheNode]) -> list[Record]:
    """Take nodes in, in this order; what is written of them."""
    nodes = list(nodes)
    for node in nodes:
        assert tier.take(node) is None
    return [record(node) for node in nodes]


def chain(cache: PrefixCache, tokens: Sequence[int], salt: bytes = b"a") -> list[CacheNode]:
    return add(cache, tokens, salt)


def reopened(records: Iterable[Record], slots: int = 16) -> tuple[Tier, PrefixCache]:
    """The next process, after one that left these records."""
    tier, cache = Tier(slots), PrefixCache(SIZE)
    found = tier.restore(records, cache)
    nodes = list(cache.nodes())
    tier.check(nodes)
    assert found == len(nodes)
    return tier, cache


def given_up(tier: Tier) -> list[tuple[int, ...]]:
    """The tokens of what gives up its slot for newcomers, in order."""
    newcomers = [CacheNode(CacheNode(None, ()), ()) for _ in range(tier.slots)]
    return [victim.tokens for node in newcomers if (victim := tier.take(node))]


def test_what_was_not_used_for_longest_gives_up_its_slot() -> None:
    tier, cache = Tier(3), PrefixCache(SIZE)
    nodes = chain(cache, [1, 2, 3, 4, 5, 6])
    keep(tier, nodes)
    tier.touch(nodes[0])
    others = chain(cache, [9, 9, 8, 8, 7])
    assert [tier.take(node) for node in others] == [nodes[1], nodes[2], nodes[0]]
    assert [node.slot for node in nodes] == [-1, -1, -1]
    assert sorted(node.slot for node in others) == [0, 1, 2]
    tier.check(others)


def test_a_slot_is_spare_when_free_or_of_what_is_nowhere_else() -> None:
    """Else blocks of the pool would take each other's slots for ever."""
    tier, cache = Tier(2), PrefixCache(SIZE)
    nodes = chain(cache, [1, 2, 3, 4])
    for block, node in enumerate(nodes):
        assert tier.spare
        node.block = block
        tier.take(node)
    assert not tier.spare
    nodes[0].block = -1
    assert tier.spare
    tier.touch(nodes[0])
    assert tier.spare, "also where it was used last"
    (other,) = chain(cache, [7, 8])
    assert tier.take(other) is nodes[0], "the pool's has its slot still"
    tier.release(nodes[1])
    assert tier.spare


def test_names_are_given_once_and_to_all_that_a_record_follows() -> None:
    tier, cache = Tier(8), PrefixCache(SIZE)
    left, right = chain(cache, [1, 2, 3, 4, 5, 6]), chain(cache, [1, 2, 7, 8])
    tier.take(left[2])
    tier.take(right[1])
    assert all(node.id for node in (*left, *right))
    assert len({node.id for node in (*left, *right)}) == 4
    assert left[0].parent
    assert left[0].parent.id == 0, "a root is named by whose it is"
    before = left[2].id
    tier.release(left[2])
    tier.take(left[2])
    assert left[2].id == before, "a name is for life"


# The next process


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_found_again(seed: int) -> None:
    """In whatever order it was kept, a child before its parent too."""
    chance, cache, tier = random.Random(seed), PrefixCache(SIZE), Tier(400)
    ran = [[chance.randrange(2) for _ in range(chance.randrange(1, 14))] for _ in range(30)]
    for asked in ran:
        add(cache, asked, b"%d" % asked[0])
    nodes = list(cache.nodes())
    chance.shuffle(nodes)
    records = keep(tier, nodes)
    chance.shuffle(records)
    again, found = reopened(records, 400)
    for asked in ran:
        assert known(found, asked, b"%d" % asked[0]) == len(asked)
        assert known(found, asked, b"other") == 0
    was = {node.slot: (node.id, node.tokens) for node in nodes}
    assert {node.slot: (node.id, node.tokens) for node in found.nodes()} == was
    assert given_up(again)


@pytest.mark.parametrize("lost", range(4))
def test_what_follows_a_lost_record_is_lost_and_nothing_else(lost: int) -> None:
    cache, tier = PrefixCache(SIZE), Tier(16)
    records = keep(tier, chain(cache, [1, 2, 3, 4, 5, 6, 7, 8]))
    records += keep(tier, chain(cache, [1, 2, 9, 9])[1:]) + keep(tier, chain(cache, [5, 5], b"b"))
    del records[lost]
    _, found = reopened(records)
    assert known(found, [1, 2, 3, 4, 5, 6, 7, 8]) == 2 * lost
    assert known(found, [1, 2, 9, 9]) == (4 if lost else 0)
    assert known(found, [5, 5], b"b") == 2


def test_no_record_is_ever_taken_for_what_follows_another() -> None:
    """Restarted again and again, each time with some records damaged, some never written, some left over from before."""
    chance = random.Random(1)
    for _ in range(60):
        file: dict[int, Record] = {}  # by slot: what is written
        truth: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # by slot: all tokens that led to what is written there
        for _ in range(4):
            tier, cache = reopened(file.values())
            for node in cache.nodes():
                assert truth[node.slot] == whole(node), "a record was attached to another block"
            for _ in range(6):
                salt, tokens = chance.choice((b"a", b"b")), [chance.randrange(2) for _ in range(2 * chance.randrange(1, 5))]
                nodes = add(cache, tokens, salt)
                for node in nodes:
                    node.block = 0  # they are in the pool, and leave it
                for node in reversed(nodes):
                    if node.slot < 0:
                        if (victim := tier.take(node)) and victim.block < 0:
                            for gone in cache.remove(victim):
                                if gone.slot >= 0:
                                    tier.release(gone)  # what is written of it stays
                        if chance.random() < 0.8:  # else it could not be written
                            file[node.slot], truth[node.slot] = record(node), whole(node)
                    node.block = -1
            for slot in [slot for slot in file if chance.random() < 0.2]:
                del file[slot]  # damaged


def whole(node: CacheNode) -> tuple[bytes, tuple[int, ...]]:
    """The root's name, and all tokens from there to a node's end."""
    tokens = node.tokens
    while node.parent:
        node = node.parent
        tokens = node.tokens + tokens
    return node.salt, tokens


def test_a_record_whose_parent_was_lost_waits_for_nobody() -> None:
    """Crafted: the newest name is known only as a parent's; its record is lost, twice, before new names are given."""
    cache, tier = PrefixCache(SIZE), Tier(16)
    nodes = chain(cache, [1, 2, 3, 4])
    (orphan,) = keep(tier, nodes[1:])  # names its parent too, which never gets a record
    assert orphan.parent > orphan.id
    for _ in range(2):
        tier, cache = reopened([orphan])
        assert not list(cache.nodes())
    (other,) = chain(cache, [8, 8])
    tier.take(other)
    assert other.id > orphan.parent
    _, cache = reopened([orphan, replace(record(other), slot=5)])
    assert known(cache, [8, 8, 3, 4]) == 2


def test_of_two_records_of_the_same_tokens_the_newer_counts() -> None:
    """The older's bytes were found damaged, and the block was made anew."""
    cache, tier = PrefixCache(SIZE), Tier(16)
    old = keep(tier, chain(cache, [1, 2]))
    tier.release(cache.remove(next(cache.nodes()))[0])
    tier.take(chain(cache, [6, 6])[0])  # the free slot goes to another
    new = keep(tier, chain(cache, [1, 2, 3, 4]))
    for records in ([replace(old[0], slot=9), *new], [replace(old[0], slot=0), *(replace(each, slot=each.slot + 4) for each in new)]):
        _, found = reopened(records)
        assert known(found, [1, 2, 3, 4]) == 4
        assert {node.id for node in found.nodes()} == {each.id for each in new}


def test_a_longer_last_block_makes_a_shorter_one_superfluous() -> None:
    cache = PrefixCache(SIZE)
    (full,) = chain(cache, [1, 2])
    full.id = 1
    for ids in ((1, 2), (2, 1)):  # whichever was kept first
        tier, found = reopened(Record(slot, ids[slot], 0, full.root.salt, tokens) for slot, tokens in enumerate([(1,), (1, 2)]))
        assert [node.tokens for node in found.nodes()] == [(1, 2)]
        assert known(found, [1, 2]) == 2
        assert given_up(tier) == [(1, 2)]


def test_records_that_follow_each_other_in_a_circle_are_of_no_use() -> None:
    circle = [Record(0, 1, 2, b"r", (1, 2)), Record(1, 2, 3, b"r", (3, 4)), Record(2, 3, 1, b"r", (5, 6)), Record(3, 4, 4, b"r", (7, 8))]
    good = Record(4, 9, 0, b"r", (9, 9))
    _, cache = reopened([*circle, good])
    assert [node.tokens for node in cache.nodes()] == [(9, 9)]


def test_the_newest_conversation_is_given_up_last_and_its_first_block_last_of_all() -> None:
    cache, tier = PrefixCache(SIZE), Tier(16)
    records = keep(tier, reversed(chain(cache, [1, 2, 3, 4]))) + keep(tier, reversed(chain(cache, [5, 6, 7, 8])))
    again, _ = reopened(reversed(records))
    assert given_up(again) == [(3, 4), (1, 2), (7, 8), (5, 6)]


def test_a_long_conversation_is_restored_in_no_time() -> None:
    """In proportion to its blocks: the file of a long context has tens of thousands, each after the one before."""
    records = [Record(at, at + 1, at, b"r", (at, at)) for at in range(30_000)]
    start = time.perf_counter()
    tier, cache = Tier(len(records)), PrefixCache(SIZE)
    assert tier.restore(reversed(records), cache) == len(records)
    assert time.perf_counter() - start < 10
