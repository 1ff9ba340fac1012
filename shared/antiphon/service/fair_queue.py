"""Quotas and fair queuing of heavy jobs of several owners."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from antiphon.wire.errors import Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_RETRY_S = 1.0


class OwnerQuota:
    """Bounds the waiting and running jobs of each owner, by count and by bytes.

    The first job of an owner is admitted whatever its size. So no owner is rejected because of
    another's jobs, as long as there are fewer than `owners_max`.
    """

    def __init__(self, *, jobs_max: int, bytes_max: int, owners_max: int) -> None:
        self._jobs_max = jobs_max
        self._bytes_max = bytes_max
        self._owners_max = owners_max
        self._held: dict[str, tuple[int, int]] = {}

    @contextmanager
    def admit(self, owner: str, size_bytes: int) -> Generator[Callable[[int], None]]:
        """Count a job of an owner until the block ends; yields a function that adds bytes to it."""
        jobs, held_bytes = self._held.get(owner, (0, 0))
        self._check_jobs(jobs)
        if jobs:
            self._check_bytes(held_bytes + size_bytes)
        self._held[owner] = (jobs + 1, held_bytes + size_bytes)

        def add(more_bytes: int) -> None:
            nonlocal size_bytes
            jobs, held_bytes = self._held[owner]
            if jobs > 1:
                self._check_bytes(held_bytes + more_bytes)
            self._held[owner] = (jobs, held_bytes + more_bytes)
            size_bytes += more_bytes

        try:
            yield add
        finally:
            jobs, held_bytes = self._held.pop(owner)
            if jobs > 1:
                self._held[owner] = (jobs - 1, held_bytes - size_bytes)

    def _check_jobs(self, jobs: int) -> None:
        if not jobs and len(self._held) >= self._owners_max:
            text = f"too many tenants with large requests; the limit is {self._owners_max}"
            raise Overloaded(text, retry_after_s=_RETRY_S)
        if jobs >= self._jobs_max:
            text = f"too many large requests are waiting; the limit is {jobs}"
            raise Overloaded(text, retry_after_s=_RETRY_S)

    def _check_bytes(self, size_bytes: int) -> None:
        if size_bytes > self._bytes_max:
            text = (
                f"the waiting large requests would take {size_bytes} bytes; "
                f"the limit is {self._bytes_max}"
            )
            raise Overloaded(text, retry_after_s=_RETRY_S)


class FairQueue:
    """Grants slots to jobs: in order within an owner, round-robin between owners.

    An owner with many jobs delays another's by one job. The queue is unbounded: callers bound it.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._closed = False

    async def acquire(self, owner: str) -> None:
        """Wait for a slot; the caller releases it when the job has ended."""
        self._check_open()
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
            self._check_open()
        except BaseException:
            self._abandon(owner, waiter)
            raise

    def release(self) -> None:
        """Pass a slot on to the next owner, which moves to the end of the round-robin order."""
        while self._waiting:
            owner, waiters = next(iter(self._waiting.items()))
            del self._waiting[owner]
            waiter = waiters.popleft()
            if waiters:
                self._waiting[owner] = waiters
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        self._closed = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(leaving())
        self._waiting.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise leaving()

    def _abandon(self, owner: str, waiter: asyncio.Future[None]) -> None:
        """Remove a job whose caller left from the queue, or pass on its slot if already granted."""
        waiters = self._waiting.get(owner, deque())
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[owner]
        elif not waiter.cancelled() and waiter.exception() is None:
            self.release()


def leaving() -> Unavailable:
    return Unavailable("this process is shutting down", retry_after_s=0.0)
