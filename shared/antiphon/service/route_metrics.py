"""What happened on one route, told twice: to Prometheus, and to who asks `$SRV.STATS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.bus.discovery import EndpointCounters as Tally
    from antiphon.telemetry.metrics import Metrics

OK = "ok"


class RouteMetrics:
    """Counts for one endpoint. Labels are bound once: it is called for every message."""

    def __init__(self, metrics: Metrics, tally: Tally) -> None:
        self._metrics = metrics
        self._tally = tally
        self._open = metrics.calls_open.labels(tally.name)
        self._seconds = metrics.call_seconds.labels(tally.name)
        self._messages = metrics.messages.labels(tally.name)
        self._applied = 0
        metrics.before_collect(self._flush)

    def open(self, calls: int) -> None:
        """So many calls are taken and not answered."""
        self._open.set(calls)

    def answered(self, seconds: float, outcome: str) -> None:
        """A call was answered, `OK` or with the code of an error."""
        self._seconds.observe(seconds)
        self._metrics.calls.labels(self._tally.name, outcome).inc()
        self._tally.count(seconds, "" if outcome == OK else outcome)

    def refused(self, code: str) -> None:
        """A call was refused unread."""
        self._metrics.refused.labels(self._tally.name, code).inc()
        self._tally.count(0.0, code)

    def applied(self, seconds: float) -> None:
        """A message of a feed was applied."""
        self._applied += 1
        self._tally.count(seconds)

    def dropped(self, seconds: float, code: str) -> None:
        """A message of a feed was not applied."""
        self._tally.count(seconds, code)

    def message_refused(self, reason: str) -> None:
        """A message was dropped: it could not be read, or it could not be applied."""
        self._metrics.messages_refused.labels(self._tally.name, reason).inc()

    def unsent(self, kind: str) -> None:
        """A message did not leave."""
        self._metrics.bus_errors.labels(kind).inc()

    def _flush(self) -> None:
        self._messages.inc(self._applied)
        self._applied = 0
