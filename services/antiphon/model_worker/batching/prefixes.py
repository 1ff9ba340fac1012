"""The prefixes with which requests can start, and checkpoints of recurrent states."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.request import PendingPrefix, Request
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.wire.digests import TOKEN_BYTES
from antiphon.wire.namespaces import PageOrigin, cache_namespace

if TYPE_CHECKING:
    from antiphon.model_worker.batching.state import EngineLimits, RequestState
    from antiphon.model_worker.cache.radix import Prefix, RadixIndex

WORTH_TOKENS = 32
"""Minimum prefix worth waiting for, or worth a checkpoint. A shorter one is prefilled again."""


class Prefixes:
    """The prefixes with which waiting requests can start: cached, or being prefilled by others.

    Without a prefix cache only the choices of one request share: the common prefix is forked from
    the page table of the first one. With a prefix cache it is found there, whichever request
    computed it. A table with recurrent states cannot be forked: what is shared ends at a
    checkpoint, in the prefix cache. A prefill of another namespace, as of other weights, is not
    shared.

    Attributes:
        origin: What the namespaces of the pages that are computed now are made of.
        checkpoints: None without recurrent states or a prefix cache.
    """

    def __init__(
        self, limits: EngineLimits, pools: CachePools, index: RadixIndex, origin: PageOrigin
    ) -> None:
        self.origin = origin
        self.checkpoints: StateCheckpoints | None = None
        if index.enabled and pools.states:
            every, page_tokens = limits.checkpoint_tokens, pools.page_tokens
            assert every % page_tokens == 0, "a checkpoint within a page"
            self.checkpoints = StateCheckpoints(every=every, page_tokens=page_tokens)
        self._pools = pools
        self._index = index
        self._page_tokens = pools.page_tokens
        self._forks = not pools.states  # whether page tables can be forked
        self._leaders: dict[tuple[bytes, bytes], list[Request]] = {}  # by their first page
        self._numbers = count(1)

    def key_of(self, request: Request) -> CacheKey:
        """The cache key of a waiting request, made once for the current weights."""
        if request.cache_key is None or request.cache_key[0] is not self.origin:
            tokens = request.token_bytes(max(1, request.shared_max))
            key = CacheKey(namespace=self.namespace_of(request.state), token_ids=tokens)
            request.cache_key = self.origin, key
        return request.cache_key[1]

    def namespace_of(self, state: RequestState) -> bytes:
        """The namespace of the pages that the current weights compute for a request."""
        return cache_namespace(self.origin, state.page_salt)

    def identify_weights(self, digest: str) -> None:
        """Name the files of the weights in all keys from here on: pages will leave the process."""
        self.origin = msgspec.structs.replace(self.origin, weights=digest)

    def cached(self, request: Request) -> Prefix:
        """The cached prefix of a waiting request; matched again only if the cache has changed."""
        generation = self._index.generation
        if request.prefix is None or request.prefix[0] != generation:
            request.prefix = (generation, self._index.peek(self.key_of(request)))
        return request.prefix[1]

    def tokens(self, request: Request) -> int:
        """Tokens of a waiting request that `table` would hold."""
        return max(self.cached(request).length, self._pending_tokens(request))

    def table(self, request: Request) -> PageTable:
        """A table with the longest cached or shared prefix of a waiting request."""
        cached = self._index.match(self.key_of(request)) or PageTable(self._pools)
        tokens, following = self._pending_tokens(request), request.following
        if following is None or tokens <= cached.committed:
            return cached
        fork = following.table.fork(tokens)
        cached.release()
        return fork

    def register(self, request: Request) -> None:
        """Let other requests wait for the prefix of one that has started."""
        if request.length > self._page_tokens:
            request.leader_number = next(self._numbers)
            self._leaders.setdefault(self._leader_key(request), []).append(request)

    def unregister(self, request: Request) -> None:
        if request.leader_number:
            request.leader_number = 0
            key = self._leader_key(request)
            self._leaders[key].remove(request)
            if not self._leaders[key]:
                del self._leaders[key]

    def should_wait(self, request: Request) -> bool:
        """Whether a waiting request should wait until another one has prefilled their prefix."""
        if request.following is not None and request.following.computing:
            return True
        key = self.key_of(request)
        first_page = key.token_ids[: self._page_tokens * TOKEN_BYTES]
        if not (leaders := self._leaders.get((key.namespace, first_page))):
            return False
        cached = self.cached(request).length
        # A leader that shares too little always will, unless less of the request is cached: a long
        # prompt is compared with each leader once, not in each step in which it is next.
        passed, least = request.passed_leaders
        passed = passed if cached >= least else 0
        for leader in leaders:
            if leader.leader_number <= passed:
                continue
            if (following := self._follow(request, leader, cached)) is not None:
                request.following = following
                return True
        request.passed_leaders = leaders[-1].leader_number, cached
        return False

    def _pending_tokens(self, request: Request) -> int:
        """Length of the prefix that is forked: 0 where the leader's window has moved on."""
        following = request.following
        if following is None or not following.ready or not self._forks:
            return 0
        if following.leader.namespace != self.key_of(request).namespace:
            return 0
        return following.table.shareable_tokens(following.tokens)

    def _leader_key(self, request: Request) -> tuple[bytes, bytes]:
        """Key of requests that may share a prefix: the namespace and the first page's tokens."""
        return request.namespace, request.token_bytes(self._page_tokens)

    def _follow(
        self, request: Request, leader: Request, cached_tokens: int
    ) -> PendingPrefix | None:
        siblings = leader.state.request_id == request.state.request_id
        if not ((siblings and self._forks) or self._index.enabled):
            return None
        # At least one token is computed by the request itself, to sample the next one from it.
        longest = min(leader.length, request.shared_max, request.length) - 1
        common = _common_length(leader, request, longest) // self._page_tokens * self._page_tokens
        if self.checkpoints is not None:
            common = self.checkpoints.last(common, leader.length)
        worth = self._page_tokens if siblings else max(self._page_tokens, WORTH_TOKENS)
        if common - cached_tokens < worth or leader.table is None:
            return None
        following = PendingPrefix(leader, leader.table, common)
        return following if following.computing else None


class StateCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints at multiples of `every` tokens, and at the last page border of a prompt.

    A state belongs to one position only, unlike pages: a prefix matches at a checkpoint and nowhere
    between two of them. Each costs a state's memory, and a prefill chunk that ends there.
    """

    every: int  # tokens; whole pages
    page_tokens: int

    def due(self, tokens: int) -> bool:
        """Whether the state after so many tokens is cached while decoding."""
        return tokens % self.every == 0

    def stop(self, start: int, end: int) -> int:
        """The latest end of a prefill chunk at `start`, of a prompt that ends at `end`."""
        following = (start // self.every + 1) * self.every
        border = self._border(end)
        if following > border > start:
            following = border
        return min(following, end)

    def last(self, agreed: int, end: int) -> int:
        """The last checkpoint within the first `agreed` tokens of a prompt that ends at `end`."""
        border = self._border(end)
        return border if 0 < border <= agreed else agreed // self.every * self.every

    def _border(self, end: int) -> int:
        """The last page border of a prompt; 0 if a checkpoint there is not worth it."""
        border = end // self.page_tokens * self.page_tokens
        return border if border % self.every >= WORTH_TOKENS else 0


def _common_length(a: Request, b: Request, longest: int) -> int:
    if longest <= 0:
        return 0
    different = np.flatnonzero(a.key_ids(longest) != b.key_ids(longest))
    return int(different[0]) if len(different) else longest
