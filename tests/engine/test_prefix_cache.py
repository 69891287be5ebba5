from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from engine.core import CacheNode
from engine.prefix_cache import Match, PrefixCache

SIZE = 4


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def add(cache: PrefixCache, tokens: Sequence[int], salt: bytes = b"a", shared: int = 0) -> list[CacheNode]:
    """As a sequence that ran: its full blocks, and the rest of it unless a longer one begins so. Returns the nodes."""
    nodes: list[CacheNode] = []
    for at, start in enumerate(range(0, len(tokens), cache.block_size)):
        parent = nodes[-1] if at and at != shared else cache.root(salt, tokens, at, shared)
        node = cache.add(parent, tuple(tokens[start : start + cache.block_size]))[0]
        nodes += [node] if node else []
    return nodes


def known(cache: PrefixCache, tokens: Sequence[int], salt: bytes = b"a") -> int:
    return cache.match(salt, tokens).tokens(cache.block_size)


def prompt(chance: random.Random, others: list[list[int]]) -> list[int]:
    """Of two tokens only, and often a branch of another's, so that much is in common."""
    start = chance.choice(others) if others and chance.random() < 0.7 else []
    return start[: chance.randrange(len(start) + 1)] + [chance.randrange(2) for _ in range(chance.randrange(1, 12))]


@pytest.mark.parametrize("seed", range(40))
def test_every_token_whose_kv_exists_is_found(seed: int) -> None:
    """Wherever a hit ends, in a block or at its edge: as much as any that ran has in common with it."""
    chance, cache, ran = random.Random(seed), PrefixCache(SIZE), list[list[int]]()
    for _ in range(60):
        asked = prompt(chance, ran)
        assert known(cache, asked) == max((common(asked, other) for other in ran), default=0)
        add(cache, asked)
        ran.append(asked)
        assert known(cache, asked) == len(asked)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_removed_is_not_found_and_the_rest_is(seed: int) -> None:
    """A node takes with it what follows it, and nothing else."""
    chance, cache, ran = random.Random(seed), PrefixCache(SIZE), list[list[int]]()
    paths: dict[CacheNode, tuple[int, ...]] = {}  # from the root to the end of a node
    for _ in range(30):
        asked = prompt(chance, ran)
        ran.append(asked)
        for node in add(cache, asked):
            paths[node] = (paths[node.parent] if node.parent and node.parent.tokens else ()) + node.tokens
    alive = {node: paths[node] for node in cache.nodes()}
    while alive:
        gone = set(cache.remove(chance.choice(list(alive))))
        assert gone
        for node in gone:
            assert node.parent is None or node.parent in gone
        alive = {node: path for node, path in alive.items() if node not in gone}
        assert set(cache.nodes()) == alive.keys()
        for asked in ran:
            assert known(cache, asked) == max((common(asked, path) for path in alive.values()), default=0)
    assert not cache._roots, "owners who have nothing here leave nothing behind"


class Colliding(int):
    """A token that has the hash of all others."""

    def __hash__(self) -> int:
        return 0


def test_no_hash_is_trusted() -> None:
    """E2: tokens whose hashes are all the same are told apart, and so are blocks by what came before them."""
    one, two, three, four = map(Colliding, (1, 2, 3, 4))
    cache = PrefixCache(2)
    nodes = add(cache, [one, two])
    assert cache.match(b"a", [one, two]).chain == nodes
    assert cache.match(b"a", [three, four]) == Match()
    assert cache.match(b"b", [one, two]) == Match()
    assert cache.match(b"a", [one, two, one, two]).chain == nodes, "a child is not its own parent"
    add(cache, [three, four, one, two])
    assert cache.match(b"a", [one, two, one, two]).chain == nodes
    assert known(cache, [three, four, one, two]) == 4


def test_no_salt_spells_another_roots_fields() -> None:
    """E1: an owner's root after a shared prefix is never that of an owner whose salt ends with what the prefix is."""
    prefix = [7] * SIZE
    spelled = array("q", prefix).tobytes()
    cache = PrefixCache(SIZE, [prefix])
    roots = [
        cache.root(salt, [*prefix, 1], at, shared)
        for salt in (b"", b"x", b"x" + spelled, spelled, b"shared", b"owner", b"ownerx")
        for at, shared in ((1, 1), (0, 0))
    ]
    assert len({root.salt for root in roots}) == len(roots)
    assert cache.root(b"x", prefix, 0, 1).salt not in {root.salt for root in roots}


def test_owners_share_nothing() -> None:
    """E3"""
    cache = PrefixCache(SIZE)
    add(cache, range(11))
    for salt in (b"b", b"", b"aa", b"a\0"):
        assert cache.match(salt, range(11)) == Match()
    assert known(cache, range(11)) == 11


def test_who_only_looks_leaves_nothing_behind() -> None:
    """A million names that nobody has used take no memory."""
    cache = PrefixCache(SIZE)
    assert cache.match(b"a", range(9)) == Match()
    assert not cache._roots


def test_the_same_content_is_known_once() -> None:
    cache = PrefixCache(2)
    first = add(cache, [1, 2, 3, 4])
    assert add(cache, [1, 2, 3, 4, 5, 6])[:2] == first
    assert len(list(cache.nodes())) == 3


def test_a_beginning_of_what_is_known_is_not_kept_and_gives_way_to_what_is_longer() -> None:
    """No block of a few tokens is kept beside one that has them all."""
    cache = PrefixCache(SIZE)
    root = cache.root(b"a", (), 0, 0)
    short, _ = cache.add(root, (1, 2))
    other, _ = cache.add(root, (1, 3))
    assert cache.add(root, (1,)) == (None, None)
    assert cache.add(root, (1, 2)) == (short, None)
    longer, superfluous = cache.add(root, (1, 2, 9))
    assert (superfluous, longer and longer.tokens) == (short, (1, 2, 9))
    full, superfluous = cache.add(root, (1, 2, 9, 9))
    assert superfluous is longer
    assert list(cache.nodes()) == [full, other]
    assert cache.remove(short) == [] if short else True, "it was removed already"


def test_nothing_follows_a_block_that_is_not_full() -> None:
    cache = PrefixCache(SIZE)
    add(cache, range(6))
    found = cache.match(b"a", range(12))
    assert (len(found.chain), found.part_tokens) == (1, 2)
    assert found.part
    assert not found.part.children


def test_a_node_that_was_removed_is_made_anew() -> None:
    cache = PrefixCache(2)
    old = add(cache, [1, 2, 3, 4])
    cache.remove(old[0])
    new = add(cache, [1, 2, 3, 4, 5, 6])
    assert cache.match(b"a", [1, 2, 3, 4, 5, 6]).chain == new
    assert not {*old} & {*new}


# Prefixes that all owners share

OPERATORS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_owners_share_the_whole_blocks_of_an_operators_prefix_and_nothing_after_it() -> None:
    cache = PrefixCache(SIZE, [OPERATORS])
    asked = [*OPERATORS, 50, 51, 52, 53]
    assert cache.shared_blocks(asked) == 2
    mine = add(cache, asked, b"a", shared=2)
    found = cache.match(b"b", asked, shared=2)
    assert found.chain == mine[:2]
    assert found.part is None, "what follows in the same block is the owner's own"
    assert cache.match(b"a", asked, shared=2).tokens(SIZE) == len(asked)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param([*OPERATORS[:4], 99, *OPERATORS[5:], 50], id="begins as it does"),
        pytest.param([*OPERATORS[:8], 99, 98, 97], id="has its whole blocks, and ends otherwise"),
        pytest.param(OPERATORS[:9], id="is cut short"),
        pytest.param([99, *OPERATORS, 50], id="quotes it"),
        pytest.param([*range(60, 64), *OPERATORS], id="quotes it at a block's edge"),
    ],
)
def test_what_is_not_the_operators_prefix_shares_nothing(asked: list[int]) -> None:
    cache = PrefixCache(SIZE, [OPERATORS])
    assert cache.shared_blocks(asked) == 0
    add(cache, asked, b"a")
    add(cache, [*OPERATORS, 50], b"a", shared=2)
    assert cache.match(b"b", asked) == Match()


def test_of_several_prefixes_the_longest_counts() -> None:
    cache = PrefixCache(SIZE, [OPERATORS[:5], OPERATORS, [9, 9, 9, 9], [8]])
    assert [cache.shared_blocks([*asked, 50]) for asked in (OPERATORS, OPERATORS[:6], [9, 9, 9, 9], [8])] == [2, 1, 1, 0]


def test_after_each_number_of_shared_blocks_an_owner_has_a_root_of_its_own() -> None:
    """What follows one prefix is not found after another, nor without one."""
    cache = PrefixCache(SIZE, [OPERATORS[:4], [9, 9, 9, 9]])
    tail = [50, 51, 52, 53]
    add(cache, [*OPERATORS[:4], *tail], b"a", shared=1)
    add(cache, [9, 9, 9, 9], b"a", shared=1)
    assert cache.match(b"a", [9, 9, 9, 9, *tail], shared=1).tokens(SIZE) == 4
    assert cache.match(b"a", tail) == Match()
    assert cache.match(b"a", [*OPERATORS[:4], *tail], shared=1).tokens(SIZE) == 8
