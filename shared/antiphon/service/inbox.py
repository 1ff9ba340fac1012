"""Inboxes between the bus and handlers: bounded, ordered, with a reply to every call."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from antiphon.service.dropped_messages import DroppedMessages, SharedStateBroken
from antiphon.service.route_metrics import OK, RouteMetrics
from antiphon.wire.codec import MalformedMessage
from antiphon.wire.errors import (
    EngineError,
    Internal,
    InvalidRequest,
    Overloaded,
    Unavailable,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from antiphon.bus.bus import Delivery
    from antiphon.wire.base import Message

log = logging.getLogger(__name__)

OVERLOADED_RETRY_S = 1.0

LEAVING = Unavailable("this process is shutting down", retry_after_s=0.0)
"""The caller may retry elsewhere at once."""


class Inbox(Protocol):
    @property
    def empty(self) -> bool: ...

    def deliver(self, delivery: Delivery) -> None:
        """Accept one message. Raises nothing."""
        ...

    def shut(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class InboxLimits:
    slots: int
    backlog: int


@dataclass(frozen=True, eq=False)
class _PendingCall:
    delivery: Delivery
    since_s: float


class RequestInbox:
    """Runs at most `slots` handlers at once; at most `backlog` calls wait; more are rejected.

    Core NATS has no back-pressure: beyond its pending limit a subscription silently drops messages.
    So we reply `Overloaded` long before that. Every accepted call gets a reply: from its handler,
    from the error that ended it, or from `close`.
    """

    def __init__(
        self,
        route: str,
        handler: Callable[[Delivery], Awaitable[Message]],
        *,
        calls: asyncio.TaskGroup,
        limits: InboxLimits,
        counts: RouteMetrics,
    ) -> None:
        self._route = route
        self._handler = handler
        self._calls = calls
        self._slots = asyncio.Semaphore(limits.slots)
        self._capacity = limits.slots + limits.backlog
        self._counts = counts
        self._refusals = DroppedMessages(route, counts)
        self._pending: set[_PendingCall] = set()
        self._open = True

    @property
    def empty(self) -> bool:
        return not self._pending

    def deliver(self, delivery: Delivery) -> None:
        if not self._open:
            self._refuse(delivery, LEAVING)
        elif len(self._pending) >= self._capacity:
            text = f"{self._route} has reached its limit of {self._capacity} calls in flight"
            self._refuse(delivery, Overloaded(text, retry_after_s=OVERLOADED_RETRY_S))
        else:
            call = _PendingCall(delivery, time.monotonic())
            self._pending.add(call)
            self._counts.open(len(self._pending))
            self._calls.create_task(self._run(call), name=self._route)

    def shut(self) -> None:
        self._open = False

    async def close(self) -> None:
        """Reply to the calls whose task was cancelled before it started."""
        self.shut()
        for call in list(self._pending):
            self._fail(call, LEAVING)

    async def _run(self, call: _PendingCall) -> None:
        try:
            async with self._slots:
                reply = await self._handler(call.delivery)
            call.delivery.respond(reply)
        except asyncio.CancelledError:
            self._fail(call, LEAVING)
            raise
        except EngineError as error:
            self._fail(call, error)
        except Exception:
            log.exception("handler failed", extra={"route": self._route})
            self._fail(call, Internal("internal error"))
        else:
            self._finish(call, OK)

    def _fail(self, call: _PendingCall, error: EngineError) -> None:
        if isinstance(error, MalformedMessage):
            self._refusals.record(error)
        elif isinstance(error, InvalidRequest):
            log.info("call refused", extra={"route": self._route, "reason": error.message})
        send_error(call.delivery, error, self._counts)
        self._finish(call, error.code)

    def _finish(self, call: _PendingCall, outcome: str) -> None:
        self._pending.discard(call)
        self._counts.open(len(self._pending))
        self._counts.answered(time.monotonic() - call.since_s, outcome)

    def _refuse(self, delivery: Delivery, error: EngineError) -> None:
        self._counts.refused(error.code)
        send_error(delivery, error, self._counts)


class StreamInbox:
    """Applies one message at a time, in order, without replies.

    Concurrent handlers would reorder: with 8 slots, 50 ordered messages came out of order. A
    message that fails is dropped and does not affect others. Only `SharedStateBroken` ends the
    group `calls`, and with it the process.
    """

    def __init__(
        self,
        route: str,
        apply: Callable[[Delivery], None],
        *,
        calls: asyncio.TaskGroup,
        counts: RouteMetrics,
    ) -> None:
        self._route = route
        self._apply = apply
        self._calls = calls
        self._counts = counts
        self._refusals = DroppedMessages(route, counts)

    @property
    def empty(self) -> bool:
        return True

    def deliver(self, delivery: Delivery) -> None:
        """Apply the message. One that cannot be decoded or applied is dropped."""
        since_s = time.monotonic()
        try:
            self._apply(delivery)
        except SharedStateBroken as error:
            self._counts.dropped(time.monotonic() - since_s, Internal.code)
            log.exception("shared state is broken", extra={"route": self._route})
            self._calls.create_task(_fail(error), name=self._route)
        except Exception as error:  # noqa: BLE001  # logged there, with its traceback
            self._counts.dropped(time.monotonic() - since_s, self._refusals.record(error))
        else:
            self._counts.applied(time.monotonic() - since_s)

    # A feed has no callers.

    def shut(self) -> None: ...

    async def close(self) -> None: ...


async def _fail(error: SharedStateBroken) -> None:
    raise error


def send_error(delivery: Delivery, error: EngineError, counts: RouteMetrics) -> None:
    """Reply with an error. Never raises: a failed reply must not end the service."""
    extra = {"subject": delivery.subject, "code": error.code}
    try:
        delivery.respond(encode_error(error))
    except EngineError as failure:
        counts.unsent("answer")
        log.warning("answer not sent", extra=extra | {"reason": failure.message})
    except Exception:
        counts.unsent("answer")
        log.exception("answer not sent", extra=extra)
