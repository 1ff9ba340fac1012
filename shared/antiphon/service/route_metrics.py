"""Metrics of one route, for Prometheus and for the NATS verb `$SRV.STATS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.bus.discovery import EndpointCounters
    from antiphon.telemetry.metrics import Metrics

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
        """Count a message dropped because it could not be decoded or applied."""
        self._metrics.messages_refused.labels(self._tally.name, reason).inc()

    def unsent(self, kind: str) -> None:
        self._metrics.bus_errors.labels(kind).inc()

    def _flush(self) -> None:
        self._messages.inc(self._applied)
        self._applied = 0
