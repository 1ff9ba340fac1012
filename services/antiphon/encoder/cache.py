"""LRU cache of embeddings by the content of their image."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.claim import Claim


@dataclass(slots=True)
class CachedEmbedding:
    """The embedding of one image.

    Attributes:
        data: float32, little-endian, row-major, (tokens, hidden).
        checksum: SHA-256 of `data`.
        claim: The last claim for fetching the data.
    """

    data: bytes
    tokens: int
    hidden: int
    checksum: bytes
    claim: Claim | None = None


class EmbeddingCache:
    """Embeddings by the SHA-256 of the encoded image, up to a number of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._embeddings: OrderedDict[bytes, CachedEmbedding] = OrderedDict()
        self.bytes_held = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._embeddings)

    def get(self, digest: bytes) -> CachedEmbedding | None:
        """Return an embedding and mark it as the most recently used one."""
        embedding = self._embeddings.get(digest)
        if embedding is not None:
            self._embeddings.move_to_end(digest)
        return embedding

    def put(self, digest: bytes, embedding: CachedEmbedding) -> None:
        """Add an embedding, if it fits at all, and evict the least recently used ones."""
        if len(embedding.data) > self._bytes_max or digest in self._embeddings:
            return
        self._embeddings[digest] = embedding
        self.bytes_held += len(embedding.data)
        while self.bytes_held > self._bytes_max:
            _, oldest = self._embeddings.popitem(last=False)
            self.bytes_held -= len(oldest.data)
            self.evictions += 1
