"""The prefix cache: a radix tree over the pages of all cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.cache.eviction import STRATEGIES, Evictor, Strategy
from antiphon.model_worker.cache.groups import HOLE, CacheGroup
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.tree import CacheKey, RadixNode, RadixTree
from antiphon.wire.digests import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.events import BlockTracker
    from antiphon.wire.kv_events import KvEvent


class Prefix(msgspec.Struct, frozen=True, eq=False):
    """The cached prefix of a key. No page is referenced and none was touched.

    Attributes:
        length: Tokens, in whole pages, that every group holds; the same as of a `match`.
        node: The node that holds the last of them; None if there are none.
    """

    length: int
    node: RadixNode | None


class RadixIndex:
    """Finds the pages of a prefix that some request computed before.

    It holds references of its own, so that a page is free when neither a request nor the prefix
    cache holds it; a page without another holder can be evicted. Called from the batching loop.

    A waiting request is looked up by `peek`, which changes nothing. `touch` protects its prefix
    from eviction until it can start. `match` takes references for an attempt to start it, and
    `use` counts a hit once it has started. `insert` adds computed pages.

    Where a window group has lost pages or never had them, a prefix matches only up to an end at
    which all pages that a query attends to are left. With recurrent states it matches only up to a
    checkpoint of each group: a state is cached if a request was at the end of a page when its pages
    were inserted.

    Attributes:
        enabled: If not, nothing is inserted: every request prefills its whole prompt.
        generation: Grows whenever the result of a `peek` may change: with insert, evict and clear.
            While it is unchanged, the lengths of earlier peeks are exact. Their nodes may have been
            split: they are still on the path of the key.
        evicted_tokens: Since start; for a model with only states, the tokens of their pages.
    """

    def __init__(
        self,
        pools: CachePools,
        strategy: Strategy = STRATEGIES["lru"],
        tracker: BlockTracker | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.generation = 0
        self.evicted_tokens = 0
        self._pools = pools
        self._page_tokens = pools.page_tokens
        self._page_bytes = pools.page_tokens * TOKEN_BYTES
        self._only_states = len(pools.states) == len(pools.groups)
        self._strategy = strategy
        self.tracker = tracker
        self._tree = RadixTree(pools, tracker)
        self._evictor = Evictor(pools, self._tree, strategy)
        self._clock = 0
        whole = set(range(len(pools.groups))) - set(pools.sparse)
        self._counted = min(whole or pools.windows or (0,))

    def peek(self, key: CacheKey) -> Prefix:
        """The prefix that `match` would return; takes no reference and marks nothing as used."""
        path, length = self._longest(key)
        holder = next((node for node in path if node.end >= length), None) if length else None
        return Prefix(length * self._page_tokens, holder)

    def touch(self, key: CacheKey) -> None:
        """Mark the cached prefix of a key as recently used, because it will be needed soon."""
        path, length = self._longest(key)
        self._touch([node for node in path if node.start < length])

    def match(self, key: CacheKey) -> PageTable | None:
        """A table with the longest cached prefix that leaves at least one token to compute.

        This marks nothing as used: the first waiting request is matched in each step, and its table
        may be released again. See `use`.
        """
        path, length = self._longest(key)
        if not length:
            return None
        path = self._settle(path, length)
        pages = [_joined(path, group) for group in range(len(self._pools.groups))]
        return PageTable.sharing(self._pools, length * self._page_tokens, pages)

    def use(self, key: CacheKey, tokens: int) -> None:
        """Count a hit: a request has started with `tokens` cached tokens, in whole pages."""
        path, length = self._tree.find(key, tokens // self._page_tokens)
        path = self._settle(path, length)
        self._touch(path)
        for node in path:
            node.hits += 1

    def insert(self, key: CacheKey, table: PageTable) -> None:
        """Insert the full committed pages of a table, also of a request that still runs.

        Where a page for the same tokens is cached already, the table takes that one and releases
        its own: entries of the table change, and `PageTable.revision` grows.

        The inserted prefix ends with the key or with `committed`, whichever is shorter. Nothing is
        inserted of a table that was started before the last `clear`.
        """
        end = min(table.committed // self._page_tokens, len(key.token_ids) // self._page_bytes)
        if not end or table.outdated or not self.enabled:
            return
        if self._only_states and end * self._page_tokens != table.committed:
            return  # without a checkpoint at its end the run of pages would never match
        path, length = self._tree.find(key, end)
        path = self._settle(path, length)
        for node in path:
            if not self._reconcile(node, table):
                return
        if length < end:
            path = self._grow(path, key, table, end)
        self._touch(path)
        if length < end:
            # Only after it was touched, or its rank would be out of date from the start.
            self._evictor.grown(path[-1])

    def insert_pages(self, key: CacheKey, table: PageTable, ready: int) -> None:
        """Insert pages from outside: those of the first `ready` tokens of a key have arrived.

        The table begins with the cached prefix that was found before; it has pages for the rest,
        which may end beyond `ready`, and a launched state where the model has states.
        """
        if not table.outdated:
            table.arrive(ready)
            self.insert(key, table)

    def take_events(self) -> tuple[KvEvent, ...]:
        """Blocks stored and removed since the last call, if events are published."""
        if self.tracker is None:
            return ()
        self._tree.settle()
        return self.tracker.take()

    def evictable(self) -> list[int]:
        return self._pools.loose()

    def evict(self, pages: Sequence[int]) -> int:
        """Evict at least so many pages by group, the least useful first; return how many.

        Fewer only if fewer are evictable. More in other groups: a page evicted from a full group
        takes along the pages of the same tokens in window groups.
        """
        before = self._pools.loose()
        self._evictor.evict([max(0, loose - n) for loose, n in zip(before, pages, strict=True)])
        evicted = [was - now for was, now in zip(before, self._pools.loose(), strict=True)]
        self.generation += any(evicted)
        self.evicted_tokens += evicted[self._counted] * self._page_tokens
        return sum(evicted)

    def clear(self) -> int:
        """Remove everything; return how many pages no request held.

        Pages that requests still hold are never matched again, and free when they are released.
        """
        evicted = sum(self._pools.loose())
        self._tree.clear()
        self._evictor = Evictor(self._pools, self._tree, self._strategy)
        self._pools.cutoffs += 1
        self.generation += 1
        return evicted

    def _longest(self, key: CacheKey) -> tuple[list[RadixNode], int]:
        """The nodes along a key, and the number of their pages that every group holds."""
        tokens = len(key.token_ids) // TOKEN_BYTES
        path, length = self._tree.find(key, (tokens - 1) // self._page_tokens)
        longer = None
        while length != longer:
            longer = length
            for index in self._pools.sparse:
                group = self._pools.groups[index]
                length = _last_whole_end(_joined(path, index), length, group)
        return path, length

    def _settle(self, path: list[RadixNode], length: int) -> list[RadixNode]:
        """Split the last node so that a path ends with page `length`."""
        while path and path[-1].start >= length:
            path.pop()
        if path and path[-1].end > length:
            path[-1] = self._tree.split(path[-1], length)
            self._evictor.grown(path[-1])
        return path

    def _touch(self, path: Sequence[RadixNode]) -> None:
        """Mark a path as used: all of it in a full group, its end in the others."""
        self._clock += 1
        if not path:
            return
        tokens = path[-1].end * self._page_tokens
        for index, group in enumerate(self._pools.groups):
            dead = group.dead_len(tokens)
            for node in path:
                if node.end > dead:
                    node.used[index] = self._clock

    def _reconcile(self, node: RadixNode, table: PageTable) -> bool:
        """Let table and node have the same pages; return whether they do now.

        A table keeps duplicates that a fork of it holds too, and takes the node's pages when the
        fork is gone. Otherwise the fork would hold pages of the tree without the pages before
        them, which would block eviction.
        """
        differences = _differences(node, table)
        pools = self._pools.pools
        for group, _, own, page in differences:
            if page != HOLE and pools[group].holders(own) > 1:
                return False
        for group, index, own, page in differences:
            if page != HOLE:
                table.replace(group, index, page)
                continue
            self._tree.fill(node, group, index - node.start, own)
            self._evictor.grown(node)
            self.generation += 1
        return True

    def _grow(
        self, path: list[RadixNode], key: CacheKey, table: PageTable, end: int
    ) -> list[RadixNode]:
        self.generation += 1
        last = path[-1] if path else self._tree.root(key.namespace)
        if path and not last.children and not last.hits:
            # No other request has used it yet: the same request continues it.
            self._tree.extend(last, key, table, end)
        else:
            last = self._tree.append(last, key, table, end)
            path = [*path, last]
        return path


def _joined(path: Sequence[RadixNode], group: int) -> list[int]:
    pages: list[int] = []
    for node in path:
        pages += node.pages[group]
    return pages


def _differences(node: RadixNode, table: PageTable) -> list[tuple[int, int, int, int]]:
    """Group, entry, and both pages, where table and node have different ones."""
    differences: list[tuple[int, int, int, int]] = []
    for group, pages in enumerate(node.pages):
        begin = max(node.start, table.dead(group))
        own, theirs = table.entries(group, begin, node.end), pages[begin - node.start :]
        if own != theirs:
            pairs = enumerate(zip(own, theirs, strict=True), start=begin)
            differences += [(group, at, mine, page) for at, (mine, page) in pairs if mine != page]
    return differences


def _last_whole_end(pages: Sequence[int], end: int, group: CacheGroup) -> int:
    """The longest prefix in pages, up to `end`, after which a query attends to no hole."""
    seen = group.dead_len(end * group.page_tokens)
    index = end - 1
    while index >= seen:
        if pages[index] == HOLE:
            end = index
            seen = group.dead_len(end * group.page_tokens)
        index -= 1
    return end
