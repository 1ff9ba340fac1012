"""Dropped messages of a route: each is counted; logging is rate-limited."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from antiphon.wire.codec import MalformedMessage
from antiphon.wire.errors import EngineError, Internal, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.service.route_metrics import RouteMetrics

log = logging.getLogger(__name__)

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
