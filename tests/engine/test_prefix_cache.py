from __future__ import annotations

from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache


def test_a_digest_that_collides_is_a_miss() -> None:
    """E2: with a constant digest only a block whose tokens and parents are the same is found."""
    cache = PrefixCache(2, digest=lambda parent, content: b"same")
    cache.extend(b"a", [], [1, 2], [0])
    assert [node.block for node in cache.match(b"a", [1, 2])] == [0]
    assert cache.match(b"a", [3, 4]) == []
    assert cache.match(b"b", [1, 2]) == []
    assert [node.block for node in cache.match(b"a", [1, 2, 1, 2])] == [0], "a child is not its own parent"
    cache.extend(b"a", [], [3, 4], [1])
    assert len(cache) == 1


def test_the_same_content_in_two_blocks_is_known_once() -> None:
    cache = PrefixCache(2)
    cache.extend(b"a", [], [1, 2, 3, 4], [0, 1])
    chain = cache.match(b"a", [])
    cache.extend(b"a", chain, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert [node.block for node in cache.match(b"a", [1, 2, 3, 4, 5, 6])] == [0, 1, 9]


def test_a_node_evicted_under_a_chain_is_made_anew() -> None:
    cache = PrefixCache(2)
    cache.extend(b"a", [], [1, 2], [0])
    chain = cache.match(b"a", [1, 2])
    cache.evict(0)
    assert cache.match(b"a", [1, 2]) == []
    cache.extend(b"a", chain, [1, 2, 3, 4], [5, 6])
    assert [node.block for node in cache.match(b"a", [1, 2, 3, 4])] == [5, 6]


def test_a_chain_is_mended_from_its_first_evicted_node_on() -> None:
    cache, chain = PrefixCache(2), []
    cache.extend(b"a", chain, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    cache.evict(0)
    cache.extend(b"a", chain, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert [node.block for node in cache.match(b"a", [1, 2, 3, 4, 5, 6])] == [7, 1, 2]


def test_a_child_outlives_its_evicted_parent() -> None:
    cache = PrefixCache(2)
    cache.extend(b"a", [], [1, 2, 3, 4, 5, 6], [0, 1, 2])
    cache.evict(1)
    cache.extend(b"a", [], [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert [node.block for node in cache.match(b"a", [1, 2, 3, 4, 5, 6])] == [0, 8, 2]
    collided = PrefixCache(2, digest=lambda parent, content: content)
    collided.extend(b"a", [], [1, 2, 3, 4], [0, 1])
    collided.evict(0)
    collided.extend(b"a", [], [5, 6, 3, 4], [2, 3])
    assert [node.block for node in collided.match(b"a", [5, 6, 3, 4])] == [2], "another prefix's child stays a collision"


def test_the_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(3, 2)
    table = [pool.allocate() for _ in range(3)]
    pool.cache.extend(b"a", [], [1, 2, 3, 4, 5, 6], table)
    pool.release(table)
    pool.check([])
    assert pool.available == 3
    taken = pool.allocate()
    pool.check([[taken]])
    assert [node.block for node in pool.cache.match(b"a", [1, 2, 3, 4, 5, 6])] == table[:2]
