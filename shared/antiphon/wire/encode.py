"""Gateway and encoder: encode an image; the reply says where to fetch its embeddings."""

from __future__ import annotations

from antiphon.wire.base import Message
from antiphon.wire.bounds import Count, Sha256, ShortText, Signed, UnixMs
from antiphon.wire.claim import Claim
from antiphon.wire.ids import ModelName, RequestId


class EncodeImage(Message):
    """Encode one image, given inline (below the size limit) or by claim check."""

    request_id: RequestId
    model: ModelName
    image: bytes | None = None
    claim: Claim | None = None
    deadline_unix_ms: UnixMs
    left_ms: Signed | None = None
    traceparent: str | None = None


class ImageEmbedding(Message):
    """Claim check of the embeddings: row-major, little-endian, shape (tokens, hidden)."""

    request_id: RequestId
    content_digest: Sha256
    tokens: Count
    hidden: Count
    dtype: ShortText
    claim: Claim
    cached: bool = False
