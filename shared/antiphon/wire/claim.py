"""Payloads that go by claim check: long prompts, embeddings of media, and stored KV pages.

A page is identified by the last digest of its hash chain, so equal digests mean equal prefixes.
A miss is always allowed.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from antiphon.wire.base import Message, Value
from antiphon.wire.bounds import Count, Sha256, ShortText, Signed, UnixMs
from antiphon.wire.codec import ID_BYTES
from antiphon.wire.ids import DEFAULT_TENANT, ModelName, RequestId, TenantId

PARTS_MAX = 4096
"""Maximum parts of one claim."""
Rate = Annotated[float, Meta(ge=0, le=1e6)]
"""Frames a second."""


class Claim(Value):
    """A claim check: bytes to fetch from a TCP address instead of through the broker.

    Attributes:
        address: `host:port` of the process that holds them.
        token: Identifies the bytes there; unguessable.
        digest: SHA-256, or of a stored page BLAKE3; verified by the fetching process.
        expires_unix_ms: After this time the bytes may have been dropped.
        part_bytes: Size of parts that may be fetched alone; the last one may be shorter. 0: there
            are none.
        part_digests: SHA-256 of each part, one behind the other.
    """

    address: ShortText
    token: ShortText
    size_bytes: Count
    digest: Sha256
    expires_unix_ms: UnixMs
    part_bytes: Count = 0
    part_digests: Annotated[bytes, Meta(max_length=PARTS_MAX * 32)] = b""


CLAIMED_BYTES_MIN = 256 * 1024
"""A prompt that takes more of a message goes by claim check; or more than a quarter of the largest
message, if that is less."""


class PromptClaim(Value):
    """Claim check of a prompt: its ids, int32, little-endian, are at its owner until its end."""

    claim: Claim

    def __post_init__(self) -> None:
        if self.claim.size_bytes % ID_BYTES:
            raise ValueError("a prompt has whole ids")

    @property
    def tokens(self) -> int:
        return self.claim.size_bytes // ID_BYTES


class PixelLimits(Value):
    """Between which numbers of pixels a medium is scaled; 0: as the model's preprocessor says.

    Attributes:
        low: Of low detail: no larger than that needs, and not cut into tiles. It changes nothing in
            models that scale all images to one size.
        fps: Of a video, how many frames a second are seen; 0: as the preprocessor says.
        frames: Of a video, how many are seen at most; 0: likewise.
    """

    least: Count = 0
    most: Count = 0
    low: bool = False
    fps: Rate = 0.0
    frames: Count = 0


class VideoHeader(Value):
    """What a video is by its header, beside its size.

    Attributes:
        frames: How many it has.
        fps: How many a second, on average.
        chosen: Its frames were chosen by the client: all are seen.
    """

    frames: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    fps: Annotated[float, Meta(gt=0, le=1e6)]
    chosen: bool = False


AudioFormat = Literal["wav", "flac", "mp3", "ogg", "webm", "mp4"]
"""Formats of audio files, by the names of FFmpeg's demuxers."""


class AudioWindow(Value):
    """A part of an audio file, as long as a model takes at once.

    Attributes:
        start_s: Where it begins.
        seconds: Duration of the whole file, by its header.
    """

    format: AudioFormat
    start_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    seconds: Annotated[float, Meta(gt=0, le=1e9)]


class EncodeImage(Message):
    """Encode one image, given inline (below the size limit) or by claim check; or one video.

    Or a part of an audio file.

    Attributes:
        width: By its header, in pixels, upright; an image of another size is rejected. 0: unknown.
        height: Likewise.
        limits: Of its scaled size, if the request has any.
        video: Set: it is a video, with this header.
        audio: Set: it is an audio file, of which this part is encoded.
        tenant: Tenants take turns at an encoder.
    """

    request_id: RequestId
    model: ModelName
    image: bytes | None = None
    claim: Claim | None = None
    width: Count = 0
    height: Count = 0
    limits: PixelLimits | None = None
    video: VideoHeader | None = None
    audio: AudioWindow | None = None
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None
    traceparent: str | None = None
    tenant: TenantId = DEFAULT_TENANT


MEDIUM_LOST: Final = "medium"
"""Key in the `details` of an encoder's error: the medium was not fetched from its owner."""
MEDIUM_GONE: Final = "gone"
"""The owner has it no longer, or other bytes in its place."""
MEDIUM_UNREACHABLE: Final = "unreachable"
"""The owner was not reached, or was too slow: it may still have it."""


class ImageEmbedding(Message):
    """Claim check of the embeddings: row-major, little-endian, shape (tokens, hidden).

    Attributes:
        tower: The digest of the model that has made them, as in the encoder's heartbeat.
    """

    request_id: RequestId
    content_digest: Sha256
    tokens: Count
    hidden: Count
    dtype: ShortText
    claim: Claim
    cached: bool = False
    tower: ShortText = ""


PAGES_MAX = 65_536
"""Maximum pages of one message."""
Chain = Annotated[tuple[Sha256, ...], Meta(max_length=PAGES_MAX)]


class PageOffer(Value):
    """One page to store. `parent` is the digest before it in the chain; unset for the first."""

    digest: Sha256
    parent: Sha256 | None = None
    claim: Claim


class PutPages(Message):
    """Store pages; the node fetches the bytes of the missing ones."""

    pages: Annotated[tuple[PageOffer, ...], Meta(max_length=PAGES_MAX)]
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None


class PagesStored(Message):
    """The offered pages that the node holds now; it could not store the others."""

    stored: tuple[Sha256, ...]


class LookupPages(Message):
    """Look up the longest stored prefix of this chain."""

    chain: Chain


class PagesFound(Message):
    """Length of the longest stored prefix of the chain, in pages."""

    pages: Count


class GetPages(Message):
    """Lease the stored prefix of a chain; the reply says where to fetch it."""

    request_id: RequestId
    chain: Chain
    lease_s: Annotated[float, Meta(gt=0, le=600)]


class PagesLeased(Message):
    """Claims of the prefix in order; the pages are not evicted before the lease ends."""

    lease: ShortText
    claims: tuple[Claim, ...]


class ReleaseLease(Message):
    """End a lease. Unknown leases are ignored.

    `corrupt` says that its reader has found a page that is not what its checksum says: the node
    verifies those of the lease, and drops what fails.
    """

    lease: ShortText
    corrupt: bool = False


class LeaseReleased(Message):
    """The pages may be evicted again."""
