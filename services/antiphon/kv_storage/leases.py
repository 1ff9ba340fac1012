"""Leases: tokens for fetching pages, with an expiry; leased pages stay in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.kv_storage.memory import MemoryTier, Page
from antiphon.transfer.protocol import new_token

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Lease:
    """Pinned pages by fetch token, in the order of their chain."""

    name: str
    expires_unix_ms: int
    pages: dict[str, Page] = field(default_factory=dict[str, Page])


class Leases:
    """All leases of a node; the source of the blob server, where a token names a leased page."""

    def __init__(self, memory: MemoryTier, unix_ms: Callable[[], int]) -> None:
        self._memory = memory
        self._unix_ms = unix_ms
        self._leases: dict[str, Lease] = {}
        self._pages: dict[str, Page] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, lease_s: float) -> Lease:
        """Begin a lease without pages."""
        lease = Lease(new_token(), self._unix_ms() + int(lease_s * 1000))
        self._leases[lease.name] = lease
        return lease

    def add(self, lease: Lease, page: Page) -> None:
        """Pin a page that is in memory, before loading the next one could evict it."""
        if lease.name not in self._leases:
            return  # it expired while a page was loaded
        self._memory.pin(page.digest)
        token = new_token()
        lease.pages[token] = page
        self._pages[token] = page

    def release(self, name: str) -> None:
        """End a lease. Unknown leases are ignored."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        for token, page in lease.pages.items():
            del self._pages[token]
            self._memory.unpin(page.digest)

    def sweep(self) -> None:
        """End expired leases."""
        now = self._unix_ms()
        for name in [n for n, lease in self._leases.items() if lease.expires_unix_ms < now]:
            self.release(name)

    def get(self, token: str) -> bytes | bytearray | None:
        """Return a leased page's bytes."""
        page = self._pages.get(token)
        return None if page is None else page.data
