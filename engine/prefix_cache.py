"""Which KV blocks hold which tokens: prefix reuse by a hash chain over full blocks.

Owns: the map from a chain digest to the block that holds those tokens. Does not own the blocks: `blocks.py` counts their
references and decides which is evicted. The chain's root is the sequence's salt, so sequences of different salts never
share (CVE-2025-46570), and a hit compares the tokens and the parents all the way down, so a digest that collides is a
miss and never another prompt's block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from engine.core import CacheNode

Digest = Callable[[bytes, bytes], bytes]


def blake2(parent: bytes, content: bytes) -> bytes:
    """The chain's step. The parent has a fixed length (or is a salt, prefixed by its length), so fields cannot run together."""
    return hashlib.blake2b(len(parent).to_bytes(4, "little") + parent + content, digest_size=16).digest()


class PrefixCache:
    """Nodes by digest, and by the block they live in."""

    def __init__(self, block_size: int, digest: Digest = blake2) -> None:
        self.block_size = block_size
        self._digest = digest
        self._nodes: dict[bytes, CacheNode] = {}
        self._by_block: dict[int, CacheNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(self, salt: bytes, tokens: Sequence[int]) -> list[CacheNode]:
        """The nodes of the longest known prefix of `tokens`, full blocks only."""
        chain: list[CacheNode] = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = chain[-1] if chain else None
            content = tuple(tokens[start : start + self.block_size])
            node = self._nodes.get(self._key(salt, parent, content))
            if node is None or not self._same(node, salt, parent, content):
                break
            chain.append(node)
        return chain

    def extend(self, salt: bytes, chain: list[CacheNode], tokens: Sequence[int], table: Sequence[int]) -> None:
        """Make `tokens` (whole blocks, computed, held by `table`) known, continuing a sequence's `chain` in place.

        Content that another block holds already keeps that block's node: the sequence's own copy stays private to it. A node that
        was evicted under the chain is made anew from the sequence's own block.
        """
        evicted = next((index for index, node in enumerate(chain) if node.block < 0), len(chain))
        del chain[evicted:]
        for index in range(len(chain), len(tokens) // self.block_size):
            parent = chain[-1] if chain else None
            content = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            digest = self._key(salt, parent, content)
            node = self._nodes.get(digest)
            if node is None:
                node = CacheNode(digest, parent, salt, content, table[index])
                self._nodes[digest] = self._by_block[node.block] = node
            elif not self._same(node, salt, parent, content):
                if not (node.salt == salt and node.tokens == content and _same_prefix(node.parent, parent)):
                    return  # a collision: what follows stays uncached
                node.parent = parent  # its own parent was evicted, and has been made anew
            chain.append(node)

    def evict(self, block: int) -> None:
        """Forget what `block` holds."""
        node = self._by_block.pop(block)
        del self._nodes[node.digest]
        node.block = -1

    def _key(self, salt: bytes, parent: CacheNode | None, content: tuple[int, ...]) -> bytes:
        return self._digest(parent.digest if parent else b"salt:" + salt, array("q", content).tobytes())

    @staticmethod
    def _same(node: CacheNode, salt: bytes, parent: CacheNode | None, content: tuple[int, ...]) -> bool:
        return node.parent is parent and node.salt == salt and node.tokens == content


def _same_prefix(one: CacheNode | None, other: CacheNode | None) -> bool:
    """Both chains hold the same tokens, whether or not their blocks are still there. Their salts are known to be equal."""
    while one is not other:
        if one is None or other is None or one.tokens != other.tokens:
            return False
        one, other = one.parent, other.parent
    return True
