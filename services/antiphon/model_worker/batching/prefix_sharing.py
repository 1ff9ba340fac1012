"""Requests with the same beginning: one computes it, the others wait for that."""

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
"""What is worth waiting for. A shorter beginning is computed again beside the first one."""


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """Whom a request waits for.

    Attributes:
        leader: Who computes the beginning.
        table: Its pages: should it be retracted and start again, it has other ones.
        tokens: How far they agree, in whole pages.
    """

    leader: Request
    table: PageTable
    tokens: int

    @property
    def ready(self) -> bool:
        """Whether what they share is computed, and its pages are there."""
        return self.leader.table is self.table and self.leader.computed >= self.tokens

    @property
    def computing(self) -> bool:
        """Whether what they share is being computed."""
        leader = self.leader
        return leader.table is self.table and leader.prefilling and leader.computed < self.tokens


class PrefixSharing:
    """The prompts that are being computed, by their first page.

    Without a prefix index only the choices of one request follow each other: what they share is
    forked from the first one's table. With an index it is found there, whoever computed it. A table
    with recurrent states cannot be forked: what is shared ends at a checkpoint, in the index.

    Attributes:
        namespace: What computes pages now. What was begun by another is of no use to anybody else.
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
        """A request has started, and others may follow it."""
        if request.length > self._page_tokens:
            first_page, number = self._first_page(request), next(self._numbers)
            self._led[request.key] = first_page, number
            self._leaders.setdefault(first_page, []).append((number, request))

    def unregister(self, request: Request) -> None:
        """Its prompt is computed, or it runs no more."""
        led = self._led.pop(request.key, None)
        if led is not None:
            first_page, number = led
            leaders = self._leaders[first_page]
            leaders.remove((number, request))
            if not leaders:
                del self._leaders[first_page]

    def should_wait(self, request: Request, cached_tokens: Callable[[Request], int]) -> bool:
        """Whether a waiting request is better started when another one is further.

        Args:
            request: The one that is next.
            cached_tokens: How much of it the index has; looked up only if it matters.
        """
        if request.following is not None and request.following.computing:
            return True
        leaders = self._leaders.get(self._first_page(request))
        if not leaders:
            return False
        cached = cached_tokens(request)
        # Whom it has no use for it never will, unless less of it is cached: a long prompt is
        # compared with each of the others once, not in each step in which it is next.
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
        """How far `fork` takes a request: not at all where the leader's window has moved on."""
        following = request.following
        if following is None or not following.ready or not self._forks:
            return 0
        if following.leader.namespace is not self.namespace:
            return 0
        return following.table.shareable_tokens(following.tokens)

    def fork(self, request: Request, cached_tokens: int) -> PageTable | None:
        """A table that shares what a request has waited for, if it is more than the index has."""
        following, tokens = request.following, self.shared_tokens(request)
        if following is None or tokens <= cached_tokens:
            return None
        return following.table.fork(tokens)

    def _first_page(self, request: Request) -> bytes:
        """What those have in common who may follow each other: salt, and first tokens."""
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
        # At least one token of its own stays to be computed, for the next one follows from that.
        longest = min(leader.length, request.shared_max, request.length) - 1
        agreed = _agreed(leader, request, longest) // self._page_tokens * self._page_tokens
        if self._checkpoints is not None:
            agreed = self._checkpoints.last(agreed, leader.length)
        worth = self._page_tokens if siblings else max(self._page_tokens, WORTH_TOKENS)
        if agreed - cached_tokens < worth or leader.table is None:
            return None
        following = PendingPrefix(leader, leader.table, agreed)
        return following if following.computing else None


def _agreed(a: Request, b: Request, longest: int) -> int:
    """How many of their first tokens are the same, up to `longest`."""
    if longest <= 0:
        return 0
    different = np.flatnonzero(a.ids[:longest] != b.ids[:longest])
    return int(different[0]) if len(different) else longest
