"""KV pages beyond the workers: put, look up the longest prefix, get; bytes go by claim check.

A page is named by the digest that ends its hash chain, so equal digests mean equal prefixes.
A miss is always legal.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Value
from antiphon.wire.bounds import Count, Sha256, ShortText, Signed, UnixMs
from antiphon.wire.claim import Claim
from antiphon.wire.ids import RequestId

PAGES_MAX = 65_536
"""Most pages of one message."""
Chain = Annotated[tuple[Sha256, ...], Meta(max_length=PAGES_MAX)]


class PageOffer(Value):
    """One page to store. `parent` is the digest before it in the chain; unset for the first."""

    digest: Sha256
    parent: Sha256 | None = None
    claim: Claim


class PutPages(Message):
    """Store pages; the node fetches the bytes of those that it lacks."""

    pages: Annotated[tuple[PageOffer, ...], Meta(max_length=PAGES_MAX)]
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None


class PagesStored(Message):
    """Which of the offered pages the node holds now; the others it could not take."""

    stored: tuple[Sha256, ...]


class LookupPages(Message):
    """How much of this chain is held, from its beginning."""

    chain: Chain


class PagesFound(Message):
    """The longest prefix of the chain that is held, counted in pages."""

    pages: Count


class GetPages(Message):
    """Lease the held prefix of a chain and say where to fetch it."""

    request_id: RequestId
    chain: Chain
    lease_s: Annotated[float, Meta(gt=0, le=600)]


class PagesLeased(Message):
    """Claims of the prefix in order; the pages are not dropped before the lease ends."""

    lease: ShortText
    claims: tuple[Claim, ...]


class ReleaseLease(Message):
    """The fetcher is done. An unknown lease is not an error."""

    lease: ShortText


class LeaseReleased(Message):
    """The pages may be dropped again."""
