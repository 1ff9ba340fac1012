"""Prometheus metrics of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
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


disable_created_metrics()  # an extra series per counter and histogram, with its creation time

_HANDLER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0, 30.0)


class Series(NamedTuple):
    """One series of a metric: its label values and its current value.

    For a histogram, `counts` are cumulative counts per bound, the infinite one last, and `value` is
    the sum.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[float, ...] = ()


class Published(NamedTuple):
    family: MetricSpec
    labels: tuple[str, ...]
    """Labels of the catalog, then custom ones."""
    bounds: tuple[float, ...]
    series: tuple[Series, ...]


class Metrics:
    """The metrics of one process.

    Those of the catalog describe the model and are published to the gateways; others are the
    process's own. Not module globals: several services run in one test process, each with its own
    metrics.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._collect_hooks = _CollectHooks()
        self.registry.register(self._collect_hooks)  # first: hooks run before metrics are read
        self._shared: dict[str, _Shared] = {}
        self._model_view: Callable[[bool], Iterable[Metric]] | None = None
        self.calls = self._counter("calls", "Calls with a reply.", "route", "outcome")
        self.call_seconds = Histogram(
            "antiphon_call_seconds",
            "Time from accepting a call to its reply.",
            ("route",),
            registry=self.registry,
            buckets=_HANDLER_BUCKETS_S,
        )
        self.calls_open = self._gauge("calls_open", "Accepted calls without a reply.", "route")
        self.refused = self._counter(
            "refused", "Calls rejected without decoding, by error.", "route", "reason"
        )
        self.messages = self._counter("messages", "Feed messages applied.", "route")
        self.messages_refused = self.counter(catalog.MESSAGES_REFUSED)
        self.gaps = self.counter(catalog.GAPS)
        self.bus_errors = self.counter(catalog.BUS_ERRORS)
        self.link_errors = self._gauge(
            "link_errors", "Background errors of the link to the broker, by kind.", "kind"
        )
        self.peer_age = self._gauge(
            "peer_heartbeat_age_seconds", "Time since a peer's last heartbeat.", "role", "instance"
        )
        self.peers_refused = self._counter(
            "peers_refused", "Rejected heartbeats, by reason.", "reason"
        )
        self.late = self._counter(
            "late_messages", "Messages that expired, or whose sender's clock is unknown.", "route"
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def counter(self, family: MetricSpec, *custom: str) -> Counter:
        labels = (*family.labels, *custom)
        metric = Counter(family.full_name, family.help, labels, registry=self.registry)
        self._shared[family.name] = _Shared(family, labels, (), metric)
        return metric

    def gauge(self, family: MetricSpec) -> Gauge:
        metric = Gauge(family.full_name, family.help, family.labels, registry=self.registry)
        self._shared[family.name] = _Shared(family, family.labels, (), metric)
        return metric

    def histogram(
        self, family: MetricSpec, *custom: str, buckets: tuple[float, ...] = ()
    ) -> Histogram:
        labels, bounds = (*family.labels, *custom), buckets or family.buckets
        metric = Histogram(
            family.full_name, family.help, labels, registry=self.registry, buckets=bounds
        )
        self._shared[family.name] = _Shared(family, labels, bounds, metric)
        return metric

    def before_collect(self, settle: Callable[[], None]) -> None:
        """Call `settle` before metrics are read, to transfer values that were counted elsewhere."""
        # Updating a Prometheus metric takes ten calls and a lock: too much for each message or
        # tick.
        self._collect_hooks.calls.append(settle)

    def published(self) -> list[Published]:
        """Return the metrics of the catalog that have series in this process."""
        self._collect_hooks.collect()
        read = (shared.read() for shared in self._shared.values())
        return [each for each in read if each.series]

    def show(self, model_view: Callable[[bool], Iterable[Metric]]) -> None:
        """Serve the metrics of the whole model in place of this process's part of them.

        `model_view` is called with whether to include metrics that name tenants.
        """
        self._model_view = model_view

    def text(self, *, private: bool = False) -> bytes:
        """Format all metrics in Prometheus' text format; those with tenants only if `private`."""
        return generate_latest(_Page(self._families(private=private)))

    def _families(self, *, private: bool) -> Iterator[Metric]:
        shown = {
            shared.family.full_name.removesuffix("_total")
            for shared in self._shared.values()
            if self._model_view is not None or (shared.family.private and not private)
        }
        yield from (metric for metric in self.registry.collect() if metric.name not in shown)
        if self._model_view is not None:
            yield from self._model_view(private)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"antiphon_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_{name}", meaning, labels, registry=self.registry)


class RunningTotal:
    """A counter that follows a running total, which is counted elsewhere."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def follow(self, total: int) -> None:
        self._counter.inc(total - self._seen)
        self._seen = total


class _Shared(NamedTuple):
    family: MetricSpec
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    metric: Counter | Gauge | Histogram

    def read(self) -> Published:
        """Return all series, without counters and histograms that are still zero."""
        counts: dict[tuple[str, ...], list[float]] = {}
        values: dict[tuple[str, ...], float] = {}
        for collected in self.metric.collect():
            for sample in collected.samples:
                labels = tuple([sample.labels[name] for name in self.labels])
                if sample.name.endswith("_bucket"):
                    counts.setdefault(labels, []).append(sample.value)
                elif not sample.name.endswith("_count") or not self.bounds:
                    values[labels] = sample.value
        skips_zero = self.family.kind is not Kind.GAUGE and bool(self.labels)
        series = [
            Series(labels, value, tuple(counts.get(labels, ())))
            for labels, value in values.items()
            if value or not skips_zero
        ]
        return Published(self.family, self.labels, self.bounds, tuple(series))


class _Page:
    """Collected metrics, with the interface of a registry for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _CollectHooks(Collector):
    """Runs the hooks of `before_collect`; has no metrics of its own."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def collect(self) -> Iterable[Metric]:
        for settle in self.calls:
            settle()
        return ()
