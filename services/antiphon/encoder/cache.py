"""LRU cache of embeddings by the content of their image, and the jobs that fill it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

Pixels = TypeVar("Pixels")

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from antiphon.wire.claim import Claim


class DecodeJob(msgspec.Struct, frozen=True):
    """An image to decode, and its size by its header; 0 if that is unknown."""

    image: bytes
    width: int = 0
    height: int = 0


@dataclass(slots=True)
class CachedEmbedding:
    """The embedding of one image: float32, little-endian, row-major, (tokens, hidden).

    Attributes:
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
        if (embedding := self._embeddings.get(digest)) is not None:
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


@dataclass(eq=False, slots=True)
class _EmbedJob:
    """One image that is embedded or queued, and the number of calls that wait for it."""

    work: Future[CachedEmbedding]
    result: asyncio.Future[CachedEmbedding]
    waiting: int = 0


@dataclass(eq=False)
class Embedder(Generic[Pixels]):
    """Embeds decoded images in a thread, one by one; concurrent calls for one image share a job."""

    compute: Callable[[Pixels], CachedEmbedding]
    cache: EmbeddingCache
    thread: Executor
    _jobs: dict[bytes, _EmbedJob] = field(default_factory=dict[bytes, _EmbedJob], init=False)

    async def embed(self, digest: bytes, image: Pixels) -> CachedEmbedding:
        """Return the embedding of an image whose SHA-256 is `digest`.

        Cancelling a call does not affect other calls for the same image. A queued image without any
        waiting call is dropped; a started one is finished and cached.

        Raises:
            EngineError: Raised by `compute`.
        """
        if (found := self.cache.get(digest)) is not None:
            return found
        job = self._jobs.get(digest) or self._begin(digest, image)
        job.waiting += 1
        try:
            return await asyncio.shield(job.result)
        finally:
            job.waiting -= 1
            if not job.waiting and job.work.cancel():
                self._forget(digest, job)

    def _begin(self, digest: bytes, image: Pixels) -> _EmbedJob:
        work = self.thread.submit(self.compute, image)
        job = _EmbedJob(work, asyncio.wrap_future(work))
        self._jobs[digest] = job

        def done(result: asyncio.Future[CachedEmbedding]) -> None:
            self._forget(digest, job)
            # `exception()` marks it as retrieved, in case no call waits for it any more.
            if not result.cancelled() and result.exception() is None:
                self.cache.put(digest, result.result())

        job.result.add_done_callback(done)
        return job

    def _forget(self, digest: bytes, job: _EmbedJob) -> None:
        if self._jobs.get(digest) is job:
            del self._jobs[digest]
