"""The pages of one request in every cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import PagePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.groups import CacheGroup

HOLE = -1
"""A table entry whose page is gone because nothing reads it any more."""


class CachePools:
    """All cache groups of a worker, each with its pool of pages."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        paged = {group.page_tokens for group in groups if group.kind is not GroupKind.STATE}
        assert groups, "a worker has at least one cache group"
        assert len(paged) <= 1, "groups with different page sizes cannot share a prefix"
        self.page_tokens = next(iter(paged), 1)
        self.groups = tuple(groups)
        self.pools = tuple(PagePool(group.pages_total) for group in groups)

    @property
    def tokens_max(self) -> int:
        """The longest request that fits when it is alone."""
        return min(group.tokens_max for group in self.groups)

    @property
    def pages_total(self) -> int:
        """Pages of the group that has the fewest."""
        return min(group.pages_total for group in self.groups)

    def free(self) -> list[int]:
        """Pages a group that can be given now."""
        return [pool.free_count for pool in self.pools]

    def used(self) -> list[int]:
        """Pages a group that somebody holds."""
        return [pool.used_count for pool in self.pools]

    def launched(self, step: int) -> None:
        """A plan is about to run; see `PagePool.launched`."""
        for pool in self.pools:
            pool.launched(step)

    def finished(self, step: int) -> None:
        """A plan has run; see `PagePool.finished`."""
        for pool in self.pools:
            pool.finished(step)


class PageTable:
    """The pages of one request (strictly: of one choice).

    Tokens below `committed` are computed and never written again; those up to `reserved` have
    pages and may be written by the next pass. Only whole committed pages are ever shared, so what
    is shared is never written and no pass has to copy a page first.
    """

    def __init__(self, pools: CachePools) -> None:
        self._pools = pools
        self._pages: list[list[int]] = [[] for _ in pools.groups]
        self._dead = [0] * len(pools.groups)  # leading entries that are holes
        self.committed = 0
        self.reserved = 0

    def pages(self, group: int) -> list[int]:
        """The table of one group; entry i holds tokens from `i * page_tokens` on."""
        return self._pages[group]

    def need(self, tokens: int) -> list[int]:
        """Pages a group that `allocate(tokens)` would take."""
        return [
            max(0, group.table_len(tokens) - len(pages))
            for group, pages in zip(self._pools.groups, self._pages, strict=True)
        ]

    def allocate(self, tokens: int) -> None:
        """Have pages for `tokens` tokens in all. The caller has looked at what is free."""
        needs = self.need(tokens)
        for pool, pages, count in zip(self._pools.pools, self._pages, needs, strict=True):
            pages.extend(pool.allocate(count))
        self.reserved = max(self.reserved, self._page_end(tokens))

    def commit(self, tokens: int) -> None:
        """The first `tokens` tokens are computed. A window group lets go of what it left behind."""
        assert self.committed <= tokens <= self.reserved, "committed tokens have no pages"
        self.committed = tokens
        for index, group in enumerate(self._pools.groups):
            pages, dead = self._pages[index], group.dead_len(tokens)
            gone = pages[self._dead[index] : dead]
            if gone:
                self._pools.pools[index].release(gone)
                pages[self._dead[index] : dead] = [HOLE] * len(gone)
                self._dead[index] = dead

    def truncate(self, tokens: int) -> None:
        """Give back the pages beyond `tokens` tokens, as after a rejected draft."""
        assert self.committed <= tokens <= self.reserved, "committed tokens stay"
        for index, group in enumerate(self._pools.groups):
            keep = group.table_len(tokens)
            self._pools.pools[index].release(self._pages[index][keep:])
            del self._pages[index][keep:]
        self.reserved = self._page_end(tokens)

    def fork(self) -> PageTable:
        """A second table that shares the whole committed pages of this one.

        The fork computes the tokens of the last, partial page again: at most a page less one
        token, which is cheaper than a copy inside the step.
        """
        other = PageTable(self._pools)
        shared_tokens = self._shareable_tokens()
        for index, group in enumerate(self._pools.groups):
            pages = self._pages[index][: group.table_len(shared_tokens)]
            other._pages[index] = pages
            other._dead[index] = min(self._dead[index], len(pages))
            self._pools.pools[index].share(pages[other._dead[index] :])
        other.committed = other.reserved = shared_tokens
        return other

    def release(self) -> None:
        """Give everything back. The table is empty then and may be used again."""
        for index, pool in enumerate(self._pools.pools):
            pool.release(self._pages[index][self._dead[index] :])
            self._pages[index] = []
            self._dead[index] = 0
        self.committed = self.reserved = 0

    def _shareable_tokens(self) -> int:
        """The longest prefix that a fork can go on from.

        None of a state, for it is written anew at every token.
        """
        if any(group.kind is GroupKind.STATE for group in self._pools.groups):
            return 0
        return self.committed // self._pools.page_tokens * self._pools.page_tokens

    def _page_end(self, tokens: int) -> int:
        """The end of the page that the last of so many tokens lies in."""
        return -(-tokens // self._pools.page_tokens) * self._pools.page_tokens
