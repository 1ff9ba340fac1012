"""Batches the texts that arrive while others are encoded, and encodes each batch in a thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class BatchJob(Generic[T, R]):
    """One item and the future of its result."""

    item: T
    result: asyncio.Future[R]


class Batcher(Generic[T, R]):
    """Runs `work` over batches, each in the executor.

    A batch does not wait to fill: it takes the items that are there, and the next batch collects
    while it runs. The number of callers bounds the queue: each waits for its own item.

    Args:
        work: Items in, as many results out, in order; an exception in place of a result is raised
            to that item's caller. An exception raised by `work` itself is a bug, and is raised to
            all callers of that batch; the next batch continues, since one text must not end the
            process.
    """

    def __init__(
        self,
        work: Callable[[Sequence[T]], Sequence[R | Exception]],
        executor: Executor,
        batch_max: int,
    ) -> None:
        self._work = work
        self._executor = executor
        self._batch_max = batch_max
        self._jobs: list[BatchJob[T, R]] = []
        self._arrived = asyncio.Event()

    async def submit(self, item: T) -> R:
        """Return the result of one item. A caller that is cancelled is skipped."""
        job = BatchJob[T, R](item, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._arrived.set()
        return await job.result

    async def run(self) -> None:
        """Process batches until cancelled; several may run concurrently, one per thread."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            jobs = [job for job in self._jobs[: self._batch_max] if not job.result.done()]
            del self._jobs[: self._batch_max]
            if not self._jobs:
                self._arrived.clear()
            if not jobs:
                continue
            try:
                items = [job.item for job in jobs]
                (done,) = await asyncio.gather(
                    loop.run_in_executor(self._executor, self._work, items), return_exceptions=True
                )
            except asyncio.CancelledError:
                for job in jobs:
                    job.result.cancel()
                raise
            results = [done] * len(jobs) if isinstance(done, BaseException) else done
            for job, result in zip(jobs, results, strict=True):
                if job.result.done():
                    continue
                if isinstance(result, BaseException):
                    job.result.set_exception(result)
                else:
                    job.result.set_result(result)
