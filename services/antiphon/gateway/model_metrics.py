"""Metrics of a whole model, aggregated from the reports of its processes.

Counters and histograms are summed over all incarnations of all processes, so that a restart lowers
none. Gauges are those of live processes, summed or averaged as the catalog says.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from antiphon.telemetry.catalog import FAMILIES, Kind, Merge
from antiphon.wire.base import Process, Role
from antiphon.wire.metrics import MetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from antiphon.telemetry.catalog import MetricSpec
    from antiphon.wire.ids import ModelName
    from antiphon.wire.metrics import MetricSeries, MetricsReport

FRESH_S = 5.0
"""Maximum age of a report whose gauges count."""
PROCESSES_MAX = 512
PARTIAL_MAX = 64
"""Maximum number of processes with incomplete reports."""
FORGET_S = 60.0
"""How long a process must be silent before another one may take its place."""

Labels = tuple[str, ...]


class Total(msgspec.Struct):
    """A series of the model.

    For a histogram `counts` are cumulative per bound, the last one is the total.

    Attributes:
        worker: Its process, if processes are kept separate.
    """

    labels: Labels
    worker: str
    value: float = 0.0
    counts: tuple[float, ...] = ()
    parts: int = 0


class FamilyTotal(NamedTuple):
    """A metric of the model."""

    family: MetricSpec
    bounds: tuple[float, ...]
    series: list[Total]


class _ProcessReport(msgspec.Struct):
    """The last report of one incarnation of a process."""

    role: Role
    process: Process
    families: tuple[MetricFamily, ...]
    metrics_port: int
    at: float


class _Parts(msgspec.Struct):
    """The received parts of one report."""

    number: int
    families: dict[int, tuple[MetricFamily, ...]]


class ModelMetrics:
    """Keeps the last report of each process, dead ones included: their counts are part of the sums.

    Args:
        model: Reports of other models are ignored.
        process: This gateway.
        now: Clock of this process.
        own: Returns this gateway's own report.
        by_worker: Whether to keep the metrics of workers separate.
        custom: Number of custom labels of request metrics.
    """

    def __init__(
        self,
        model: ModelName,
        process: Process,
        now: Callable[[], float],
        own: Callable[[], MetricsReport],
        *,
        by_worker: bool = False,
        custom: int = 0,
    ) -> None:
        self._model = model
        self._process = process
        self._now = now
        self._own = own
        self._by_worker = by_worker
        self._custom = custom
        self._reports: OrderedDict[Process, _ProcessReport] = OrderedDict()
        self._parts: OrderedDict[Process, _Parts] = OrderedDict()
        self._folded: dict[tuple[str, Labels, str, tuple[float, ...]], Total] = {}
        self._folded_lives: OrderedDict[Process, None] = OrderedDict()
        self.rejected = 0
        """Number of unusable reports."""

    def take(self, report: MetricsReport) -> None:
        """Add the report of another process."""
        if report.process == self._process or report.model not in (None, self._model):
            return
        if (
            report.part >= report.parts
            or report.process in self._folded_lives
            or not self._has_room(report.process)
        ):
            self.rejected += 1
            return
        families = self._join(report)
        if families is not None:
            self._put(report, families)

    def ports(self) -> dict[str, int]:
        """Metrics ports of live processes, by name."""
        own = self._own()
        live = {str(report.process.instance): report.metrics_port for report in self._fresh()}
        return dict(sorted({**live, own.process.instance: own.metrics_port}.items()))

    def totals(self) -> list[FamilyTotal]:
        """All metrics of the model, in the order of the catalog."""
        own = self._own()
        now = self._now()
        reports = [
            *self._reports.values(),
            _ProcessReport(own.role, own.process, own.families, 0, now),
        ]
        fresh = {id(report) for report in (*self._fresh(), reports[-1])}
        sums = {key: msgspec.structs.replace(total) for key, total in self._folded.items()}
        for report in reports:
            for given in report.families:
                family = FAMILIES.get(given.name)
                if family is None or (family.kind is Kind.GAUGE and id(report) not in fresh):
                    continue
                self._add(sums, family, given, report)
        return list(_by_family(sums))

    def _join(self, report: MetricsReport) -> tuple[MetricFamily, ...] | None:
        """Return the metrics of a report once all parts have arrived."""
        if report.parts == 1:
            self._parts.pop(report.process, None)
            return report.families
        found = self._parts.setdefault(report.process, _Parts(report.number, {}))
        if found.number != report.number:
            found.number, found.families = report.number, {}
        found.families[report.part] = report.families
        if len(found.families) < report.parts:
            if len(self._parts) > PARTIAL_MAX:
                self._parts.popitem(last=False)
            return None
        del self._parts[report.process]
        return tuple([one for part in sorted(found.families) for one in found.families[part]])

    def _put(self, report: MetricsReport, families: tuple[MetricFamily, ...]) -> None:
        self._reports[report.process] = _ProcessReport(
            report.role, report.process, families, report.metrics_port, self._now()
        )
        self._reports.move_to_end(report.process)

    def _has_room(self, process: Process) -> bool:
        """Whether there is space for a process; the longest silent one may be removed."""
        if process in self._reports or len(self._reports) < PROCESSES_MAX:
            return True
        oldest = next(iter(self._reports.values()))
        if self._now() - oldest.at < FORGET_S:
            return False
        del self._reports[oldest.process]
        for given in oldest.families:
            family = FAMILIES.get(given.name)
            if family is not None and family.kind is not Kind.GAUGE:
                self._add(self._folded, family, given, oldest)
        self._folded_lives[oldest.process] = None
        if len(self._folded_lives) > PROCESSES_MAX:
            self._folded_lives.popitem(last=False)
        return True

    def _fresh(self) -> list[_ProcessReport]:
        """The incarnations whose gauges count: the last one of each process."""
        since = self._now() - FRESH_S
        newest = {report.process.instance: report for report in self._reports.values()}
        return [report for report in newest.values() if report.at >= since]

    def _add(
        self,
        sums: dict[tuple[str, Labels, str, tuple[float, ...]], Total],
        family: MetricSpec,
        given: MetricFamily,
        report: _ProcessReport,
    ) -> None:
        width = len(family.labels) + (self._custom if family.custom else 0)
        worker = report.process.instance if self._by_worker and report.role is Role.WORKER else ""
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


def _by_family(
    sums: dict[tuple[str, Labels, str, tuple[float, ...]], Total],
) -> Iterator[FamilyTotal]:
    """Group series by metric. Of several sets of histogram bounds the most common one is used."""
    found: dict[str, dict[tuple[float, ...], list[Total]]] = {}
    for (name, _, _, bounds), total in sums.items():
        found.setdefault(name, {}).setdefault(bounds, []).append(total)
    for name, family in FAMILIES.items():
        if name in found:
            bounds, series = max(found[name].items(), key=lambda each: _parts(each[1]))
            yield FamilyTotal(family, bounds, [_settled(family, total) for total in series])


def _parts(series: Iterable[Total]) -> int:
    return sum(total.parts for total in series)


def _settled(family: MetricSpec, total: Total) -> Total:
    if family.kind is Kind.GAUGE and family.merge is Merge.MEAN:
        return msgspec.structs.replace(total, value=total.value / total.parts, parts=1)
    return total
