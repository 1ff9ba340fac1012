"""Threads that compile grammars off the step, at a lower priority, shared fairly by tenants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, TypeVar

from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.wire.ids import TenantId

T = TypeVar("T")

LOST_MAX = 4
"""Timed-out compiles that may still run: each holds memory, and a little of a core."""
TENANT_LOST_MAX = 2
"""The same for one tenant, so that it does not block the grammars of the others."""
WAITING_MAX = 64
"""How many jobs of one tenant may wait for a slot."""
_NICE = 10
_RETRY_AFTER_S = 5.0


class CompileThreads:
    """Runs at most `workers` jobs at once, each in a thread of its own, shared fairly by tenants.

    Not an executor: a compile cannot be interrupted, and the process would wait for an executor's
    threads at exit. A job that times out frees its slot and runs on; a few may do so at a time.
    """

    def __init__(self, workers: int, nice: int = _NICE) -> None:
        self._nice = nice
        self._slots = TenantSlots(workers)
        self._timed_out: Counter[TenantId] = Counter()

    async def run(self, job: Callable[[], T], timeout_s: float, tenant: TenantId) -> T:
        """Run a job for at most `timeout_s`, and return its result.

        Raises `Overloaded` if it got no slot in that time, or too many timed-out jobs still run.
        """
        if self._timed_out.total() >= LOST_MAX or self._timed_out[tenant] >= TENANT_LOST_MAX:
            raise Overloaded("too many grammars take too long", retry_after_s=_RETRY_AFTER_S)
        try:
            await self._slots.acquire(tenant, timeout_s)
        except TimeoutError:
            message = "too many grammars are being compiled"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
        try:
            return await self._run(job, timeout_s, tenant)
        finally:
            self._slots.release(tenant)

    async def _run(self, job: Callable[[], T], timeout_s: float, tenant: TenantId) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        body = functools.partial(_body, job, done, loop, self._nice)
        threading.Thread(target=body, name="grammar", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(done)
        finally:
            if not done.done():
                self._timed_out[tenant] += 1
                done.add_done_callback(functools.partial(self._on_late_result, tenant))

    def _on_late_result(self, tenant: TenantId, done: asyncio.Future[T]) -> None:
        self._timed_out[tenant] -= 1
        if not self._timed_out[tenant]:
            del self._timed_out[tenant]
        done.exception()  # retrieved, or asyncio would log it: no caller awaits it any more


def _body(
    job: Callable[[], T], done: asyncio.Future[T], loop: asyncio.AbstractEventLoop, nice: int
) -> None:
    if nice and sys.platform == "linux":  # where each thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    try:
        resolve = functools.partial(done.set_result, job())
    except Exception as error:  # noqa: BLE001 (raised again where it is waited for)
        resolve = functools.partial(done.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
        loop.call_soon_threadsafe(resolve)


class TenantSlots:
    """Runs `count` jobs at once, and one more for a tenant that has none running.

    Waiting tenants get slots round-robin, and the jobs of a tenant run in order: however many jobs
    one tenant sends, another waits for one job of each tenant, not for all of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: Counter[TenantId] = Counter()
        self._waiting: OrderedDict[TenantId, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, tenant: TenantId, timeout_s: float) -> None:
        waiting = self._waiting.get(tenant)
        if not waiting and self._free(tenant):
            self._running[tenant] += 1
            return
        if waiting is not None and len(waiting) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} grammars wait to be compiled", retry_after_s=1.0)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.release(tenant)  # a slot was assigned at the same moment
            else:
                self._forget(tenant, turn)
            raise

    def _free(self, tenant: TenantId) -> bool:
        running = self._running.total()
        return running < self._count or (running == self._count and not self._running[tenant])

    def release(self, tenant: TenantId) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        while (following := next(filter(self._free, self._waiting), None)) is not None:
            turn = self._waiting[following][0]
            self._forget(following, turn)
            if following in self._waiting:
                self._waiting.move_to_end(following)
            if not turn.done():
                self._running[following] += 1
                turn.set_result(None)

    def _forget(self, tenant: TenantId, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(tenant)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[tenant]
