"""The numbers of a process, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from antiphon.telemetry import catalog
from antiphon.telemetry.catalog import Kind, MetricSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

disable_created_metrics()  # a series for each counter and histogram that says only when it began

_HANDLER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0, 30.0)


class Series(NamedTuple):
    """One series of a metric: its label values, and what it has come to.

    `counts` are those of a histogram at or below each bound, the infinite one last, and `value` is
    its sum then.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[float, ...] = ()


class Published(NamedTuple):
    """A metric of the catalog as this process has it."""

    family: MetricSpec
    labels: tuple[str, ...]
    """Those of the catalog, and the custom ones."""
    bounds: tuple[float, ...]
    series: tuple[Series, ...]


class Metrics:
    """The metrics of one process.

    Those of the catalog describe the model and are published for the gateways; others are the
    process's own. Not module globals: several services live in one test process, each with numbers
    of its own.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._collect_hooks = _CollectHooks()
        self.registry.register(self._collect_hooks)  # first, so that what follows is read settled
        self._shared: dict[str, _Shared] = {}
        self._model_view: Callable[[bool], Iterable[Metric]] | None = None
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
        self.messages_refused = self.counter(catalog.MESSAGES_REFUSED)
        self.gaps = self.counter(catalog.GAPS)
        self.bus_errors = self.counter(catalog.BUS_ERRORS)
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

    def counter(self, family: MetricSpec, *custom: str) -> Counter:
        """Register a counter of the catalog, with these labels beside its own."""
        labels = (*family.labels, *custom)
        made = Counter(family.full_name, family.help, labels, registry=self.registry)
        self._shared[family.name] = _Shared(family, labels, (), made)
        return made

    def gauge(self, family: MetricSpec) -> Gauge:
        """Register a gauge of the catalog."""
        made = Gauge(family.full_name, family.help, family.labels, registry=self.registry)
        self._shared[family.name] = _Shared(family, family.labels, (), made)
        return made

    def histogram(
        self, family: MetricSpec, *custom: str, buckets: tuple[float, ...] = ()
    ) -> Histogram:
        """Register a histogram of the catalog, with other buckets than its own if any are given."""
        labels, bounds = (*family.labels, *custom), buckets or family.buckets
        made = Histogram(
            family.full_name, family.help, labels, registry=self.registry, buckets=bounds
        )
        self._shared[family.name] = _Shared(family, labels, bounds, made)
        return made

    def before_collect(self, settle: Callable[[], None]) -> None:
        """Call `settle` whenever the numbers are read, to show what was only noted until then.

        To count for Prometheus takes ten calls and a lock: too much for each message or tick.
        """
        self._collect_hooks.calls.append(settle)

    def published(self) -> list[Published]:
        """Read the metrics of the catalog that this process has counted something in."""
        self._collect_hooks.collect()
        read = (shared.read() for shared in self._shared.values())
        return [each for each in read if each.series]

    def show(self, model_view: Callable[[bool], Iterable[Metric]]) -> None:
        """Put the metrics of the model in place of this process's own part of them.

        It is called with whether those that name tenants are shown.
        """
        self._model_view = model_view

    def text(self, *, private: bool = False) -> bytes:
        """Write everything in Prometheus' text form; what names tenants only if `private`."""
        return generate_latest(_Page(self._families(private=private)))

    def _families(self, *, private: bool) -> Iterator[Metric]:
        shown = {
            name.removesuffix("_total")
            for shared in self._shared.values()
            if self._model_view is not None or (shared.family.private and not private)
            for name in (shared.family.full_name,)
        }
        yield from (metric for metric in self.registry.collect() if metric.name not in shown)
        if self._model_view is not None:
            yield from self._model_view(private)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"antiphon_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_{name}", meaning, labels, registry=self.registry)


class _Shared(NamedTuple):
    family: MetricSpec
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    metric: Counter | Gauge | Histogram

    def read(self) -> Published:
        """Read all series, without those of counters and histograms that are still at zero."""
        counts: dict[tuple[str, ...], list[float]] = {}
        values: dict[tuple[str, ...], float] = {}
        for collected in self.metric.collect():
            for sample in collected.samples:
                labels = tuple([sample.labels[name] for name in self.labels])
                if sample.name.endswith("_bucket"):
                    counts.setdefault(labels, []).append(sample.value)
                elif not sample.name.endswith("_count") or not self.bounds:
                    values[labels] = sample.value
        idle = self.family.kind is not Kind.GAUGE and bool(self.labels)
        series = [
            Series(labels, value, tuple(counts.get(labels, ())))
            for labels, value in values.items()
            if value or not idle
        ]
        return Published(self.family, self.labels, self.bounds, tuple(series))


class _Page:
    """Metrics that were collected, as `generate_latest` takes a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _CollectHooks(Collector):
    """Has no numbers of its own."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def collect(self) -> Iterable[Metric]:
        for settle in self.calls:
            settle()
        return ()
