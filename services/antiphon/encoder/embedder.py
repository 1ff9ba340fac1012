"""Embeds images in a thread; concurrent calls for the same image share one job."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from antiphon.encoder.cache import CachedEmbedding, EmbeddingCache


@dataclass(eq=False, slots=True)
class _EmbedJob:
    """One image that is embedded or queued, and the number of calls that wait for it."""

    work: Future[CachedEmbedding]
    result: asyncio.Future[CachedEmbedding]
    waiting: int = 0


class Embedder:
    """Fills a cache. All calls belong to one event loop.

    Args:
        embed: Blocks; runs in `thread`.
        thread: Runs one job at a time.
    """

    def __init__(
        self,
        embed: Callable[[bytes | bytearray], CachedEmbedding],
        cache: EmbeddingCache,
        thread: Executor,
    ) -> None:
        self._embed = embed
        self._cache = cache
        self._thread = thread
        self._jobs: dict[bytes, _EmbedJob] = {}

    async def embed(self, digest: bytes, image: bytes | bytearray) -> CachedEmbedding:
        """Return the embedding of an image whose SHA-256 is `digest`.

        Cancelling a call does not affect other calls for the same image. A queued image without any
        waiting call is dropped; a started one is finished and cached.

        Raises:
            EngineError: Raised by `embed`.
        """
        found = self._cache.get(digest)
        if found is not None:
            return found
        job = self._jobs.get(digest) or self._begin(digest, image)
        job.waiting += 1
        try:
            return await asyncio.shield(job.result)
        finally:
            job.waiting -= 1
            if not job.waiting and job.work.cancel():
                self._forget(digest, job)

    def _begin(self, digest: bytes, image: bytes | bytearray) -> _EmbedJob:
        work = self._thread.submit(self._embed, image)
        job = _EmbedJob(work, asyncio.wrap_future(work))
        self._jobs[digest] = job

        def done(result: asyncio.Future[CachedEmbedding]) -> None:
            self._forget(digest, job)
            # `exception()` marks it as retrieved, in case no call waits for it any more.
            if not result.cancelled() and result.exception() is None:
                self._cache.put(digest, result.result())

        job.result.add_done_callback(done)
        return job

    def _forget(self, digest: bytes, job: _EmbedJob) -> None:
        if self._jobs.get(digest) is job:
            del self._jobs[digest]
