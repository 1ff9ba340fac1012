"""Metrics of a whole model, aggregated from the reports of its processes, and their page.

Counters and histograms are summed over all incarnations of all processes, so that a restart lowers
none. Gauges are those of live processes, summed or averaged as the catalog says.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from antiphon.config.metrics import MetricsConfig, label_names, label_values
from antiphon.telemetry.catalog import FAMILIES, Kind, Merge, MetricSpec, SglangMetric, Side
from antiphon.wire.base import Process, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from antiphon.wire.heartbeat import MetricFamily, MetricSeries, MetricsReport
    from antiphon.wire.ids import ModelName

FRESH_S = 5.0
"""Maximum age of a report whose gauges count."""
PROCESSES_MAX = 512
PARTIAL_MAX = 64
"""Maximum number of processes with incomplete reports."""
FORGET_S = 60.0
"""How long a process must be silent before another one may take its place."""

_RANKS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
_WORKER, _RANK = "worker", "dp_rank"

Labels = tuple[str, ...]
SeriesKey = tuple[str, Labels, str, tuple[float, ...]]
"""Metric, labels, worker and histogram bounds."""


class Total(msgspec.Struct):
    """A series of the model."""

    labels: Labels
    worker: str  # its process, if processes are kept separate
    value: float = 0.0
    counts: tuple[float, ...] = ()  # of a histogram: cumulative per bound, the last is the total
    parts: int = 0


class FamilyTotal(NamedTuple):
    family: MetricSpec
    bounds: tuple[float, ...]
    series: list[Total]


class _Received(NamedTuple):
    report: MetricsReport  # the last of one incarnation of a process, with all parts
    at: float


class ModelMetrics:
    """Keeps the last report of each process, dead ones included: their counts are part of the sums.

    Args:
        config: Custom labels of request metrics, and whether workers are separate.
        model: Reports of other models are ignored.
        process: This gateway, whose report `own` returns.
        now: Clock of this process.
    """

    def __init__(
        self,
        config: MetricsConfig,
        model: ModelName,
        process: Process,
        now: Callable[[], float],
        own: Callable[[], MetricsReport],
    ) -> None:
        self.model = model
        self.custom = label_names(config.custom_labels)
        self.by_worker = config.by_worker
        self.rejected = 0
        """Number of unusable reports."""
        self._process = process
        self._now = now
        self._own = own
        self._received: OrderedDict[Process, _Received] = OrderedDict()
        self._parts: OrderedDict[Process, dict[int, MetricsReport]] = OrderedDict()
        self._folded: dict[SeriesKey, Total] = {}
        self._folded_lives: OrderedDict[Process, None] = OrderedDict()

    def take(self, report: MetricsReport) -> None:
        if report.process == self._process or report.model not in (None, self.model):
            return
        if (
            report.part >= report.parts
            or report.process in self._folded_lives
            or not self._has_room(report.process)
        ):
            self.rejected += 1
            return
        if (whole := self._join(report)) is not None:
            self._received[report.process] = _Received(whole, self._now())
            self._received.move_to_end(report.process)

    def ports(self) -> dict[str, int]:
        """Metrics ports of live processes, by name."""
        live = [*self._fresh(), self._own()]
        return dict(sorted((each.process.instance, each.metrics_port) for each in live))

    def totals(self) -> list[FamilyTotal]:
        """All metrics of the model, in the order of the catalog."""
        own = self._own()
        fresh = {report.process for report in (*self._fresh(), own)}
        sums = {key: msgspec.structs.replace(total) for key, total in self._folded.items()}
        for report in (*(report for report, _ in self._received.values()), own):
            self._add(sums, report, gauges=report.process in fresh)
        return list(_by_family(sums))

    def _join(self, report: MetricsReport) -> MetricsReport | None:
        """Return the whole report once all parts have arrived."""
        if report.parts == 1:
            self._parts.pop(report.process, None)
            return report
        parts = self._parts.setdefault(report.process, {})
        if any(part.number != report.number for part in parts.values()):
            parts.clear()
        parts[report.part] = report
        if len(parts) < report.parts:
            if len(self._parts) > PARTIAL_MAX:
                self._parts.popitem(last=False)
            return None
        del self._parts[report.process]
        families = tuple([one for part in sorted(parts) for one in parts[part].families])
        return msgspec.structs.replace(report, families=families)

    def _has_room(self, process: Process) -> bool:
        """Whether there is space for a process; the longest silent one may be removed."""
        if process in self._received or len(self._received) < PROCESSES_MAX:
            return True
        oldest, at = next(iter(self._received.values()))
        if self._now() - at < FORGET_S:
            return False
        del self._received[oldest.process]
        self._add(self._folded, oldest, gauges=False)
        self._folded_lives[oldest.process] = None
        if len(self._folded_lives) > PROCESSES_MAX:
            self._folded_lives.popitem(last=False)
        return True

    def _fresh(self) -> list[MetricsReport]:
        """The incarnations whose gauges count: the last one of each process."""
        since = self._now() - FRESH_S
        newest = {each.report.process.instance: each for each in self._received.values()}
        return [report for report, at in newest.values() if at >= since]

    def _add(self, sums: dict[SeriesKey, Total], report: MetricsReport, *, gauges: bool) -> None:
        worker = report.process.instance if self.by_worker and report.role is Role.WORKER else ""
        for given in report.families:
            family = FAMILIES.get(given.name)
            if family is None or (family.kind is Kind.GAUGE and not gauges):
                continue
            width = len(family.labels) + (len(self.custom) if family.custom else 0)
            for series in given.series:
                if not _usable(family, given, series, width):
                    self.rejected += 1
                    continue
                key = (family.name, series.labels, worker, given.bounds)
                total = sums.setdefault(key, Total(series.labels, worker))
                _merge(total, family, series)


def _usable(family: MetricSpec, given: MetricFamily, series: MetricSeries, width: int) -> bool:
    """Whether a series belongs to this metric: another version may have other labels."""
    buckets = len(given.bounds) + 1 if family.kind is Kind.HISTOGRAM else 0
    finite = math.isfinite(series.value) and all(map(math.isfinite, series.counts))
    return len(series.labels) == width and len(series.counts) == buckets and finite


def _merge(total: Total, family: MetricSpec, series: MetricSeries) -> None:
    if family.kind is Kind.GAUGE and family.merge is Merge.MAX:
        total.value = max(total.value, series.value) if total.parts else series.value
    else:
        total.value += series.value
    if series.counts:
        before = total.counts or (0.0,) * len(series.counts)
        total.counts = tuple([a + b for a, b in zip(before, series.counts, strict=True)])
    total.parts += 1


def _by_family(sums: dict[SeriesKey, Total]) -> Iterator[FamilyTotal]:
    """Group series by metric. Of several sets of histogram bounds the most common one is used."""
    found: dict[str, dict[tuple[float, ...], list[Total]]] = {}
    for (name, _, _, bounds), total in sums.items():
        found.setdefault(name, {}).setdefault(bounds, []).append(total)
    for name, family in FAMILIES.items():
        if name in found:
            bounds, series = max(
                found[name].items(), key=lambda each: sum(total.parts for total in each[1])
            )
            yield FamilyTotal(family, bounds, [_settled(family, total) for total in series])


def _settled(family: MetricSpec, total: Total) -> Total:
    if family.kind is Kind.GAUGE and family.merge is Merge.MEAN:
        return msgspec.structs.replace(total, value=total.value / total.parts, parts=1)
    return total


class Exposition:
    """`ModelMetrics` in the Prometheus format, under our names and SGLang's."""

    def __init__(self, metrics: ModelMetrics, extra_labels: str) -> None:
        self._metrics = metrics
        self._extra = label_values(extra_labels)

    def collect(self, private: bool) -> Iterator[Metric]:
        """Format all metrics of the model; per-tenant ones only if `private`."""
        totals = [each for each in self._metrics.totals() if private or not each.family.private]
        workers = sorted({one.worker for each in totals for one in each.series if one.worker})
        ranks = {worker: str(rank) for rank, worker in enumerate(workers)}
        for each in totals:
            yield self._ours(each)
        for each in totals:
            for view in each.family.sglang:
                counted = [one for one in each.series if _counts(each, view, one)]
                if counted:
                    yield self._theirs(each, view, counted, ranks)

    def _custom(self, each: FamilyTotal) -> tuple[str, ...]:
        return self._metrics.custom if each.family.custom else ()

    def _ours(self, each: FamilyTotal) -> Metric:
        names = (*each.family.labels, *self._custom(each))
        separate = (_WORKER,) if self._metrics.by_worker and _WORKER not in names else ()
        rows = [
            (
                {**self._extra, **dict(zip(names, one.labels, strict=True))}
                | dict.fromkeys(separate, one.worker),
                one.value,
                one.counts,
            )
            for one in each.series
        ]
        return _family(each, each.family.full_name, rows)

    def _theirs(
        self,
        each: FamilyTotal,
        view: SglangMetric,
        series: Sequence[Total],
        ranks: Mapping[str, str],
    ) -> Metric:
        # Series that are the same under SGLang's labels are one.
        same: dict[tuple[tuple[str, str], ...], list[Total]] = {}
        for one in series:
            key = tuple(self._labels(each, view, one, ranks).items())
            same.setdefault(key, []).append(one)
        rows = [
            (
                dict(key),
                _merged(each, [one.value for one in found]) * view.scale,
                tuple([sum(column) for column in zip(*[one.counts for one in found], strict=True)]),
            )
            for key, found in same.items()
        ]
        return _family(each, f"sglang:{view.name}", rows)

    def _labels(
        self, each: FamilyTotal, view: SglangMetric, one: Total, ranks: Mapping[str, str]
    ) -> dict[str, str]:
        """SGLang's labels of one of our series."""
        labels = dict(self._extra)
        if view.side is not Side.PLAIN:
            labels["model_name"] = self._metrics.model
        if view.side is Side.SCHEDULER:
            labels |= {**_RANKS, _RANK: ranks.get(one.worker, "0")}
        custom = self._custom(each)
        given = dict(zip((*each.family.labels, *custom), one.labels, strict=True))
        kept = (*view.labels, *custom)
        return labels | {name: given[name] for name in kept} | dict(view.fixed)


def _counts(each: FamilyTotal, view: SglangMetric, one: Total) -> bool:
    """Whether SGLang's metric includes one of our series."""
    if view.only is None:
        return True
    label, value = view.only
    return one.labels[each.family.labels.index(label)] == value


def _merged(each: FamilyTotal, values: list[float]) -> float:
    match (each.family.kind, each.family.merge):
        case (Kind.GAUGE, Merge.MEAN):
            return sum(values) / len(values)
        case (Kind.GAUGE, Merge.MAX):
            return max(values)
        case _:
            return sum(values)


def _family(
    each: FamilyTotal,
    name: str,
    rows: Sequence[tuple[Mapping[str, str], float, tuple[float, ...]]],
) -> Metric:
    help_ = each.family.help
    names = sorted(rows[0][0])
    if each.family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, help_, labels=names)
        bounds = [*map(str, each.bounds), "+Inf"]
        for labels, value, counts in rows:
            buckets = list(zip(bounds, counts, strict=True))
            histogram.add_metric([labels[key] for key in names], buckets, sum_value=value)
        return histogram
    kind = CounterMetricFamily if each.family.kind is Kind.COUNTER else GaugeMetricFamily
    numbers = kind(name, help_, labels=names)
    for labels, value, _ in rows:
        numbers.add_metric([labels[key] for key in names], value)
    return numbers
