"""Eviction from the prefix cache: LRU or LFU, by cache group."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from antiphon.model_worker.cache.pages import CachePools, PagePool
    from antiphon.model_worker.cache.tree import RadixNode, RadixTree

Rank = tuple[int, int]
"""The lowest is evicted first."""


Strategy = Callable[["RadixNode", int], Rank]
"""The rank of a node's pages of a group. It may only grow: the heaps hold old ranks for a while."""


def lru(node: RadixNode, group: int) -> Rank:
    """The least recently used first."""
    return node.used[group], 0


def lfu(node: RadixNode, group: int) -> Rank:
    """The least frequently used first, and among those the least recently used."""
    return node.hits, node.used[group]


STRATEGIES: dict[str, Strategy] = {"lru": lru, "lfu": lfu}
"""By the name of SGLang's `--radix-eviction-policy`."""


class EvictionHeap:
    """The nodes that may have loose pages of one group, lowest rank first.

    Ranks in the heap may be old: a node that was used since is put back when it comes up, so that
    marking a node as used costs nothing. A node without loose pages is not in the heap; its pages
    are watched, and it is put in when one of them is loose.
    """

    def __init__(self, pool: PagePool, group: int, strategy: Strategy) -> None:
        self.pool = pool
        self.group = group
        self._strategy = strategy
        self._heap: list[tuple[Rank, int, RadixNode]] = []
        self._nodes: set[RadixNode] = set()
        self._watched: dict[int, RadixNode] = {}
        self._serial = count()  # nodes have no order of their own

    def put(self, node: RadixNode) -> None:
        if node not in self._nodes:
            self._nodes.add(node)
            heapq.heappush(self._heap, self._entry(node))

    def put_leaf(self, node: RadixNode) -> None:
        """Put a node of a group that loses pages from the end of a path, once its last is loose."""
        last = node.pages[self.group][-1]
        if self.pool.is_loose(last):
            self.put(node)
        else:
            self.watch(node, (last,))

    def first(self) -> RadixNode:
        """The node of the lowest rank."""
        while True:
            assert self._heap, "loose pages were lost"
            rank, _, node = self._heap[0]
            if node not in self._nodes:
                heapq.heappop(self._heap)
            elif rank == self._strategy(node, self.group):
                return node
            else:
                heapq.heapreplace(self._heap, self._entry(node))

    def drop_first(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Remove the `first` node, and watch these pages of it."""
        heapq.heappop(self._heap)
        self._nodes.remove(node)
        self.watch(node, pages)

    def watch(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Put a node once one of these pages is loose; requests hold them now."""
        for page in pages:
            self.pool.watch(page)
            self._watched[page] = node

    def refresh(self) -> None:
        for page in self.pool.take_loosened():
            node = self._watched.pop(page, None)
            if node is not None and node.length:
                self.put(node)

    def remove(self, node: RadixNode) -> None:
        self._nodes.discard(node)
        if len(self._heap) > 2 * len(self._nodes) + 64:
            # Removed entries may never come up, and each keeps a node alive.
            self._heap = [entry for entry in self._heap if entry[2] in self._nodes]
            heapq.heapify(self._heap)

    def _entry(self, node: RadixNode) -> tuple[Rank, int, RadixNode]:
        return self._strategy(node, self.group), next(self._serial), node


class Evictor:
    """Evicts loose pages of a tree.

    Groups that cache all tokens lose their pages together and from the leaves: a request that holds
    a page holds all pages before it, so the loose pages of a path are its last ones, and every
    loose page can be evicted. A window group loses pages anywhere and leaves holes, and so do
    states.
    """

    def __init__(self, pools: CachePools, tree: RadixTree, strategy: Strategy) -> None:
        self._pools = pools
        self._tree = tree
        self._anchors = [i for i in range(len(pools.groups)) if i not in pools.sparse]
        self._leaves = [EvictionHeap(pools.pools[i], i, strategy) for i in self._anchors[:1]]
        self._sparse = [EvictionHeap(pools.pools[i], i, strategy) for i in pools.sparse]

    def grown(self, node: RadixNode) -> None:
        """Note a node that has new pages, or is new, maybe as the first part of a split node."""
        if not node.children:
            for heap in self._leaves:
                heap.put_leaf(node)
        for heap in self._sparse:
            heap.put(node)

    def evict(self, goals: Sequence[int]) -> None:
        """Evict pages until at most so many are loose in each group."""
        for heap in self._leaves:
            self._evict_leaves(heap, goals)
        for heap in self._sparse:
            self._evict_sparse(heap, goals[heap.group])

    def _evict_leaves(self, heap: EvictionHeap, goals: Sequence[int]) -> None:
        heap.refresh()
        excess = max([self._pools.pools[i].loose_count - goals[i] for i in self._anchors])
        while excess > 0:
            node = heap.first()
            pages = () if node.children else node.pages[heap.group]
            if loose := heap.pool.loose_end(pages, excess):
                self._trim(node, loose)
                excess -= loose
            else:
                heap.drop_first(node, pages[-1:])

    def _evict_sparse(self, heap: EvictionHeap, goal: int) -> None:
        heap.refresh()
        while (excess := heap.pool.loose_count - goal) > 0:
            node = heap.first()
            pages = node.pages[heap.group]
            # From the first on: more requests continue from the end of a run than from within.
            listed = [index for index, page in enumerate(pages) if page != HOLE]
            loose = [index for index in listed if heap.pool.is_loose(pages[index])][:excess]
            self._tree.punch(node, heap.group, loose)
            if len(loose) < excess:
                heap.drop_first(node, [page for page in pages if page != HOLE])
            if not self._anchors:
                self._prune(node)

    def _prune(self, node: RadixNode) -> None:
        """Remove ends without a page in any group, which can never match."""
        while node.parent is not None and not node.children:
            empty = 0
            while empty < node.length and all(p[-1 - empty] == HOLE for p in node.pages):
                empty += 1
            parent = node.parent
            self._trim(node, empty)
            if node.length:
                return
            node = parent

    def _trim(self, node: RadixNode, count: int) -> None:
        parent = node.parent
        self._tree.trim(node, count)
        if node.length:
            return
        for heap in (*self._leaves, *self._sparse):
            heap.remove(node)
        if parent is not None and parent.parent is not None and not parent.children:
            for heap in self._leaves:
                heap.put_leaf(parent)
