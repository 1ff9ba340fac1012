"""A transport that injects faults: at one call, or at a seeded share of published messages."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from antiphon.bus.transport import BusDown, LinkState, PacketCallback, Subscription, Transport
from antiphon.wire.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Mapping

    Held = tuple[bytes, str | None, Mapping[str, str] | None]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of published messages, as shares of all messages.

    Attributes:
        delay: Share that is delayed by `delay_s`, together with later messages of the same subject:
            other subjects overtake it, but the order within a subject holds, as in NATS.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.01
    seed: int = 0


NO_FAULTS = Faults()


class FaultyTransport:
    """Wraps another transport and injects faults. Implements `Transport`.

    With `fail_at_call`, the call of that index (counting publish, subscribe and flush) raises
    `BusDown` and has no effect: a test that increments it until `fault_happened` stays false has
    tried a fault at every call.
    """

    def __init__(
        self, inner: Transport, *, faults: Faults = NO_FAULTS, fail_at_call: int | None = None
    ) -> None:
        self.calls = 0
        self._inner = inner
        self._faults = faults
        self._fail_at_call = fail_at_call
        self._random = random.Random(faults.seed)  # a schedule, not a secret
        self._group = asyncio.TaskGroup()
        self._held: dict[str, deque[Held]] = {}

    @property
    def fault_happened(self) -> bool:
        return self._fail_at_call is not None and self.calls > self._fail_at_call

    any_thread = False  # delayed messages are sent by a task of the event loop

    @property
    def link(self) -> LinkState:
        return self._inner.link

    @property
    def payload_bytes_max(self) -> int:
        return self._inner.payload_bytes_max

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await self._inner.__aexit__(*error)

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send to the current subscribers, or drop, duplicate or delay the message."""
        self._count_call()
        self._check(data)
        if self._hits(self._faults.drop):
            return
        for _ in range(2 if self._hits(self._faults.duplicate) else 1):
            if subject in self._held:
                self._held[subject].append((data, reply, headers))
            elif self._hits(self._faults.delay):
                self._held[subject] = deque([(data, reply, headers)])
                self._group.create_task(self._release(subject))
            else:
                self._inner.publish(subject, data, reply, headers)

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> Subscription:
        self._count_call()
        return await self._inner.subscribe(subject, receive, queue)

    async def flush(self, timeout_s: float) -> None:
        """Return when the broker has read all published messages that are not delayed."""
        self._count_call()
        await self._inner.flush(timeout_s)

    def _count_call(self) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call == self._fail_at_call:
            raise BusDown("the NATS connection is down (injected fault)", retry_after_s=1.0)

    def _check(self, data: bytes) -> None:
        """Raise the errors of the inner transport, even if the message is dropped or delayed."""
        if len(data) > self.payload_bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self.payload_bytes_max)
        if not self.link.up:
            raise BusDown("the NATS connection is down", retry_after_s=1.0)

    def _hits(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    async def _release(self, subject: str) -> None:
        await asyncio.sleep(self._faults.delay_s)
        held = self._held[subject]
        while held:
            data, reply, headers = held.popleft()
            try:
                self._inner.publish(subject, data, reply, headers)
            except BusDown:
                held.clear()  # Lost, as messages are in an outage.
        del self._held[subject]
