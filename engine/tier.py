"""Which blocks are kept outside the pool, and in which slot.

Owns: slots, their names and the order in which they are given up. Pure: `offload.py` owns the bytes, `blocks.py` says what is saved and
what comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core import CacheNode
from engine.prefix_cache import PrefixCache


@dataclass(slots=True, frozen=True)
class Record:
    """What a slot holds, as it is written down beside its bytes."""

    slot: int
    id: int  # > 0, the node's
    parent: int  # the id of the node before it; 0: it follows a root
    root: bytes  # the root's name
    tokens: tuple[int, ...]


class Tier:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._used: dict[int, CacheNode] = {}  # by slot, the least recently used first
        self._ids = 0  # given out so far

    @property
    def spare(self) -> bool:
        """A slot is free, or holds what the pool has not."""
        return bool(self._free) or any(node.block < 0 for node in self._used.values())

    def take(self, node: CacheNode) -> CacheNode | None:
        """Give a node a slot and a name; returns the node that had to give its slot up, if one had to. There is at least one slot."""
        victim = None
        if not self._free:
            # What the pool has too is the last to lose its slot: it would have to be saved again.
            oldest = next(iter(self._used.values()))
            victim = next((used for used in self._used.values() if used.block < 0), oldest)
            self.release(victim)
        node.slot = self._free.pop()
        self._used[node.slot] = node
        self.name(node)
        return victim

    def release(self, node: CacheNode) -> None:
        """Free a node's slot."""
        del self._used[node.slot]
        self._free.append(node.slot)
        node.slot = -1

    def touch(self, node: CacheNode) -> None:
        """It was used just now."""
        self._used[node.slot] = self._used.pop(node.slot)

    def name(self, node: CacheNode) -> None:
        """Names for a node and all it follows, so that a record can say what it follows before that has a record of its own."""
        while node.parent and not node.id:
            self._ids += 1
            node.id = self._ids
            node = node.parent

    def restore(self, records: Iterable[Record], cache: PrefixCache) -> int:
        """Take in what an earlier process left; returns how many blocks can be reached again.

        Records that follow one that is not there are of no use. The newest conversation counts as used last, its first block after its
        others.
        """
        followers: dict[int, list[Record]] = {}
        for record in sorted(records, key=lambda record: record.id, reverse=True):
            followers.setdefault(record.parent, []).append(record)
            self._ids = max(self._ids, record.id, record.parent)  # no name is ever given twice
        pending = deque((cache.root_named(record.root), record) for record in followers.get(0, ()))
        restored: list[CacheNode] = []
        while pending:
            parent, record = pending.popleft()
            node = cache.add(parent, record.tokens)[0]
            if node and node.slot < 0:  # else a newer record has the same tokens, or a longer one has these too
                node.slot, node.id = record.slot, record.id
                restored.append(node)
                pending += ((node, follower) for follower in followers.get(record.id, ()))
        self._used = _by_use(node for node in restored if node.parent)  # not made superfluous by one that came after
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in self._used]
        return len(self._used)

    def check(self, nodes: Iterable[CacheNode]) -> None:
        """Raises: AssertionError unless exactly the slots of `nodes` are used, each by one. For tests."""
        held = {node.slot: node for node in nodes if node.slot >= 0}
        assert held == self._used, f"slots {sorted(held.keys() ^ self._used.keys())} are held or used, not both"
        assert sorted([*self._free, *self._used]) == list(range(self.slots)), "a slot is lost or in two states"


def _by_use(nodes: Iterable[CacheNode]) -> dict[int, CacheNode]:
    """By slot, what counts as used least recently first."""
    recent: dict[int, CacheNode] = {}  # the other way round
    for leaf in sorted((node for node in nodes if not node.children), key=lambda node: node.id, reverse=True):
        path = []
        step: CacheNode | None = leaf
        while step and step.slot >= 0 and step.slot not in recent:
            path.append(step)
            step = step.parent
        recent |= {node.slot: node for node in reversed(path)}
    return dict(reversed(recent.items()))
