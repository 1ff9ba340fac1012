"""Inboxes between the bus and handlers: bounded, ordered, counted, with a reply to every call."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    from antiphon.bus.discovery import EndpointCounters
    from antiphon.telemetry.metrics import Metrics
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


@dataclass(eq=False)
class StreamInbox:
    """Applies one message at a time, in order, without replies.

    Concurrent handlers would reorder: with 8 slots, 50 ordered messages came out of order. A
    message that fails is dropped and does not affect others. Only `SharedStateBroken` ends the
    group `calls`, and with it the process.
    """

    route: str
    apply: Callable[[Delivery], None]
    calls: asyncio.TaskGroup
    counts: RouteMetrics

    def __post_init__(self) -> None:
        self._refusals = DroppedMessages(self.route, self.counts)

    @property
    def empty(self) -> bool:
        return True

    def deliver(self, delivery: Delivery) -> None:
        """Apply the message. One that cannot be decoded or applied is dropped."""
        since_s = time.monotonic()
        try:
            self.apply(delivery)
        except SharedStateBroken as error:
            self.counts.dropped(time.monotonic() - since_s, Internal.code)
            log.exception("shared state is broken", extra={"route": self.route})
            self.calls.create_task(_fail(error), name=self.route)
        except Exception as error:  # noqa: BLE001  # logged there, with its traceback
            self.counts.dropped(time.monotonic() - since_s, self._refusals.record(error))
        else:
            self.counts.applied(time.monotonic() - since_s)

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


LOG_PAUSE_S = 1.0
"""Minimum time between two log lines of a route with the same reason."""

MALFORMED = "malformed"
"""Reason of messages that cannot be decoded."""

UNKNOWN_SENDER = "unknown_sender"
"""Reason of messages from a process that is not a known peer."""


class SharedStateBroken(AssertionError):
    """State shared by all requests is inconsistent; later results cannot be trusted.

    It ends the process. Every other error, including a failed assertion, ends at most the request
    that it belongs to.
    """


class UnknownSender(InvalidRequest):
    """The sender is not a live peer: it is dead, was replaced, or the message is forged.

    Messages that a live process sent before its first heartbeat are detected as missing and resent.
    """


class DroppedMessages:
    """Counts the dropped messages of a route, and logs at most one per second and reason."""

    def __init__(
        self, route: str, counts: RouteMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._route = route
        self._counts = counts
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}

    def record(self, error: Exception) -> str:
        """Count a message dropped because of this error; return the reason."""
        # Bugs are logged with their traceback.
        reason = _reason(error)
        self._counts.message_refused(reason)
        now = self._clock()
        if now - self._logged_at.get(reason, now - LOG_PAUSE_S) < LOG_PAUSE_S:
            self._unlogged[reason] = self._unlogged.get(reason, 0) + 1
            return reason
        self._logged_at[reason] = now
        fields = {
            "route": self._route,
            "code": reason,
            "reason": error.message if isinstance(error, EngineError) else type(error).__name__,
            "unlogged": self._unlogged.pop(reason, 0),
        }
        if isinstance(error, EngineError):
            log.warning("message dropped", extra=fields)
        else:
            log.error("message dropped", extra=fields, exc_info=error)
        return reason


def _reason(error: Exception) -> str:
    if isinstance(error, MalformedMessage):
        return MALFORMED
    if isinstance(error, UnknownSender):
        return UNKNOWN_SENDER
    return error.code if isinstance(error, EngineError) else Internal.code


OK = "ok"


class RouteMetrics:
    """Metrics of one endpoint. Labels are bound once: it is called for every message."""

    def __init__(self, metrics: Metrics, tally: EndpointCounters) -> None:
        self._metrics = metrics
        self._tally = tally
        self._open = metrics.calls_open.labels(tally.name)
        self._seconds = metrics.call_seconds.labels(tally.name)
        self._messages = metrics.messages.labels(tally.name)
        self._applied = 0
        metrics.before_collect(self._flush)

    def open(self, calls: int) -> None:
        self._open.set(calls)

    def answered(self, seconds: float, outcome: str) -> None:
        """Count a reply: `OK` or the code of an error."""
        self._seconds.observe(seconds)
        self._metrics.calls.labels(self._tally.name, outcome).inc()
        self._tally.count(seconds, "" if outcome == OK else outcome)

    def refused(self, code: str) -> None:
        self._metrics.refused.labels(self._tally.name, code).inc()
        self._tally.count(0.0, code)

    def applied(self, seconds: float) -> None:
        self._applied += 1
        self._tally.count(seconds)

    def dropped(self, seconds: float, code: str) -> None:
        self._tally.count(seconds, code)

    def message_refused(self, reason: str) -> None:
        self._metrics.messages_refused.labels(self._tally.name, reason).inc()

    def unsent(self, kind: str) -> None:
        self._metrics.bus_errors.labels(kind).inc()

    def _flush(self) -> None:
        self._messages.inc(self._applied)
        self._applied = 0
