"""A pool of child processes for work that would hold the interpreter: bytes in, bytes out.

A thread does not help against one call that keeps the interpreter for a second, as decoding or
encoding a large text does. A child process has an interpreter of its own, bounded memory, and ends
with its parent. What crosses the pipe is msgspec bytes, written and read by the caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections import deque
from typing import TYPE_CHECKING

from antiphon.service.parent import die_with
from antiphon.wire.errors import DeadlineExceeded, Internal, Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

_LENGTH_BYTES = 8
_CHUNK_BYTES = 1024 * 1024
_LEAVE_S = 2.0
_RETRY_S = 1.0


class ProcessPool:
    """Runs jobs in children that are started when they are needed, and again if they end.

    Jobs beyond the number of children wait: those of one owner in order, the owners in turns, so
    that an owner with many jobs delays another's by one. Beyond `waiting_max` of an owner, or
    `owners_max` that wait, a job is refused. A child whose job is cancelled, late, or too large for
    its memory is killed: there is no other way to stop such work.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int = 1,
        waiting_max: int = 16,
        owners_max: int = 64,
        memory_bytes_max: int = 2 * 1024**3,
    ) -> None:
        """Nothing is started yet.

        Args:
            command: Arguments of the interpreter; the child has to call `serve`.
            processes: Most children.
            waiting_max: Most jobs of one owner that wait.
            owners_max: Most owners whose jobs wait.
            memory_bytes_max: Most address space of a child.
        """
        self._command = tuple(command)
        self._free = processes
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._waiting_max = waiting_max
        self._owners_max = owners_max
        self._memory_bytes_max = memory_bytes_max
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The children that live."""
        return tuple(child.pid for child in (*self._idle, *self._busy))

    async def run(self, job: bytes, *, timeout_s: float, owner: str = "") -> bytes:
        """Return what a child makes of a job of an owner's.

        Raises:
            Overloaded: Too many jobs wait.
            DeadlineExceeded: There was no result in time.
            Internal: The child ended, as if the job needs more memory than it may have.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._refuse_if_closed()
                await self._turn(owner)
                try:
                    self._refuse_if_closed()
                    return await self._exchange(job)
                finally:
                    self._next()
        except TimeoutError:
            raise DeadlineExceeded(f"not read within {timeout_s:g} s") from None

    async def close(self) -> None:
        """Kill every child, and wait for it."""
        self._closed = True
        children = [*self._idle, *self._busy]
        self._idle.clear()
        for child in children:
            _kill(child)
        for child in children:
            async with asyncio.timeout(_LEAVE_S):
                await child.wait()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("this process is leaving", retry_after_s=0.0)

    async def _turn(self, owner: str) -> None:
        """Wait for a free child."""
        if self._free:
            self._free -= 1
            return
        places = self._waiting.get(owner, ())
        if len(places) >= self._waiting_max or (
            owner not in self._waiting and len(self._waiting) >= self._owners_max
        ):
            text = f"{len(places)} large requests wait to be read, the limit"
            raise Overloaded(text, retry_after_s=_RETRY_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except BaseException:
            self._give_up(owner, turn)
            raise

    def _give_up(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Take a job whose caller left out of the row, or pass its turn on if it has come."""
        turns = self._waiting.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]
        elif turn.done() and not turn.cancelled():
            self._next()

    def _next(self) -> None:
        """Give a free child to the next owner, who goes to the end of the row."""
        while self._waiting:
            owner, turns = next(iter(self._waiting.items()))
            del self._waiting[owner]
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _exchange(self, job: bytes) -> bytes:
        child = await self._child()
        assert child.stdin is not None
        assert child.stdout is not None
        self._busy.add(child)
        try:
            child.stdin.write(len(job).to_bytes(_LENGTH_BYTES, "little"))
            child.stdin.write(job)
            await child.stdin.drain()
            size = int.from_bytes(await child.stdout.readexactly(_LENGTH_BYTES), "little")
            result = await child.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            _kill(child)
            log.warning("child process ended", extra={"pid": child.pid, "job_bytes": len(job)})
            raise Internal("a child process ended before its result") from error
        except BaseException:  # cancelled or late: the child is in the middle of it
            _kill(child)
            raise
        finally:
            self._busy.discard(child)
        if self._closed:
            _kill(child)
        else:
            self._idle.append(child)
        return result

    async def _child(self) -> asyncio.subprocess.Process:
        while self._idle:
            child = self._idle.pop()
            if child.returncode is None:
                return child
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            str(os.getpid()),
            str(self._memory_bytes_max),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_CHUNK_BYTES,
        )


def serve(work: Callable[[bytes], bytes], parent_pid: str, memory_bytes_max: str) -> None:
    """Do jobs until the parent closes the pipe or ends. Called by the child's main program.

    Args:
        work: Makes the result of a job. It raises for bugs only: these end the child.
        parent_pid: The last but one argument of the command line.
        memory_bytes_max: The last one.
    """
    die_with(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent decides
    most = int(memory_bytes_max)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    jobs = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # no print of a library may get in between
    while header := jobs.read(_LENGTH_BYTES):
        result = work(jobs.read(int.from_bytes(header, "little")))
        results.write(len(result).to_bytes(_LENGTH_BYTES, "little"))
        results.write(result)
        results.flush()


def _kill(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
