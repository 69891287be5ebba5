"""Which KV exists for which tokens: a tree of blocks.

Owns: the tree. A node is a block's tokens, its path from the root all that came before them, so a hit is a comparison of tokens, and no
hash is trusted. Roots are named by whose tokens they hold (every field tagged and with its length, so that none runs into another), so
owners never share (CVE-2025-46570), except for prefixes that the operator names. Full blocks are shared as they are; of any other block, a
conversation's partly filled last one or one that a branch leaves in its middle, the tokens in common can be copied. Does not own blocks:
`blocks.py` says who uses them and which are forgotten.

(A tree rather than a hash chain, as in SGLang's RadixAttention, Zheng et al., 2024, because it also finds prefixes that end inside a
block.)
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from engine.core import CacheNode

_tokens = attrgetter("tokens")


@dataclass(slots=True)
class Match:
    """The longest known prefix of some tokens."""

    chain: list[CacheNode] = field(default_factory=list)  # full blocks, from the first on
    part: CacheNode | None = None  # a block that begins with the tokens that come next
    part_tokens: int = 0  # how many of them

    def tokens(self, block_size: int) -> int:
        return len(self.chain) * block_size + self.part_tokens


class PrefixCache:
    """The tree. `shared`: token prefixes that owners share where a prompt begins with the whole of one, as far as it fills blocks."""

    def __init__(self, block_size: int, shared: Iterable[Sequence[int]] = ()) -> None:
        self.block_size = block_size
        self._shared = [tuple(prefix) for prefix in shared]
        self._roots: dict[bytes, CacheNode] = {}

    def shared_blocks(self, tokens: Sequence[int]) -> int:
        """How many leading blocks of a prompt all owners share. None of one that only begins as they do: it is somebody's own words."""
        known = (prefix for prefix in self._shared if tuple(tokens[: len(prefix)]) == prefix)
        return max((len(prefix) // self.block_size for prefix in known), default=0)

    def root(self, salt: bytes, tokens: Sequence[int], at: int, shared: int) -> CacheNode:
        """What block `at` of `tokens` follows if it is an owner's first: nothing, or `shared` blocks that are everyone's."""
        if at < shared:
            return self.root_named(_name(b"shared"))
        prefix = array("q", tokens[: shared * self.block_size]).tobytes()
        return self.root_named(_name(b"owner", salt, prefix))

    def root_named(self, name: bytes) -> CacheNode:
        if name not in self._roots:
            self._roots[name] = CacheNode(None, (), salt=name)
        return self._roots[name]

    def match(self, salt: bytes, tokens: Sequence[int], shared: int = 0, before: Sequence[CacheNode] = ()) -> Match:
        """The longest known prefix of `tokens`, of which `shared` blocks are everyone's.

        before: the chain that an earlier search for the same tokens found. What is still known of it is not searched again.
        """
        # A node is forgotten with all that follows it, but owners' nodes do not follow everyone's.
        known = before and before[-1].parent and (not shared or before[min(shared, len(before)) - 1].parent)
        found = Match(list(before) if known else [])
        parent = found.chain[-1] if found.chain else None
        for at in range(len(found.chain), -(-len(tokens) // self.block_size)):
            if parent is None or at == shared:
                parent = self.root(salt, tokens, at, shared)
            wanted = tuple(tokens[at * self.block_size : (at + 1) * self.block_size])
            node, common = _closest(parent.children, wanted)
            if node is None or common < self.block_size:
                found.part, found.part_tokens = node, common
                break
            found.chain.append(node)
            parent = node
        self._drop_if_bare(parent)
        return found

    def add(self, parent: CacheNode, tokens: tuple[int, ...]) -> tuple[CacheNode | None, CacheNode | None]:
        """The node of `tokens` after `parent`, made if it is not known, and the node that it makes superfluous, already removed.

        There is none, and nothing is made, for tokens that a longer node begins with.
        """
        siblings = parent.children
        at = bisect_left(siblings, tokens, key=_tokens)
        if at < len(siblings) and siblings[at].tokens[: len(tokens)] == tokens:
            return (siblings[at] if siblings[at].tokens == tokens else None), None
        # No sibling begins with another, so only the one right before can be a beginning of this.
        before = siblings[at - 1] if at else None
        superfluous = before if before and tokens[: len(before.tokens)] == before.tokens else None
        node = CacheNode(parent, tokens)
        if superfluous:
            superfluous.parent = None
            siblings[at - 1] = node
        else:
            siblings.insert(at, node)
        return node, superfluous

    def remove(self, node: CacheNode) -> list[CacheNode]:
        """Forget a node and all that follows it; returns them."""
        parent = node.parent
        if parent is None:
            return []
        del parent.children[bisect_left(parent.children, node.tokens, key=_tokens)]
        removed = list(_subtree(node))
        for gone in removed:
            gone.parent = None
        self._drop_if_bare(parent)
        return removed

    def nodes(self) -> Iterator[CacheNode]:
        """All that are known, parents before their children."""
        for root in self._roots.values():
            for child in root.children:
                yield from _subtree(child)

    def _drop_if_bare(self, node: CacheNode | None) -> None:
        """Owners who have nothing here any more leave nothing behind."""
        if node and node.parent is None and not node.children:
            self._roots.pop(node.salt, None)


def _name(*fields: bytes) -> bytes:
    return hashlib.blake2b(b"".join(len(field).to_bytes(8, "little") + field for field in fields), digest_size=16).digest()


def _closest(children: list[CacheNode], wanted: tuple[int, ...]) -> tuple[CacheNode | None, int]:
    """The child that has most leading tokens in common with `wanted`, and how many: in their order it stands right beside it."""
    at = bisect_left(children, wanted, key=_tokens)
    best, most = None, 0
    for child in children[max(0, at - 1) : at + 1]:
        common = _common(child.tokens, wanted)
        if common > most:
            best, most = child, common
    return best, most


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(at for at in range(length) if one[at] != other[at])


def _subtree(node: CacheNode) -> Iterator[CacheNode]:
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children
