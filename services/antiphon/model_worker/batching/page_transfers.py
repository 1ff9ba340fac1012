"""Pages in flight: blocks that are copied to a page store, and blocks that are fetched from it.

The batching loop decides, and owns the pages; a `BlockStore` copies them in threads of its own and
reports by the mailbox. Until it has reported, a transfer holds its pages, whatever has become of
the request: that is the fence that keeps them from being evicted, freed or used.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Protocol

import msgspec

from antiphon.model_worker.batching.request import Request
from antiphon.model_worker.cache.codec import BlockPages
from antiphon.model_worker.cache.groups import HOLE
from antiphon.model_worker.cache.pages import PageTable
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.wire.digests import BLOCK_TOKENS, TOKEN_BYTES, block_digests, split_digests
from antiphon.wire.namespaces import announced_root

if TYPE_CHECKING:
    from antiphon.model_worker.cache.pages import CachePools
    from antiphon.model_worker.cache.radix import RadixIndex

FETCH_TOKENS = 256
"""Fewer missing tokens are computed: a fetch costs round trips that a short prefill does not."""


class BlockTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one chain, to be copied from or to these pages.

    Attributes:
        number: Of this transfer; each has another one.
        digests: Of the chain up to the last block, from the first one on.
        first: Number of the first block to copy.
        blocks: The pages of each of these.
        timeout_s: How long a request waits for them, if one does.
    """

    number: int
    namespace: bytes
    digests: tuple[bytes, ...]
    first: int
    blocks: tuple[BlockPages, ...]
    timeout_s: float = 0.0


class TransferDone(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer has ended: its pages are neither read nor written any more.

    Attributes:
        number: That of the transfer.
        blocks: How many of its blocks a request can continue from; 0 for one to the store.
    """

    number: int
    blocks: int = 0


class BlockStore(Protocol):
    """Blocks outside the worker. Each call returns at once, and is answered by a `TransferDone`."""

    @property
    def available(self) -> bool:
        """Whether a fetch may find anything."""
        ...

    def save(self, transfer: BlockTransfer) -> None: ...

    def fetch(self, transfer: BlockTransfer) -> None: ...


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of transfers.

    Attributes:
        save_bytes_max: Bytes of blocks that wait to be saved.
        fetch_timeout_s: How long a request waits for a fetch.
        fetch_tokens: Missing tokens from which on they are fetched.
    """

    save_bytes_max: int
    fetch_timeout_s: float
    fetch_tokens: int = FETCH_TOKENS


class _Fetch(msgspec.Struct, kw_only=True, eq=False):
    """Blocks on their way into a page table of their own."""

    key: CacheKey
    table: PageTable
    first: int
    due: float
    claim: tuple[bytes, bytes]
    pages: list[int]
    waiting: list[Request]


class _Save(msgspec.Struct, frozen=True, eq=False):
    pages: list[list[int]]  # by group
    size: int  # bytes


class PageTransfers:
    """The transfers of one engine core, and the requests in phase FETCHING that wait for them.

    Attributes:
        pages: By group, how many pages transfers hold.
    """

    def __init__(
        self, pools: CachePools, index: RadixIndex, store: BlockStore, limits: TransferLimits
    ) -> None:
        self.pages = [0] * len(pools.groups)
        self._pools = pools
        self._index = index
        self._store = store
        self._limits = limits
        self._numbers = count(1)
        self._fetches: dict[int, _Fetch] = {}
        self._claims: dict[tuple[bytes, bytes], int] = {}
        self._saves: dict[int, _Save] = {}
        self._save_bytes = 0
        self._block_pages = BLOCK_TOKENS // pools.page_tokens

    def __bool__(self) -> bool:
        return bool(self._fetches or self._saves)

    @property
    def next_due(self) -> float | None:
        """When the next request stops waiting for its blocks; None if none waits."""
        return min((each.due for each in self._fetches.values() if each.waiting), default=None)

    # To the store.

    def save(self, request: Request, key: CacheKey, table: PageTable) -> None:
        """Copy the full blocks of a key that its request has not copied yet.

        Nothing is copied while too many bytes wait: the next call of the request has the rest.
        """
        end = min(len(key.token_ids) // TOKEN_BYTES, table.committed) // BLOCK_TOKENS
        first = len(request.saved_blocks)
        if first >= end or table.outdated or not self._store.available:
            return
        blocks = tuple(self._entries(table, number) for number in range(first, end))
        pages = [
            [page for block in blocks for page in block[group] if page != HOLE]
            for group in range(len(self._pools.groups))
        ]
        sizes = zip(pages, self._pools.groups, strict=True)
        size = sum(len(each) * group.page_bytes for each, group in sizes)
        for group in set(range(len(pages))) - set(self._pools.sparse):
            # As any holder: of full groups the prefix cache evicts pages from the end of a path,
            # and a path whose end is held would block it.
            pages[group] = table.entries(group, 0, end * self._block_pages)
        if self._save_bytes + size > self._limits.save_bytes_max:
            return
        root = request.saved_blocks[-1] if first else announced_root(key.namespace)
        step = BLOCK_TOKENS * TOKEN_BYTES
        request.saved_blocks += split_digests(
            block_digests(root, key.token_ids[first * step : end * step])
        )
        number = next(self._numbers)
        for group, pool in enumerate(self._pools.pools):
            pool.share(pages[group])
            self.pages[group] += len(pages[group])
        self._saves[number] = _Save(pages, size)
        self._save_bytes += size
        self._store.save(
            BlockTransfer(
                number=number,
                namespace=key.namespace,
                digests=tuple(request.saved_blocks),
                first=first,
                blocks=blocks,
            )
        )

    # From the store.

    def worth(self, request: Request, cached_tokens: int) -> bool:
        """Whether so much of a waiting request is missing that a fetch may pay."""
        if request.fetched or not self._store.available:
            return False
        return _last_block(request) * BLOCK_TOKENS - cached_tokens >= self._limits.fetch_tokens

    def joined(self, request: Request, key: CacheKey, cached_tokens: int) -> bool:
        """Let a request wait for a fetch of the block that it misses first, if there is one."""
        number = self._claims.get(_claim(key, cached_tokens // BLOCK_TOKENS))
        if number is None:
            return False
        fetch = self._fetches[number]
        fetch.waiting.append(request)
        request.fetching = number
        return True

    def fetch_end(self, request: Request) -> int:
        """Up to which token the blocks of a request would be fetched."""
        return _last_block(request) * BLOCK_TOKENS

    def fetch(self, request: Request, key: CacheKey, table: PageTable, now: float) -> None:
        """Fetch the blocks that a table has pages for, but no content; the table is given away."""
        first, end = table.committed // BLOCK_TOKENS, _last_block(request)
        states: dict[int, int] = {}
        for group, chains in table.chains.items():
            ((_, place),) = chains.launch(slice(0, 1)).tolist()
            states[group] = place
        blocks = tuple(self._wanted(table, number, states) for number in range(first, end))
        claim, number = _claim(key, first), next(self._numbers)
        timeout_s = self._limits.fetch_timeout_s
        fetch = _Fetch(
            key=key,
            table=table,
            first=first,
            due=now + timeout_s,
            claim=claim,
            pages=[table.held(group) for group in range(len(self.pages))],
            waiting=[request],
        )
        self._fetches[number] = fetch
        self._claims[claim] = number
        for group, held in enumerate(fetch.pages):
            self.pages[group] += held
        request.fetching, request.fetched = number, True
        ids = key.token_ids[: end * BLOCK_TOKENS * TOKEN_BYTES]
        digests = tuple(split_digests(block_digests(announced_root(key.namespace), ids)))
        self._store.fetch(
            BlockTransfer(
                number=number,
                namespace=key.namespace,
                digests=digests,
                first=first,
                blocks=blocks,
                timeout_s=timeout_s,
            )
        )

    def expire(self, now: float) -> None:
        """Let requests start whose blocks are late. The pages stay in flight until they arrive."""
        for fetch in self._fetches.values():
            if fetch.waiting and fetch.due <= now:
                self._resume(fetch)

    def land(self, done: TransferDone) -> None:
        """End a transfer: what has arrived is found in the prefix cache from here on.

        A transfer that has ended already, or never was, is ignored.
        """
        if (save := self._saves.pop(done.number, None)) is not None:
            self._save_bytes -= save.size
            for group, pool in enumerate(self._pools.pools):
                pool.release(save.pages[group])
                self.pages[group] -= len(save.pages[group])
        if (fetch := self._fetches.pop(done.number, None)) is None:
            return
        del self._claims[fetch.claim]
        for group, held in enumerate(fetch.pages):
            self.pages[group] -= held
        if done.blocks:
            ready = (fetch.first + done.blocks) * BLOCK_TOKENS
            self._index.insert_pages(fetch.key, fetch.table, ready)
        fetch.table.release()
        self._resume(fetch)

    def _resume(self, fetch: _Fetch) -> None:
        for request in fetch.waiting:
            request.fetching = 0
        fetch.waiting = []

    def _entries(self, table: PageTable, number: int) -> BlockPages:
        begin = number * self._block_pages
        groups = range(len(self._pools.groups))
        return tuple(tuple(table.entries(g, begin, begin + self._block_pages)) for g in groups)

    def _wanted(self, table: PageTable, number: int, states: dict[int, int]) -> BlockPages:
        """The pages of a block that are to be filled: holes where the prefix cache has them.

        A state has one place, whichever block it arrives with: the last one counts.
        """
        begin = number * self._block_pages
        cached = max(0, table.committed // self._pools.page_tokens - begin)
        wanted: list[tuple[int, ...]] = []
        for group, pages in enumerate(self._entries(table, number)):
            if group in states:
                wanted.append((*[HOLE] * (self._block_pages - 1), states[group]))
            else:
                wanted.append((*[HOLE] * cached, *pages[cached:]))
        return tuple(wanted)


def _last_block(request: Request) -> int:
    """Full blocks that a request can take: one token is left for it to compute."""
    return (min(request.shared_max, request.length) - 1) // BLOCK_TOKENS


def _claim(key: CacheKey, block: int) -> tuple[bytes, bytes]:
    return key.namespace, key.token_ids[: (block + 1) * BLOCK_TOKENS * TOKEN_BYTES]
