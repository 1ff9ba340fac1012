"""Messages that are dropped, on one route: each is counted, and the log is not flooded."""

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
"""Shortest time between two log lines of a route for the same reason."""

MALFORMED = "malformed"
"""The reason of a message that could not be decoded."""

UNKNOWN_SENDER = "unknown_sender"
"""The reason of a message of a process that is not among the peers."""


class SharedStateBroken(AssertionError):
    """A structure that all requests share is broken: what follows could not be trusted.

    It ends the process. Every other failure, a failed assertion too, ends at most the request that
    it belongs to.
    """


class UnknownSender(InvalidRequest):
    """A message of a process whose heartbeats do not count: it is dead, replaced, or forged.

    What a live one sent before its first heartbeat is seen missing, and sent again.
    """


class DroppedMessages:
    """Counts the dropped messages of a route, and logs one a second and reason."""

    def __init__(
        self, route: str, counts: RouteMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._route = route
        self._counts = counts
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}

    def record(self, error: Exception) -> str:
        """Count a message that was dropped because of this error; return the reason.

        A bug is logged with its traceback.
        """
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
