"""Which cached pages are given up first when pages run short."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Protocol

from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.pages import PagePool
    from antiphon.model_worker.cache.table import CachePools
    from antiphon.model_worker.cache.tree import RadixNode, RadixTree

Rank = tuple[int, int]
"""The lowest is given up first."""


class Strategy(Protocol):
    """How useful a node is. Its rank may only grow: the heaps hold old ranks for a while."""

    def rank(self, node: RadixNode, group: int) -> Rank:
        """Say how useful its pages of a group are."""
        ...


class LruStrategy:
    """Gives up what was of use longest ago."""

    def rank(self, node: RadixNode, group: int) -> Rank:
        """By the time of last use."""
        return node.used[group], 0


class LfuStrategy:
    """Gives up what was found least often, and of those what was of use longest ago."""

    def rank(self, node: RadixNode, group: int) -> Rank:
        """By hits, then time."""
        return node.hits, node.used[group]


STRATEGIES: dict[str, Strategy] = {"lru": LruStrategy(), "lfu": LfuStrategy()}
"""By the name of SGLang's `--radix-eviction-policy`."""


class EvictionHeap:
    """The nodes that may have loose pages of one group, least useful first.

    Ranks in the heap may be old: a node that was of use meanwhile is put back when it comes up, so
    that a use costs nothing. A node whose pages are all held is not here; its pages are watched,
    and it comes back when one of them is loose.
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
        """A node has pages that may be loose, now or later."""
        if node not in self._nodes:
            self._nodes.add(node)
            self._push(node)

    def take(self) -> RadixNode | None:
        """Take the least useful node off, if there is one."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if node not in self._nodes:
                continue
            if rank == self._strategy.rank(node, self.group):
                self._nodes.remove(node)
                return node
            self._push(node)
        return None

    def watch(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Put a node back when one of these pages is loose; requests hold them now."""
        for page in pages:
            self.pool.watch(page)
            self._watched[page] = node

    def refresh(self) -> None:
        """Put those back whose pages have become loose."""
        for page in self.pool.take_loosened():
            node = self._watched.pop(page, None)
            if node is not None and node.length:
                self.put(node)

    def remove(self, node: RadixNode) -> None:
        """A node was cut off."""
        self._nodes.discard(node)
        if len(self._heap) > 2 * len(self._nodes) + 64:
            # Nobody may ever take what was removed, and each entry keeps a node alive.
            self._heap = [entry for entry in self._heap if entry[2] in self._nodes]
            heapq.heapify(self._heap)

    def _push(self, node: RadixNode) -> None:
        rank = self._strategy.rank(node, self.group)
        heapq.heappush(self._heap, (rank, next(self._serial), node))


class Evictor:
    """Gives up loose pages of a tree.

    Groups that keep all tokens lose their pages together and from the leaves: whoever holds a page
    holds all before it, so the loose pages of a path are its last ones, and as many can be given
    up as are loose. A window group loses pages anywhere and leaves holes, and so do states.
    """

    def __init__(self, pools: CachePools, tree: RadixTree, strategy: Strategy) -> None:
        self._pools = pools
        self._tree = tree
        self._anchors = [i for i in range(len(pools.groups)) if i not in pools.sparse]
        self._leaves = [EvictionHeap(pools.pools[i], i, strategy) for i in self._anchors[:1]]
        self._sparse = [EvictionHeap(pools.pools[i], i, strategy) for i in pools.sparse]

    def grown(self, node: RadixNode) -> None:
        """A node has new pages, or is new: it may be the first part of what was one before."""
        if not node.children:
            for shelf in self._leaves:
                shelf.put(node)
        for shelf in self._sparse:
            shelf.put(node)

    def evict(self, needs: Sequence[int]) -> int:
        """Give up so many pages a group, as far as that many are loose; return how many in all."""
        before = self._pools.loose()
        goals = [max(0, loose - need) for loose, need in zip(before, needs, strict=True)]
        for shelf in self._leaves:
            self._evict_leaves(shelf, goals)
        for shelf in self._sparse:
            self._evict_sparse(shelf, goals[shelf.group])
        return sum(before) - sum(self._pools.loose())

    def _evict_leaves(self, shelf: EvictionHeap, goals: Sequence[int]) -> None:
        shelf.refresh()
        pools = self._pools.pools
        while (want := max(pools[i].loose_count - goals[i] for i in self._anchors)) > 0:
            node = shelf.take()
            assert node is not None, "loose pages were lost"
            if not node.children:
                self._shorten(shelf, node, want)

    def _shorten(self, shelf: EvictionHeap, node: RadixNode, want: int) -> None:
        """Give up the loose pages at the end of a leaf, at most `want`."""
        pages = node.pages[shelf.group]
        loose = shelf.pool.loose_end(pages, want)
        self._trim(node, loose)
        if not pages:
            return
        if loose == want:
            shelf.put(node)
        else:
            shelf.watch(node, pages[-1:])

    def _evict_sparse(self, shelf: EvictionHeap, goal: int) -> None:
        shelf.refresh()
        while (want := shelf.pool.loose_count - goal) > 0:
            node = shelf.take()
            assert node is not None, "loose pages were lost"
            pages = node.pages[shelf.group]
            # From the first on: requests go on from the end of a run more often than from inside.
            listed = [index for index, page in enumerate(pages) if page != HOLE]
            loose = [index for index in listed if shelf.pool.is_loose(pages[index])][:want]
            self._tree.punch(node, shelf.group, loose)
            if len(loose) == want:
                shelf.put(node)
            else:
                shelf.watch(node, [page for page in pages if page != HOLE])
            if not self._anchors:
                self._prune(node)

    def _prune(self, node: RadixNode) -> None:
        """Cut off ends that have no page in any group: of them nothing will ever be found."""
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
        for shelf in (*self._leaves, *self._sparse):
            shelf.remove(node)
        if parent is not None and parent.parent is not None and not parent.children:
            for shelf in self._leaves:
                shelf.put(parent)
