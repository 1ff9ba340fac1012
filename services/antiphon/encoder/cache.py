"""Embeddings by the content of their image, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.claim import Claim


@dataclass(slots=True)
class CachedEmbedding:
    """What a tower says of one image.

    Attributes:
        data: float32, little-endian, row-major, (tokens, hidden).
        checksum: SHA-256 of `data`.
        claim: Under which the data waited last.
    """

    data: bytes
    tokens: int
    hidden: int
    checksum: bytes
    claim: Claim | None = None


class EmbeddingCache:
    """Embeddings up to a number of bytes, by the SHA-256 of the encoded image."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._embeddings: OrderedDict[bytes, CachedEmbedding] = OrderedDict()
        self.bytes_held = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._embeddings)

    def get(self, digest: bytes) -> CachedEmbedding | None:
        """Return an embedding, which is the most recently used one now."""
        embedding = self._embeddings.get(digest)
        if embedding is not None:
            self._embeddings.move_to_end(digest)
        return embedding

    def put(self, digest: bytes, embedding: CachedEmbedding) -> None:
        """Keep an embedding, if it fits at all, in place of the least recently used ones."""
        if len(embedding.data) > self._bytes_max or digest in self._embeddings:
            return
        self._embeddings[digest] = embedding
        self.bytes_held += len(embedding.data)
        while self.bytes_held > self._bytes_max:
            _, oldest = self._embeddings.popitem(last=False)
            self.bytes_held -= len(oldest.data)
            self.evictions += 1
