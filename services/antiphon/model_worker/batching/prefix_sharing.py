"""Sharing of prefixes that are being prefilled, and checkpoints of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.request import PendingPrefix, Request
from antiphon.wire.digests import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.cache.key import CacheKey
    from antiphon.model_worker.cache.pages import PageTable

WORTH_TOKENS = 32
"""Minimum prefix worth waiting for, or worth a checkpoint. A shorter one is prefilled again."""


@dataclass(kw_only=True)
class PrefixSharing:
    """The prefilling requests, by their first page.

    Without a prefix cache only the choices of one request share: the common prefix is forked from
    the page table of the first one. With a prefix cache it is found there, whichever request
    computed it. A table with recurrent states cannot be forked: what is shared ends at a
    checkpoint, in the prefix cache. A prefill of another namespace, as of other weights, is not
    shared: `key_of` names that of a waiting request.
    """

    page_tokens: int
    key_of: Callable[[Request], CacheKey]
    indexed: bool  # whether there is a prefix cache
    forks: bool  # whether page tables can be forked
    checkpoints: StateCheckpoints | None

    def __post_init__(self) -> None:
        self._leaders: dict[tuple[bytes, bytes], list[Request]] = {}
        self._numbers = count(1)

    def register(self, request: Request) -> None:
        """Let other requests wait for the prefix of one that has started."""
        if request.length > self.page_tokens:
            request.leader_number = next(self._numbers)
            self._leaders.setdefault(self._leader_key(request), []).append(request)

    def unregister(self, request: Request) -> None:
        if request.leader_number:
            request.leader_number = 0
            key = self._leader_key(request)
            self._leaders[key].remove(request)
            if not self._leaders[key]:
                del self._leaders[key]

    def should_wait(self, request: Request, cached_tokens: Callable[[Request], int]) -> bool:
        """Whether a waiting request should wait until another one has prefilled their prefix."""
        if request.following is not None and request.following.computing:
            return True
        key = self.key_of(request)
        first_page = key.token_ids[: self.page_tokens * TOKEN_BYTES]
        if not (leaders := self._leaders.get((key.namespace, first_page))):
            return False
        cached = cached_tokens(request)
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

    def shared_tokens(self, request: Request) -> int:
        """Length of the prefix that `fork` shares: 0 where the leader's window has moved on."""
        following = request.following
        if following is None or not following.ready or not self.forks:
            return 0
        if following.leader.namespace != self.key_of(request).namespace:
            return 0
        return following.table.shareable_tokens(following.tokens)

    def fork(self, request: Request, cached_tokens: int) -> PageTable | None:
        """A table that shares the pending prefix, if it is longer than the cached one."""
        following, tokens = request.following, self.shared_tokens(request)
        if following is None or tokens <= cached_tokens:
            return None
        return following.table.fork(tokens)

    def _leader_key(self, request: Request) -> tuple[bytes, bytes]:
        """Key of requests that may share a prefix: the namespace and the first page's tokens."""
        return request.namespace, request.token_bytes(self.page_tokens)

    def _follow(
        self, request: Request, leader: Request, cached_tokens: int
    ) -> PendingPrefix | None:
        siblings = leader.state.request_id == request.state.request_id
        if not ((siblings and self.forks) or self.indexed):
            return None
        # At least one token is computed by the request itself, to sample the next one from it.
        longest = min(leader.length, request.shared_max, request.length) - 1
        common = _common_length(leader, request, longest) // self.page_tokens * self.page_tokens
        if self.checkpoints is not None:
            common = self.checkpoints.last(common, leader.length)
        worth = self.page_tokens if siblings else max(self.page_tokens, WORTH_TOKENS)
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
