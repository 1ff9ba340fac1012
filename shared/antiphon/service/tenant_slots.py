"""Slots of a limited resource that tenants share fairly."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.wire.ids import TenantId


class TenantSlots:
    """Runs `count` jobs at once, and one more for a tenant that has none running.

    Waiting tenants get slots round-robin, and the jobs of a tenant run in order: however many jobs
    one tenant sends, another waits for one job of each tenant, not for all of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: Counter[TenantId] = Counter()
        self._waiting: OrderedDict[TenantId, deque[asyncio.Future[None]]] = OrderedDict()

    def waiting(self, tenant: TenantId) -> int:
        """The number of a tenant's jobs that wait."""
        return len(self._waiting.get(tenant, ()))

    @asynccontextmanager
    async def held(self, tenant: TenantId) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it until the exit."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)

    async def acquire(self, tenant: TenantId) -> None:
        """Wait for a slot, which the caller releases."""
        if tenant not in self._waiting and self._free(tenant):
            self._running[tenant] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
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
