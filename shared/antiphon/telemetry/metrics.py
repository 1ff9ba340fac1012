"""The numbers of a process, for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

_HANDLER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0, 30.0)


class Metrics:
    """What the run loop counts. A service adds its own to `registry`, named `antiphon_<service>_*`.

    Not module globals: several services live in one test process, each with numbers of its own.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("calls", "Calls answered.", "route", "outcome")
        self.call_seconds = Histogram(
            "antiphon_call_seconds",
            "Time from taking a call to its answer.",
            ("route",),
            registry=self.registry,
            buckets=_HANDLER_BUCKETS_S,
        )
        self.calls_open = self._gauge("calls_open", "Calls taken and not answered yet.", "route")
        self.refused = self._counter("refused", "Calls refused unread.", "route", "reason")
        self.messages = self._counter("messages", "Feed messages applied.", "route")
        self.malformed = self._counter("malformed", "Messages that none could read.", "route")
        self.gaps = self._counter("gaps", "Losses seen in a sequence.", "route")
        self.bus_errors = self._counter("bus_errors", "Messages that were not sent.", "kind")
        self.link_errors = self._gauge(
            "link_errors", "What went wrong on the link since start.", "kind"
        )
        self.peer_age = self._gauge(
            "peer_heartbeat_age_seconds", "Time since a peer's heartbeat.", "role", "instance"
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def text(self) -> bytes:
        """Everything in the registry, in Prometheus' text form."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"antiphon_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_{name}", meaning, labels, registry=self.registry)
