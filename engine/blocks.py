"""Who owns which KV block.

Owns: reference counts, the free list, the order in which cached blocks are given up, and the moves (copies, saves to a tier, loads from it)
that have to be made, in order, before the next forward pass. Every block is in exactly one state: free (content unknown), idle (the prefix
cache knows its content, nobody uses it) or owned (in at least one sequence's table). Knows block ids only: tensors belong to the decoder,
bytes to the tier's store.

Why the order of moves is enough: a block is planned to be overwritten only after every move that reads it was planned, and the pass that
writes new KV comes after all moves. Why a block never outlives the one it follows: whoever holds a block holds all before it, and a table
is given back tail first, so in the order of giving up a block stands before its parent.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from engine import core
from engine.core import CacheNode, Copy, Load, Move, Save
from engine.prefix_cache import PrefixCache
from engine.tier import Tier


class BlockPool:
    """`blocks` blocks of `block_size` tokens each."""

    def __init__(self, blocks: int, block_size: int, cache: PrefixCache | None = None, tier: Tier | None = None) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.cache = cache or PrefixCache(block_size)
        self.tier = tier
        self._references = [0] * blocks
        self._free = deque(range(blocks))  # those last freed first: there is memory behind them
        self._nodes: dict[int, CacheNode] = {}  # by block: what the cache knows it holds
        # In an ordinary dict, finding the first takes as long as there were others before it since it last grew.
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and unreferenced, the least recently used first
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # those of them that the tier has not
        self._left: OrderedDict[int, None] = OrderedDict()  # nor these, which some have left and others still use
        self._moves: list[Move] = []
        self.saves = 0  # how many of them are
        self.most_saves = math.inf  # how many there may be on account of blocks that are given up: what is beyond is forgotten

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free) + len(self._idle)

    @property
    def owned(self) -> int:
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def upcoming(self, count: int) -> list[int]:
        """The free blocks that are handed out next."""
        return list(islice(self._free, count))

    def take_moves(self) -> list[Move]:
        """What is to be moved now, in this order."""
        moves, self._moves, self.saves = self._moves, [], 0
        return moves

    # Blocks of sequences

    def allocate(self) -> int:
        """A block of unknown content, owned once. The caller has checked `available`."""
        if not self._free:
            self._evict(next(iter(self._idle)))
        block = self._free.popleft()
        self._references[block] = 1
        return block

    def allocate_all(self, count: int, saves: float = math.inf) -> list[int]:
        """So many. Where more than `saves` of what is given up for them would have to be saved, what was used least recently is forgotten:
        never what the rest of it follows."""
        given_up = list(islice(self._idle, max(0, count - len(self._free))))
        excess = sum(block in self._unsaved for block in given_up) - min(saves, self.most_saves - self.saves)
        for block in given_up:
            if excess <= 0:
                break
            if block in self._unsaved:
                self._evict(block, save=False)
                excess -= 1
        return [self.allocate() for _ in range(count)]

    def share(self, nodes: Iterable[CacheNode]) -> list[int]:
        """Own the blocks of nodes that are in the pool; returns them as a part of a block table."""
        table = [node.block for node in nodes]
        for block in table:
            self._references[block] += 1
            self._idle.pop(block, None)
            if block in self._unsaved:
                del self._unsaved[block]
                self._left[block] = None
        return table

    def copy(self, source: int, target: int) -> None:
        """Plan that `target` gets what `source` holds."""
        if source != target:
            self._moves.append(Copy(source, target))

    def load(self, node: CacheNode, block: int, whole: bool) -> int:
        """Plan that an owned `block` gets what the tier holds of `node`; returns the block that holds it.

        whole: the node is in the pool from now on, in this block, or in the one where it is already (then this one is given back).
        """
        if whole and node.block >= 0:
            return self._swap(block, node)
        self._moves.append(Load(node.slot, block, node))
        if self.tier:
            self.tier.touch(node)
        if whole:
            node.block = block
            self._nodes[block] = node
        return block

    def evictable(self, nodes: Iterable[CacheNode]) -> int:
        """How many of some nodes' blocks nobody uses: sharing them lowers `available` by as many."""
        return sum(node.block in self._idle for node in nodes)

    def release(self, table: Sequence[int]) -> None:
        """Give a table back. Its tail is given up before its head, so that a prefix outlives what builds on it."""
        for block in reversed(table):
            self._references[block] -= 1
            node = self._nodes.get(block)
            if self._references[block]:
                if node and node.slot < 0:
                    self._left[block] = None
                continue
            self._left.pop(block, None)
            if node is None:
                self._free.appendleft(block)
                continue
            self._idle[block] = None
            if node.slot < 0:
                self._unsaved[block] = None
            elif self.tier:
                self.tier.touch(node)

    # What the cache knows

    def remember(self, sequence: core.Sequence) -> None:
        """Tell the cache of blocks that a step filled. Of content that another block holds already, that block goes into the table."""
        size = self.block_size
        while len(sequence.chain) < sequence.computed // size:
            at = len(sequence.chain)
            node, superfluous = self.cache.add(self._parent(sequence), tuple(sequence.tokens(at * size, (at + 1) * size)))
            assert node, "a full block begins no longer one"
            self._forget(superfluous)
            if node.block >= 0:
                sequence.table[at] = self._swap(sequence.table[at], node)
            else:
                node.block = sequence.table[at]
                self._nodes[node.block] = node
            sequence.chain.append(node)

    def keep_tail(self, sequence: core.Sequence) -> None:
        """Tell the cache of the partly filled last block of a sequence that ends or is preempted."""
        full = len(sequence.chain)
        tokens = tuple(sequence.tokens(full * self.block_size, sequence.computed))
        if not tokens or len(tokens) >= self.block_size:
            return
        node, superfluous = self.cache.add(self._parent(sequence), tokens)
        self._forget(superfluous)
        if node and node.block < 0:
            node.block = sequence.table[full]
            self._nodes[node.block] = node

    def forget(self, node: CacheNode) -> None:
        """What a node and those that follow it hold is worth nothing."""
        for gone in self.cache.remove(node):
            self._forget(gone)

    def distrust(self, sequence: core.Sequence) -> None:
        """A sequence turned out to run on what is worth nothing: forget all that it would find again, but for what another runs on too."""
        found = self.cache.match(sequence.salt, sequence.tokens(0, sequence.length), sequence.shared)
        for node in (*found.chain, found.part):
            if node and (node.block < 0 or self._references[node.block] == (node in sequence.chain)):
                self.forget(node)
        sequence.chain = [node for node in sequence.chain if node.parent]
        sequence.computed = 0

    def unsaved(self, save: Save) -> None:
        """A save that was planned could not be made."""
        node = save.node
        if not self.tier or node.slot != save.slot:
            return
        self.tier.release(node)
        self._without_slot(node)

    @property
    def behind(self) -> bool:
        """There is something to write behind."""
        return self.tier is not None and bool(self._unsaved or self._left)

    def write_behind(self, most: int) -> None:
        """Plan saves of up to `most` blocks that only the pool holds: those first that are still in use, since what was left after them is
        of no use alone, then those that are given up first, which need no save then.

        None takes the slot of what the pool holds too, or the two would take turns for ever.
        """
        for block in list(islice(chain(self._left, self._unsaved), most)):
            if self.tier and self.tier.spare:
                self._save(block)

    def _parent(self, sequence: core.Sequence) -> CacheNode:
        at = len(sequence.chain)
        if at and at != sequence.shared:
            return sequence.chain[-1]
        return self.cache.root(sequence.salt, sequence.prompt, at, sequence.shared)

    def _swap(self, block: int, node: CacheNode) -> int:
        """Give a private block back for the one that holds the same already."""
        table = self.share([node])
        self.release([block])
        return table[0]

    def _evict(self, block: int, save: bool = True) -> None:
        """Take an idle block from the cache; the tier gets it, if there is one and time for it."""
        node = self._nodes[block]
        if self.tier and node.slot >= 0:
            self.tier.touch(node)  # so that there, too, it is given up after what follows it
        elif self.tier and save and self.saves < self.most_saves:
            self._save(block)
        del self._idle[block], self._nodes[block]
        self._unsaved.pop(block, None)
        node.block = -1
        self._free.appendleft(block)
        if node.slot < 0:
            self.forget(node)

    def _save(self, block: int) -> None:
        assert self.tier
        self._unsaved.pop(block, None)
        self._left.pop(block, None)
        node = self._nodes[block]
        if victim := self.tier.take(node):
            self._without_slot(victim)
        self._moves.append(Save(block, node.slot, node))
        self.saves += 1

    def _without_slot(self, node: CacheNode) -> None:
        """It has lost its slot."""
        if node.block < 0:
            self.forget(node)
        elif node.block in self._idle:
            self._unsaved[node.block] = None
        else:
            self._left[node.block] = None

    def _forget(self, node: CacheNode | None) -> None:
        """Of a node that the cache has removed: its block is free, or whose it is alone; so is its slot."""
        if node is None:
            return
        if node.slot >= 0 and self.tier:
            self.tier.release(node)
        if node.block >= 0:
            del self._nodes[node.block]
            self._unsaved.pop(node.block, None)
            self._left.pop(node.block, None)
            if node.block in self._idle:
                del self._idle[node.block]
                self._free.appendleft(node.block)
            node.block = -1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that no block is lost or shared wrongly, given every live block table. For tests.

        Raises: AssertionError
        """
        held = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, in {held[block]} tables"
        free, idle, owned = set(self._free), set(self._idle), set(held)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & owned or idle & owned), "a block is in two states"
        assert len(free) + len(idle) + len(owned) == self.blocks, (
            f"{len(free)} free + {len(idle)} cached + {len(owned)} owned != {self.blocks}"
        )
        nodes = list(self.cache.nodes())
        assert {node.block: node for node in nodes if node.block >= 0} == self._nodes, "the cache and the pool disagree"
        assert idle <= self._nodes.keys(), "the cache does not know an idle block"
        assert not (free & self._nodes.keys()), "the cache knows a free block"
        assert self._unsaved.keys() == {block for block in idle if self._nodes[block].slot < 0}, "an idle block is saved or not, not both"
        assert all(block in owned and self._nodes[block].slot < 0 for block in self._left), "a block is left and not, or saved"
        for node in nodes:
            assert node.block >= 0 or node.slot >= 0, "a node is nowhere"
            parent = node.parent
            assert parent, "a node without a parent"
            assert node.block < 0 or parent.block >= 0 or not parent.tokens, "a block has outlived the one it follows"
            assert len(parent.tokens) in (0, self.block_size), "something follows a block that is not full"
        if self.tier:
            self.tier.check(nodes)
