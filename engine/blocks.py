"""Who owns which KV block.

Owns: reference counts, the free list and the order in which cached blocks are evicted. Every block is in exactly one state: free
(content unknown), cached (content known to the prefix cache, nobody using it, evictable) or owned (in at least one
sequence's table). Knows block ids only: the tensors belong to the runner, the tokens to the prefix cache.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.core import CacheNode
from engine.prefix_cache import PrefixCache


class BlockPool:
    """`blocks` blocks of `block_size` tokens each."""

    def __init__(self, blocks: int, block_size: int, cache: PrefixCache | None = None) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.cache = cache or PrefixCache(block_size)
        self._references = [0] * blocks
        self._free = deque(range(blocks))
        self._idle: dict[int, None] = {}  # cached and unreferenced, in eviction order: the least recently used first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free) + len(self._idle)

    @property
    def owned(self) -> int:
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """A block of unknown content, owned once. The caller has checked `available`."""
        if self._free:
            block = self._free.popleft()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self.cache.evict(block)
        self._references[block] = 1
        return block

    def share(self, chain: Iterable[CacheNode]) -> list[int]:
        """Own the blocks of a cache match; returns them as the start of a block table."""
        table = [node.block for node in chain]
        for block in table:
            self._references[block] += 1
            self._idle.pop(block, None)
        return table

    def evictable(self, chain: Iterable[CacheNode]) -> int:
        """How many blocks of a match nobody uses: sharing them lowers `available` by as many."""
        return sum(node.block in self._idle for node in chain)

    def release(self, table: Sequence[int]) -> None:
        """Give a table back. Its tail becomes evictable before its head, so that a prefix outlives what builds on it."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self.cache:
                self._idle[block] = None
            else:
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that no block is lost or shared wrongly, given every live block table. For tests.

        Raises: AssertionError
        """
        held = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, in {held[block]} tables"
        free, idle = set(self._free), set(self._idle)
        owned = set(held)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & owned or idle & owned), "a block is in two states"
        assert len(free) + len(idle) + len(owned) == self.blocks, (
            f"{len(free)} free + {len(idle)} cached + {len(owned)} owned != {self.blocks}"
        )
        assert all(block in self.cache for block in idle), "an evictable block is unknown to the cache"
        assert not any(block in self.cache for block in free), "the cache knows a free block"
