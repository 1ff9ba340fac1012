"""LRU cache of embeddings by the content of their image, and the jobs that fill it.

And of audio files, of which an encoder is asked for one part after the other.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from antiphon.service.tenant_slots import TenantSlots
from antiphon.wire.claim import MEDIUM_LOST, AudioWindow, PixelLimits, VideoHeader
from antiphon.wire.errors import Unavailable
from antiphon.wire.ids import DEFAULT_TENANT, TenantId

Pixels = TypeVar("Pixels")

LINGER_S = 3.0
"""How long a medium goes on its way that no call waits for: a call that has taken too long is made
again, and what it waited for would be begun again each time."""
IDLE_S = 120.0
"""How long a file is kept that no part is wanted of: the model writes the text of one meanwhile."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor, Future
    from contextlib import AbstractAsyncContextManager

    import numpy as np
    from numpy.typing import NDArray

    from antiphon.wire.claim import Claim


class DecodeJob(msgspec.Struct, frozen=True):
    """What to decode beside the bytes: a size by the header, 0: unknown, and limits of scale."""

    width: int = 0
    height: int = 0
    limits: PixelLimits | None = None
    video: VideoHeader | None = None
    audio: AudioWindow | None = None


@dataclass(slots=True)
class CachedEmbedding:
    """The embedding of one image: float32, little-endian, row-major, (tokens, hidden).

    Attributes:
        checksum: SHA-256 of `data`.
        part_bytes: Size of its parts, of whole rows; 0: it is not cut.
        part_digests: Those of the parts.
        claim: The last claim for fetching the data.
    """

    data: bytes
    tokens: int
    hidden: int
    checksum: bytes
    part_bytes: int = 0
    part_digests: bytes = b""
    claim: Claim | None = None

    @classmethod
    def of(cls, rows: NDArray[np.float32]) -> CachedEmbedding:
        """That of rows (tokens, hidden)."""
        data = rows.astype("<f4", copy=False).tobytes()
        return cls(data, *rows.shape, checksum=hashlib.sha256(data).digest())


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


class AudioFiles:
    """Files by their SHA-256, up to a number of bytes; those that were kept last stay.

    Who takes a file keeps it again if there is more to come of it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._files: dict[bytes, tuple[bytes | bytearray, asyncio.TimerHandle]] = {}
        self.bytes_held = 0

    def take(self, digest: bytes) -> bytes | bytearray | None:
        if (found := self._files.pop(digest, None)) is None:
            return None
        file, leaving = found
        leaving.cancel()
        self.bytes_held -= len(file)
        return file

    def keep(self, digest: bytes, file: bytes | bytearray) -> None:
        """Keep a file until it is taken, or was not for `IDLE_S`."""
        self.take(digest)
        leaving = asyncio.get_running_loop().call_later(IDLE_S, self.take, digest)
        self._files[digest] = file, leaving
        self.bytes_held += len(file)
        while self.bytes_held > self._bytes_max:
            self.take(next(iter(self._files)))


@dataclass(eq=False, slots=True)
class _EmbedJob:
    """One image on its way to its embedding, and the number of calls that wait for it.

    Attributes:
        tenant: Of the first of these calls: the job has its turns.
        task: Prepares and embeds it.
        work: Its next step in the thread; None while it is prepared, or waits for its turn.
        leaving: Drops it, since no call waits.
        dropped: It ends with the step that runs, unless a call has come.
    """

    result: asyncio.Future[CachedEmbedding]
    tenant: TenantId
    task: asyncio.Task[None] | None = None
    work: Future[CachedEmbedding | None] | None = None
    waiting: int = 0
    leaving: asyncio.TimerHandle | None = None
    dropped: bool = False


@dataclass(eq=False)
class Embedder(Generic[Pixels]):
    """Prepares media, and embeds them in a thread; calls for one medium share a job.

    The last of the `steps` of a medium gives its embedding. Tenants take turns with their steps,
    and a medium that has several, a video, with the others of its tenant.
    """

    steps: Callable[[Pixels], Iterator[CachedEmbedding | None]]
    cache: EmbeddingCache
    thread: Executor
    group: asyncio.TaskGroup
    _jobs: dict[bytes, _EmbedJob] = field(default_factory=dict[bytes, _EmbedJob], init=False)
    # The step that runs, and one of another tenant behind it.
    _turns: TenantSlots = field(default_factory=lambda: TenantSlots(1), init=False)

    async def embed(
        self,
        digest: bytes,
        prepare: Callable[[], AbstractAsyncContextManager[Pixels]],
        tenant: TenantId = DEFAULT_TENANT,
    ) -> CachedEmbedding:
        """Return the embedding of an image whose SHA-256 is `digest`; `prepare` gives its pixels.

        What `prepare` returns is left when they are embedded, or are not needed any more.

        Cancelling a call does not affect other calls for the same image. An image that is prepared
        or queued is dropped when no call has waited for `LINGER_S`; a started step is finished, and
        its embedding, if it was the last one, cached.

        Raises:
            EngineError: Raised by its `steps`, or by the `prepare` of the first of the calls;
                by its own, if the owner of that one is gone.
        """
        while (found := self.cache.get(digest)) is None:
            began = (job := self._jobs.get(digest)) is None
            if job is None:
                job = self._begin(digest, prepare, tenant)
            try:
                return await self._result(digest, job)
            except Unavailable as error:
                # The owner that is gone is that of the first call: this one may have another.
                if began or MEDIUM_LOST not in error.details:
                    raise
        return found

    async def _result(self, digest: bytes, job: _EmbedJob) -> CachedEmbedding:
        """Wait for a job, which is dropped some time after the last call has left it."""
        job.waiting, job.dropped = job.waiting + 1, False
        if job.leaving is not None:
            job.leaving.cancel()
        try:
            return await asyncio.shield(job.result)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.result.done():
                loop = asyncio.get_running_loop()
                job.leaving = loop.call_later(LINGER_S, self._drop, digest, job)

    def _drop(self, digest: bytes, job: _EmbedJob) -> None:
        job.dropped = True
        if not job.result.done() and (job.work is None or job.work.cancel()):
            self._forget(digest, job)
            if job.task is not None:
                job.task.cancel()

    def _begin(
        self,
        digest: bytes,
        prepare: Callable[[], AbstractAsyncContextManager[Pixels]],
        tenant: TenantId,
    ) -> _EmbedJob:
        job = _EmbedJob(asyncio.get_running_loop().create_future(), tenant)
        self._jobs[digest] = job
        job.task = self.group.create_task(self._run(digest, job, prepare), name="embed")
        return job

    async def _run(
        self,
        digest: bytes,
        job: _EmbedJob,
        prepare: Callable[[], AbstractAsyncContextManager[Pixels]],
    ) -> None:
        try:
            async with prepare() as pixels:
                embedding, steps = None, self.steps(pixels)
                while embedding is None:
                    job.work = None
                    async with self._turns.held(job.tenant):
                        job.work = self.thread.submit(next, steps)
                        embedding = await asyncio.wrap_future(job.work)
                    if embedding is None and job.dropped:
                        job.result.cancel()
                        return
                self.cache.put(digest, embedding)
                job.result.set_result(embedding)
        except asyncio.CancelledError:
            job.result.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # it belongs to the calls
            job.result.set_exception(error)
            job.result.exception()  # retrieved, in case no call waits for it any more
        finally:
            self._forget(digest, job)

    def _forget(self, digest: bytes, job: _EmbedJob) -> None:
        if self._jobs.get(digest) is job:
            del self._jobs[digest]
