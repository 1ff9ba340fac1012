"""Requests with a common prefix: one prefills it, the others wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.request import ChoiceKey, Request
    from antiphon.model_worker.batching.state_checkpoints import StateCheckpoints
    from antiphon.model_worker.cache.table import PageTable

WORTH_TOKENS = 32
"""Minimum prefix worth waiting for. A shorter one is prefilled again beside the first."""


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """The prefix that a request waits for.

    Attributes:
        leader: The request that prefills the prefix.
        table: The leader's page table: should it be retracted and start again, it has another.
        tokens: Length of the common prefix, in whole pages.
    """

    leader: Request
    table: PageTable
    tokens: int

    @property
    def ready(self) -> bool:
        """Whether the common prefix is computed and its pages still exist."""
        return self.leader.table is self.table and self.leader.computed >= self.tokens

    @property
    def computing(self) -> bool:
        """Whether the common prefix is being prefilled."""
        leader = self.leader
        return leader.table is self.table and leader.prefilling and leader.computed < self.tokens


class PrefixSharing:
    """The prefilling requests, by their first page.

    Without a prefix cache only the choices of one request share: the common prefix is forked from
    the page table of the first one. With a prefix cache it is found there, whichever request
    computed it. A table with recurrent states cannot be forked: what is shared ends at a
    checkpoint, in the prefix cache.

    Attributes:
        namespace: Digest of the current weights. A prefill that other weights began is not shared.
    """

    def __init__(
        self,
        page_tokens: int,
        namespace: bytes,
        *,
        indexed: bool,
        forks: bool = True,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self.namespace = namespace
        self._page_tokens = page_tokens
        self._indexed = indexed
        self._forks = forks
        self._checkpoints = checkpoints
        self._leaders: dict[bytes, list[tuple[int, Request]]] = {}
        self._led: dict[ChoiceKey, tuple[bytes, int]] = {}
        self._numbers = count(1)

    def register(self, request: Request) -> None:
        """Let other requests wait for the prefix of one that has started."""
        if request.length > self._page_tokens:
            first_page, number = self._first_page(request), next(self._numbers)
            self._led[request.key] = first_page, number
            self._leaders.setdefault(first_page, []).append((number, request))

    def unregister(self, request: Request) -> None:
        """Remove a request whose prefill is done, or that runs no more."""
        led = self._led.pop(request.key, None)
        if led is not None:
            first_page, number = led
            leaders = self._leaders[first_page]
            leaders.remove((number, request))
            if not leaders:
                del self._leaders[first_page]

    def should_wait(self, request: Request, cached_tokens: Callable[[Request], int]) -> bool:
        """Whether a waiting request should wait until another one has prefilled their prefix.

        Args:
            request: The next request of the queue.
            cached_tokens: Length of its cached prefix; looked up only if it matters.
        """
        if request.following is not None and request.following.computing:
            return True
        leaders = self._leaders.get(self._first_page(request))
        if not leaders:
            return False
        cached = cached_tokens(request)
        # A leader that shares too little always will, unless less of the request is cached: a long
        # prompt is compared with each leader once, not in each step in which it is next.
        passed, least = request.passed_leaders
        passed = passed if cached >= least else 0
        for number, leader in leaders:
            if number <= passed:
                continue
            following = self._follow(request, leader, cached)
            if following is not None:
                request.following = following
                return True
        request.passed_leaders = leaders[-1][0], cached
        return False

    def shared_tokens(self, request: Request) -> int:
        """Length of the prefix that `fork` shares: 0 where the leader's window has moved on."""
        following = request.following
        if following is None or not following.ready or not self._forks:
            return 0
        if following.leader.namespace is not self.namespace:
            return 0
        return following.table.shareable_tokens(following.tokens)

    def fork(self, request: Request, cached_tokens: int) -> PageTable | None:
        """A table that shares the pending prefix, if it is longer than the cached one."""
        following, tokens = request.following, self.shared_tokens(request)
        if following is None or tokens <= cached_tokens:
            return None
        return following.table.fork(tokens)

    def _first_page(self, request: Request) -> bytes:
        """Key of requests that may share a prefix: salt and first tokens."""
        return request.state.cache_salt + request.token_bytes(self._page_tokens)

    def _follow(
        self, request: Request, leader: Request, cached_tokens: int
    ) -> PendingPrefix | None:
        siblings = leader.state.request_id == request.state.request_id
        if (
            not ((siblings and self._forks) or self._indexed)
            or leader.namespace is not self.namespace
        ):
            return None
        # At least one token is computed by the request itself, to sample the next one from it.
        longest = min(leader.length, request.shared_max, request.length) - 1
        common = _common_length(leader, request, longest) // self._page_tokens * self._page_tokens
        if self._checkpoints is not None:
            common = self._checkpoints.last(common, leader.length)
        worth = self._page_tokens if siblings else max(self._page_tokens, WORTH_TOKENS)
        if common - cached_tokens < worth or leader.table is None:
            return None
        following = PendingPrefix(leader, leader.table, common)
        return following if following.computing else None


def _common_length(a: Request, b: Request, longest: int) -> int:
    """Length of the common prefix, up to `longest`."""
    if longest <= 0:
        return 0
    different = np.flatnonzero(a.ids[:longest] != b.ids[:longest])
    return int(different[0]) if len(different) else longest
