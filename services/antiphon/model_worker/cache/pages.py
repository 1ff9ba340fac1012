"""Page tables: the pages and states of one request in every cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import HOLE, CacheGroup, GroupKind
from antiphon.model_worker.cache.pool import PagePool
from antiphon.model_worker.cache.states import StateChains

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CachePools:
    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        sizes = {group.page_tokens for group in groups}
        assert groups, "a worker has at least one cache group"
        assert len(sizes) == 1, "groups with different page sizes cannot share a prefix"
        self.page_tokens = sizes.pop()
        self.groups = tuple(groups)
        self.pools = tuple(PagePool(group.pages_total) for group in groups)
        self.windows = tuple(index for index, group in enumerate(groups) if group.window)
        """The groups that have a window, by index."""
        self.states = tuple(
            index for index, group in enumerate(groups) if group.kind is GroupKind.STATE
        )
        """The groups of recurrent states, by index."""
        self.sparse = self.windows + self.states
        """The groups that need not have a page for each page of the others, by index."""
        self.paged = tuple(index for index in range(len(groups)) if index not in self.states)
        """The groups without recurrent states, by index."""
        self.measured = self.paged or self.states
        """The groups by whose pages capacity is measured, by index."""
        self.cutoffs = 0
        """How often the prefix cache was cleared: pages from before are not inserted any more."""

    @property
    def tokens_max(self) -> int:
        return min(group.tokens_max for group in self.groups)

    @property
    def pages_total(self) -> int:
        """Pages of the smallest group, states aside."""
        return min(self.groups[index].pages_total for index in self.measured)

    def free(self) -> list[int]:
        return [pool.free_count for pool in self.pools]

    def used(self) -> list[int]:
        return [pool.used_count for pool in self.pools]

    def loose(self) -> list[int]:
        return [pool.loose_count for pool in self.pools]

    def launched(self, step: int) -> None:
        """See `PagePool.launched`."""
        for pool in self.pools:
            pool.launched(step)

    def finished(self, step: int) -> None:
        """See `PagePool.finished`."""
        for pool in self.pools:
            pool.finished(step)


class PageTable:
    """The pages of one request (strictly: of one choice).

    Tokens below `committed` are computed and never written again; those up to `reserved` have
    pages and may be written by the next step. Only full committed pages are ever shared, so shared
    pages are never written and no step has to copy a page first. Recurrent states follow the same
    rule by a chain, see `StateChains`: one of its own, or while it runs that of its slot.
    """

    def __init__(self, pools: CachePools) -> None:
        self._pools = pools
        self._pages: list[list[int]] = [[] for _ in pools.groups]
        self._dead = [0] * len(pools.groups)  # leading entries that are holes
        self.chains: Mapping[int, StateChains] = {}
        """The states, by group, at `slot`; most models have none."""
        self.slot = 0
        self._own_chains()
        self._cutoffs = pools.cutoffs
        self.committed = 0
        self.reserved = 0
        self.revision = 0
        """Grows when existing entries change or are removed, but for what `commit` returns."""

    @classmethod
    def sharing(cls, pools: CachePools, tokens: int, pages: Sequence[list[int]]) -> PageTable:
        """A table with a shared prefix of `tokens` tokens, which ends at a page border.

        `pages` are the entries by group. The new table adds a reference to those that a query at
        `tokens` attends to; the others become holes.
        """
        table = cls(pools)
        for index, group in enumerate(pools.groups):
            dead = group.dead_len(tokens)
            live = pages[index][dead:]
            pools.pools[index].share(live)
            if index not in table.chains:
                table._pages[index] = [HOLE] * dead + live
                table._dead[index] = dead
            elif live:
                table.chains[index].start(table.slot, live[-1])
        table.committed = table.reserved = tokens
        return table

    def run(self, chains: Mapping[int, StateChains], slot: int) -> None:
        """Keep the states in these chains at a slot, from here to `release`."""
        for group, own in self.chains.items():
            chains[group].take(slot, own)
        self.chains, self.slot = chains, slot

    def _own_chains(self) -> None:
        pools = self._pools
        self.chains = {index: StateChains(pools.pools[index]) for index in pools.states}
        self.slot = 0

    @property
    def outdated(self) -> bool:
        """Whether the prefix cache was cleared after its start: its pages are not inserted."""
        return self._cutoffs != self._pools.cutoffs

    def pages(self, group: int) -> list[int]:
        """The table of one group; entry i holds tokens from `i * page_tokens` on.

        For a state group: the states that it holds, the current one first.
        """
        if group in self.chains:
            return self.chains[group].states(self.slot)
        return self._pages[group]

    def entries(self, group: int, begin: int, end: int) -> list[int]:
        """The entries of a group from page `begin` to `end`, as the prefix cache lists them.

        For a state group: holes, and the current state where it is at the end of a page.
        """
        if group not in self.chains:
            return self._pages[group][begin:end]
        listed = [HOLE] * (end - begin)
        full, partial = divmod(self.committed, self._pools.page_tokens)
        if not partial and begin < full <= end:
            listed[full - 1 - begin] = self.chains[group].pages.item(0, self.slot)
        return listed

    def dead(self, group: int) -> int:
        """Leading `entries` of a group that are holes."""
        if group not in self.chains:
            return self._dead[group]
        return -(-self.committed // self._pools.page_tokens) - 1

    def held(self, group: int) -> int:
        """Number of pages of a group that it holds: `pages` without the leading holes."""
        if group in self.chains:
            return self.chains[group].held.item(self.slot)
        return len(self._pages[group]) - self._dead[group]

    def covers(self, tokens: int, states: int = 1) -> bool:
        """Whether the pages suffice for a row up to token `tokens` that writes so many states."""
        if tokens > self.reserved:
            return False
        return not any(chains.need(self.slot, states) for chains in self.chains.values())

    def need(self, tokens: int, states: int = 1) -> list[int]:
        """Pages by group that `allocate` would take."""
        return [
            self.chains[index].need(self.slot, states)
            if index in self.chains
            else max(0, group.table_len(tokens) - len(self._pages[index]))
            for index, group in enumerate(self._pools.groups)
        ]

    def allocate(self, tokens: int, states: int = 1) -> None:
        """Allocate pages for a row up to `tokens`. The caller has checked that they are free."""
        for index, count in enumerate(self.need(tokens, states)):
            if index in self.chains:
                self.chains[index].allocate(self.slot, states)
            else:
                self._pages[index] += self._pools.pools[index].allocate(count)
        page_tokens = self._pools.page_tokens
        self.reserved = max(self.reserved, -(-tokens // page_tokens) * page_tokens)

    def append(self, group: int, page: int) -> None:
        """Take a page for the next tokens, in a group without states. All must take one."""
        self._pages[group].append(page)
        self.reserved = len(self._pages[group]) * self._pools.page_tokens

    def commit(self, tokens: int) -> Sequence[tuple[int, int, int]]:
        """Mark the first `tokens` tokens as computed. Window groups release what they leave behind.

        Returns which entries are holes from here on: group, begin and end. States are committed by
        themselves, see `StateChains.commit`.
        """
        assert self.committed <= tokens <= self.reserved, "committed tokens have no pages"
        self.committed = tokens
        if not self._pools.windows:
            return ()
        left: list[tuple[int, int, int]] = []
        for index in self._pools.windows:
            begin, end = self._dead[index], self._pools.groups[index].dead_len(tokens)
            if begin < end:
                pages = self._pages[index]
                self._pools.pools[index].release(pages[begin:end])
                pages[begin:end] = [HOLE] * (end - begin)
                self._dead[index] = end
                left.append((index, begin, end))
        return left

    def arrive(self, tokens: int) -> None:
        """Commit tokens whose pages were filled from outside, and the state after them.

        For a table that does not run; its next state was launched.
        """
        for chains in self.chains.values():
            chains.commit(slice(0, 1))
        self.commit(tokens)

    def truncate(self, tokens: int) -> None:
        """Release the pages beyond `tokens` tokens, which are those of rejected drafts."""
        assert tokens >= self.committed, "committed tokens were truncated"
        for index, group in enumerate(self._pools.groups):
            length = group.table_len(tokens)
            if index not in self.chains and length < len(self._pages[index]):
                self._pools.pools[index].release(self._pages[index][length:])
                del self._pages[index][length:]
                self.revision += 1
        page_tokens = self._pools.page_tokens
        self.reserved = min(self.reserved, -(-tokens // page_tokens) * page_tokens)

    def replace(self, group: int, index: int, page: int) -> None:
        """Replace the page of an entry by one with the same content, and release the old one."""
        if group in self.chains:
            self.chains[group].replace(self.slot, page)
            return
        pool, pages = self._pools.pools[group], self._pages[group]
        pool.share((page,))
        pool.release((pages[index],))
        pages[index] = page
        self.revision += 1

    def shareable_tokens(self, tokens: int) -> int:
        """The longest prefix, up to `tokens`, that a fork can share.

        0 where a window group has released pages that a query there attends to, and with states:
        the current one belongs to all committed tokens, and only the prefix cache has others.
        """
        groups = self._pools.groups
        if self.chains:
            return 0
        whole = min(tokens, self.committed) // self._pools.page_tokens * self._pools.page_tokens
        if any(self._dead[index] > groups[index].dead_len(whole) for index in self._pools.windows):
            return 0
        return whole

    def fork(self, tokens: int | None = None) -> PageTable:
        """A second table that shares `shareable_tokens` of this one, at most `tokens`.

        The fork prefills the tokens of the last, partial page again: at most a page less one
        token, which is cheaper than a copy within the step.
        """
        tokens = self.shareable_tokens(self.committed if tokens is None else tokens)
        lengths = [group.table_len(tokens) for group in self._pools.groups]
        pages = [pages[:length] for pages, length in zip(self._pages, lengths, strict=True)]
        other: PageTable = PageTable.sharing(self._pools, tokens, pages)
        other._cutoffs = self._cutoffs
        return other

    def release(self) -> None:
        """Release all pages. The table is empty then and may be used again."""
        for index, pool in enumerate(self._pools.pools):
            pool.release(self._pages[index][self._dead[index] :])
            self._pages[index] = []
            self._dead[index] = 0
        for chains in self.chains.values():
            chains.release(self.slot)
        if self.chains:  # those of a slot are another table's from here on
            self._own_chains()
        self._cutoffs = self._pools.cutoffs
        self.committed = self.reserved = 0
        self.revision += 1
