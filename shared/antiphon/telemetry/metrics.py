"""The numbers of a process, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

_HANDLER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0, 30.0)


class Metrics:
    """What the run loop counts. A service adds its own to `registry`, named `antiphon_<service>_*`.

    Not module globals: several services live in one test process, each with numbers of its own.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._settling = _Settling()
        self.registry.register(self._settling)  # first, so that what follows is read settled
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
        self.messages_refused = self._counter(
            "messages_refused",
            "Messages dropped, by reason.",
            "route",
            "reason",
        )
        self.gaps = self._counter("gaps", "Losses seen in a sequence.", "route")
        self.bus_errors = self._counter("bus_errors", "Messages that were not sent.", "kind")
        self.link_errors = self._gauge(
            "link_errors", "What went wrong on the link since start.", "kind"
        )
        self.peer_age = self._gauge(
            "peer_heartbeat_age_seconds", "Time since a peer's heartbeat.", "role", "instance"
        )
        self.peers_refused = self._counter(
            "peers_refused", "Heartbeats that do not count, by what is wrong with them.", "reason"
        )
        self.late = self._counter(
            "late_messages", "Messages that came too late, or by a clock not known here.", "route"
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def settle_with(self, settle: Callable[[], None]) -> None:
        """Call `settle` whenever the numbers are read, to show what was only noted until then.

        To count for Prometheus takes ten calls and a lock: too much for each message or tick.
        """
        self._settling.calls.append(settle)

    def text(self) -> bytes:
        """Everything in the registry, in Prometheus' text form."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"antiphon_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_{name}", meaning, labels, registry=self.registry)


class _Settling(Collector):
    """Has no numbers of its own."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def collect(self) -> Iterable[Metric]:
        for settle in self.calls:
            settle()
        return ()
