"""A pool of child processes for work that would hold the GIL: bytes in, bytes out.

A thread does not help when one call holds the GIL for a second, as decoding or encoding a large
text does. A child process has its own interpreter and bounded memory, and ends with its parent. The
bytes on the pipe are msgspec messages, encoded and decoded by the caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from antiphon.service.startup import die_with
from antiphon.service.tasks import Tasks, isolated
from antiphon.wire.errors import DeadlineExceeded, EngineError, Internal, Overloaded, Unavailable

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Generator, Iterator, Sequence

log = logging.getLogger(__name__)

_LENGTH_BYTES = 8
_READY = b"\x01"
_CHUNK_BYTES = 1024 * 1024
_LEAVE_S = 2.0
_START_S = 60.0
_RETRY_S = 1.0
_OWNERS_MAX = 64
_Pieces = tuple[bytes | bytearray, ...]


class ProcessPool:
    """Runs jobs in child processes, which are started on demand and restarted if they end.

    Jobs beyond the number of children wait: in order within an owner, round-robin between owners,
    so that an owner with many jobs delays another's by one job. Within an owner, kinds of jobs may
    take turns likewise. Beyond an owner's `jobs_max` or `bytes_max` a job is rejected.

    A job whose caller has left continues, and its result is dropped: it could only be stopped by
    killing its child, and the next job would pay for a new one. It keeps its slot, so that leaving
    does not earn an owner more slots. A child is killed if its job takes longer than `job_s`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        job_s: float,
        start_s: float = _START_S,
        processes: int = 1,
        jobs_max: int = 64,
        bytes_max: int = 64 * 1024**2,
        memory_bytes_max: int = 2 * 1024**3,
        owners_max: int = _OWNERS_MAX,
    ) -> None:
        """Configure the pool; no child is started yet.

        `command` are arguments of the Python interpreter; the child must call `serve`. `jobs_max`
        and `bytes_max` bound the waiting and running jobs of one owner, `owners_max` the owners
        that have any, and `memory_bytes_max` the address space of a child.
        """
        self._command = tuple(command)
        self._job_s = job_s
        self._start_s = start_s
        self._queue = FairQueue(processes)
        self._quota = OwnerQuota(jobs_max=jobs_max, bytes_max=bytes_max, owners_max=owners_max)
        self._memory_bytes_max = memory_bytes_max
        self._children: set[Process] = set()
        self._idle: list[Process] = []
        self._tasks = Tasks()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            await self._tasks.__aexit__(None, None, None)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(child.pid for child in self._children if child.returncode is None)

    async def run(
        self,
        *job: bytes | bytearray,
        timeout_s: float,
        owner: str = "",
        kind: str = "",
    ) -> bytearray:
        """Run a job in a child and return its result, within the owner's quota.

        The child gets the pieces of the job as one; they are not copied here, where a large copy
        would hold up the event loop.

        `timeout_s` covers the wait for a slot, the child's start and the result. Jobs of different
        `kind` take turns within their owner.

        Raises:
            Overloaded: Too many jobs wait.
            DeadlineExceeded: There was no result in time.
            Internal: The child ended, for example because the job exceeded its memory.
            Unavailable: The process is shutting down, or a child does not start.
        """
        with self._quota.admit(owner, _size(job)):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._queue.acquire(owner, kind)
                    result: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
                    self._tasks.create_task(isolated(self._run_job, job, result))
                    return await result
            except TimeoutError:
                raise DeadlineExceeded(f"no result within {timeout_s:g} s") from None

    async def close(self) -> None:
        """Kill all children, including starting ones, and wait for them for a bounded time."""
        self._closed = True
        self._queue.close()
        idle, self._idle = self._idle, []
        for child in self._children:
            _kill(child)
        for child in idle:
            self._tasks.create_task(self._end(child))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._tasks.ended()
        await self._tasks.cancel(_LEAVE_S)
        if self.pids:
            log.error("child processes do not end", extra={"pids": self.pids})

    async def _run_job(self, job: _Pieces, result: asyncio.Future[bytearray]) -> None:
        """Run a job in a child to its end, whether or not its caller waits."""
        failure: EngineError = Internal("internal error")
        try:
            output = await self._compute(job, result)
            if not result.done():
                result.set_result(output)
        except EngineError as error:
            failure = error
            log.warning("job failed", extra={"code": error.code, "job_bytes": _size(job)})
        finally:
            if not result.done():
                result.set_exception(leaving() if self._closed else failure)
                result.exception()  # its caller may be leaving at this moment
            self._queue.release()

    async def _compute(self, job: _Pieces, result: asyncio.Future[bytearray]) -> bytearray:
        child = self._warm_child() or await self._start()
        reusable = False
        try:
            # The caller may have left while the child started: then there is nothing to do.
            output = bytearray() if result.done() else await self._exchange(child, job)
            reusable = not self._closed
        finally:
            if reusable:
                self._idle.append(child)
            else:
                await self._end(child)
        return output

    def _warm_child(self) -> Process | None:
        while self._idle:
            child = self._idle.pop()
            if child.returncode is None:
                return child
            self._children.discard(child)
        return None

    async def _start(self) -> Process:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._command,
                str(os.getpid()),
                str(self._memory_bytes_max),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_CHUNK_BYTES,
            )
        except OSError as error:
            text = f"cannot start a child process: {error}"
            raise Unavailable(text, retry_after_s=_RETRY_S) from error
        assert child.stdout is not None
        self._children.add(child)
        ready = False
        try:
            if self._closed:
                raise leaving()
            async with asyncio.timeout(self._start_s):
                await child.stdout.readexactly(len(_READY))
            ready = True
        except TimeoutError:
            text = f"a child process was not ready within {self._start_s:g} s"
            raise Unavailable(text, retry_after_s=_RETRY_S) from None
        except asyncio.IncompleteReadError as error:
            raise Internal("a child process ended before it was ready") from error
        finally:
            if not ready:
                await self._end(child)
        return child

    async def _exchange(self, child: Process, job: _Pieces) -> bytearray:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(self._job_s):
                child.stdin.write(_size(job).to_bytes(_LENGTH_BYTES, "little"))
                for chunk in _chunks(job):  # the pipe's buffer has a copy
                    child.stdin.write(chunk)
                    await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(_LENGTH_BYTES), "little")
                if size > self._memory_bytes_max:  # it was led astray: it cannot hold as much
                    raise Internal("a child process announced a result beyond its memory")
                result = bytearray()
                while left := size - len(result):
                    result += await child.stdout.readexactly(min(left, _CHUNK_BYTES))
                return result
        except TimeoutError:
            raise DeadlineExceeded(f"no result within {self._job_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Internal("a child process ended before its result") from error

    async def _end(self, child: Process) -> None:
        _kill(child)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await child.wait()
        if child.returncode is None:
            log.error("child process does not end", extra={"pid": child.pid})
        else:
            self._children.discard(child)


def _size(job: _Pieces) -> int:
    return sum(map(len, job))


def _chunks(job: _Pieces) -> Iterator[memoryview]:
    for piece in job:
        for start in range(0, len(piece), _CHUNK_BYTES):
            yield memoryview(piece)[start : start + _CHUNK_BYTES]


def serve(work: Callable[[bytes], bytes], parent_pid: str, memory_bytes_max: str) -> None:
    """Run jobs until the parent closes the pipe or ends. Called by the child's main program.

    `work` raises only on bugs, which end the child. The others are the last command-line arguments.
    """
    die_with(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    most = int(memory_bytes_max)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    jobs = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries must not go to the pipe
    results.write(_READY)
    results.flush()
    while header := jobs.read(_LENGTH_BYTES):
        result = work(jobs.read(int.from_bytes(header, "little")))
        results.write(len(result).to_bytes(_LENGTH_BYTES, "little"))
        results.write(result)
        results.flush()


def _kill(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()


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
            text = f"the waiting large requests would take {size_bytes} bytes"
            raise Overloaded(f"{text}; the limit is {self._bytes_max}", retry_after_s=_RETRY_S)


class FairQueue:
    """Grants slots to jobs: round-robin between owners, and within an owner between kinds of jobs.

    Jobs of one kind are in order. An owner with many jobs delays another's by one job, and so does
    a kind another one of its owner. The queue is unbounded: callers bound it.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}
        self._closed = False

    async def acquire(self, owner: str, kind: str = "") -> None:
        """Wait for a slot; the caller releases it when the job has ended."""
        self._check_open()
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {}).setdefault(kind, deque()).append(waiter)
        try:
            await waiter
            self._check_open()
        except BaseException:
            self._abandon(owner, kind, waiter)
            raise

    def release(self) -> None:
        """Pass a slot on to the next kind of the next owner; both move to the end of the order."""
        while self._waiting:
            owner, kinds = next(iter(self._waiting.items()))
            kind, waiters = next(iter(kinds.items()))
            del self._waiting[owner], kinds[kind]
            waiter = waiters.popleft()
            if waiters:
                kinds[kind] = waiters
            if kinds:
                self._waiting[owner] = kinds
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        self._closed = True
        for kinds in self._waiting.values():
            for waiter in (each for waiters in kinds.values() for each in waiters):
                if not waiter.done():
                    waiter.set_exception(leaving())
        self._waiting.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise leaving()

    def _abandon(self, owner: str, kind: str, waiter: asyncio.Future[None]) -> None:
        """Remove a job whose caller left from the queue, or pass on its slot if already granted."""
        kinds = self._waiting.get(owner, {})
        waiters = kinds.get(kind, deque())
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del kinds[kind]
            if not kinds:
                del self._waiting[owner]
        elif not waiter.cancelled() and waiter.exception() is None:
            self.release()


def leaving() -> Unavailable:
    return Unavailable("this process is shutting down", retry_after_s=0.0)
