"""KV pages beyond the workers: put, look up the longest prefix, get; bytes go by claim check.

A page is named by the digest that ends its hash chain, so equal digests mean equal prefixes.
A miss is always legal.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Value
from antiphon.wire.claim import Claim
from antiphon.wire.ids import RequestId

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class PageOffer(Value):
    """One page to store. `parent` is the digest before it in the chain; unset for the first."""

    digest: Digest
    parent: Digest | None = None
    claim: Claim


class PutPages(Message):
    """Store pages; the node fetches the bytes of those that it lacks."""

    pages: tuple[PageOffer, ...]
    deadline_unix_ms: int
    left_ms: int | None = None


class PagesStored(Message):
    """Which of the offered pages the node holds now; the others it could not take."""

    stored: tuple[Digest, ...]


class LookupPages(Message):
    """How much of this chain is held, from its beginning."""

    chain: tuple[Digest, ...]


class PagesFound(Message):
    """The longest prefix of the chain that is held, counted in pages."""

    pages: int


class GetPages(Message):
    """Lease the held prefix of a chain and say where to fetch it."""

    request_id: RequestId
    chain: tuple[Digest, ...]
    lease_s: Annotated[float, Meta(gt=0, le=600)]


class PagesLeased(Message):
    """Claims of the prefix in order; the pages are not dropped before the lease ends."""

    lease: str
    claims: tuple[Claim, ...]


class ReleaseLease(Message):
    """The fetcher is done. An unknown lease is not an error."""

    lease: str


class LeaseReleased(Message):
    """The pages may be dropped again."""
