"""The metrics of a whole model: what its processes report, put together as one page.

Counters and histograms are added over all lives of all processes, so that a restart lowers none.
Gauges are those of the processes that live, added or averaged as the catalog says.
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
"""How old a report may be whose gauges count."""
PROCESSES_MAX = 512
PARTIAL_MAX = 64
"""Processes of whose reports some parts are awaited."""
FORGET_S = 60.0
"""How long a process must have been silent to make room for another one."""

Labels = tuple[str, ...]


class Total(msgspec.Struct):
    """A series of the model. Of a histogram `counts` are at or below each bound, the last one all.

    Attributes:
        worker: The process that it is of, where processes are told apart.
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
    """One life of a process, as it last reported."""

    role: Role
    process: Process
    families: tuple[MetricFamily, ...]
    metrics_port: int
    at: float


class _Parts(msgspec.Struct):
    """The parts of one report that have come."""

    number: int
    families: dict[int, tuple[MetricFamily, ...]]


class ModelMetrics:
    """Keeps the last report of each process, dead ones too: their counts are part of the sum.

    Args:
        model: Reports of other models are not for this page.
        process: This gateway.
        now: The clock of this process.
        own: This gateway's own report, made when it is needed.
        by_worker: Whether the metrics of workers are told apart.
        custom: How many labels of their own requests have, beside the catalog's.
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
        self._lives: OrderedDict[Process, _ProcessReport] = OrderedDict()
        self._parts: OrderedDict[Process, _Parts] = OrderedDict()
        self._folded: dict[tuple[str, Labels, str, tuple[float, ...]], Total] = {}
        self._folded_lives: OrderedDict[Process, None] = OrderedDict()
        self.refused = 0
        """Reports that could not be used."""

    def take(self, report: MetricsReport) -> None:
        """Take in the report of another process."""
        if report.process == self._process or report.model not in (None, self._model):
            return
        if (
            report.part >= report.parts
            or report.process in self._folded_lives
            or not self._has_room(report.process)
        ):
            self.refused += 1
            return
        families = self._join(report)
        if families is not None:
            self._put(report, families)

    def ports(self) -> dict[str, int]:
        """Where each process that lives answers `/metrics` itself, by its name."""
        own = self._own()
        live = {str(life.process.instance): life.metrics_port for life in self._fresh()}
        return dict(sorted({**live, own.process.instance: own.metrics_port}.items()))

    def totals(self) -> list[FamilyTotal]:
        """All metrics of the model as they are now, in the order of the catalog."""
        own = self._own()
        now = self._now()
        lives = [*self._lives.values(), _ProcessReport(own.role, own.process, own.families, 0, now)]
        fresh = {id(life) for life in (*self._fresh(), lives[-1])}
        sums = {key: msgspec.structs.replace(total) for key, total in self._folded.items()}
        for life in lives:
            for given in life.families:
                family = FAMILIES.get(given.name)
                if family is None or (family.kind is Kind.GAUGE and id(life) not in fresh):
                    continue
                self._add(sums, family, given, life)
        return list(_by_family(sums))

    def _join(self, report: MetricsReport) -> tuple[MetricFamily, ...] | None:
        """The metrics of a report, once all of its parts have come."""
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
        self._lives[report.process] = _ProcessReport(
            report.role, report.process, families, report.metrics_port, self._now()
        )
        self._lives.move_to_end(report.process)

    def _has_room(self, process: Process) -> bool:
        """Whether there is room for a process; the one that is silent longest may make some."""
        if process in self._lives or len(self._lives) < PROCESSES_MAX:
            return True
        oldest = next(iter(self._lives.values()))
        if self._now() - oldest.at < FORGET_S:
            return False
        del self._lives[oldest.process]
        for given in oldest.families:
            family = FAMILIES.get(given.name)
            if family is not None and family.kind is not Kind.GAUGE:
                self._add(self._folded, family, given, oldest)
        self._folded_lives[oldest.process] = None
        if len(self._folded_lives) > PROCESSES_MAX:
            self._folded_lives.popitem(last=False)
        return True

    def _fresh(self) -> list[_ProcessReport]:
        """The lives whose gauges count: of each process the one that reported last."""
        since = self._now() - FRESH_S
        newest = {life.process.instance: life for life in self._lives.values()}
        return [life for life in newest.values() if life.at >= since]

    def _add(
        self,
        sums: dict[tuple[str, Labels, str, tuple[float, ...]], Total],
        family: MetricSpec,
        given: MetricFamily,
        life: _ProcessReport,
    ) -> None:
        width = len(family.labels) + (self._custom if family.custom else 0)
        worker = life.process.instance if self._by_worker and life.role is Role.WORKER else ""
        for series in given.series:
            if not _usable(family, given, series, width):
                self.refused += 1
                continue
            key = (family.name, series.labels, worker, given.bounds)
            total = sums.setdefault(key, Total(series.labels, worker))
            _merge(total, family, series)


def _usable(family: MetricSpec, given: MetricFamily, series: MetricSeries, width: int) -> bool:
    """Whether a series is one of this metric: another version may have other labels."""
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
    """Group series by metric. Of a histogram with several sets of bounds the commonest is shown."""
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
