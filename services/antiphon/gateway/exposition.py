"""Metrics of a model in the Prometheus format, under our names and SGLang's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from antiphon.config.metrics import label_names, label_values
from antiphon.gateway.model_metrics import ModelMetrics
from antiphon.telemetry.catalog import Kind, Merge, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from antiphon.config.metrics import MetricsConfig
    from antiphon.gateway.model_metrics import FamilyTotal, Total
    from antiphon.telemetry.catalog import SglangMetric
    from antiphon.wire.base import Process
    from antiphon.wire.ids import ModelName
    from antiphon.wire.metrics import MetricsReport

_RANKS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
_WORKER, _RANK = "worker", "dp_rank"

Key = tuple[tuple[str, str], ...]


class _Sum(NamedTuple):
    """Series that are the same under SGLang's labels."""

    values: list[float]
    counts: list[tuple[float, ...]]


class Exposition:
    """Formats the content of `ModelMetrics`.

    Args:
        model: Name of the model, for SGLang's label.
        metrics: The metrics.
        custom: Names of custom labels.
        extra: Labels that are added to every series.
        by_worker: Whether to keep the metrics of workers separate.
    """

    def __init__(
        self,
        model: str,
        metrics: ModelMetrics,
        *,
        custom: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        by_worker: bool = False,
    ) -> None:
        self._model = model
        self.metrics = metrics
        self._custom = tuple(custom)
        self._extra = dict(extra or {})
        self._by_worker = by_worker

    @classmethod
    def of(
        cls,
        config: MetricsConfig,
        model: ModelName,
        process: Process,
        now: Callable[[], float],
        own: Callable[[], MetricsReport],
    ) -> Self:
        """Create the page of a gateway, which is `process`; see `ModelMetrics`."""
        names, by_worker = label_names(config.custom_labels), config.by_worker
        metrics = ModelMetrics(model, process, now, own, by_worker=by_worker, custom=len(names))
        extra = label_values(config.extra_labels)
        return cls(model, metrics, custom=names, extra=extra, by_worker=by_worker)

    def collect(self, private: bool) -> Iterator[Metric]:
        """Format all metrics of the model; per-tenant ones only if `private`."""
        totals = [each for each in self.metrics.totals() if private or not each.family.private]
        workers = sorted({one.worker for each in totals for one in each.series if one.worker})
        ranks = {worker: str(rank) for rank, worker in enumerate(workers)}
        for each in totals:
            yield self._ours(each)
        for each in totals:
            for view in each.family.sglang:
                counted = [one for one in each.series if _counts(each, view, one)]
                if counted:
                    yield self._theirs(each, view, counted, ranks)

    def _names(self, each: FamilyTotal) -> tuple[str, ...]:
        return (*each.family.labels, *(self._custom if each.family.custom else ()))

    def _ours(self, each: FamilyTotal) -> Metric:
        names = self._names(each)
        separate = (_WORKER,) if self._by_worker and _WORKER not in names else ()
        rows = [
            (
                {**self._extra, **dict(zip(names, one.labels, strict=True))}
                | dict.fromkeys(separate, one.worker),
                one.value,
                one.counts,
            )
            for one in each.series
        ]
        return _family(each, each.family.full_name, each.family.help, rows)

    def _theirs(
        self,
        each: FamilyTotal,
        view: SglangMetric,
        series: Sequence[Total],
        ranks: Mapping[str, str],
    ) -> Metric:
        sums: dict[Key, _Sum] = {}
        for one in series:
            key = tuple(self._labels(each, view, one, ranks).items())
            sums.setdefault(key, _Sum([], [])).values.append(one.value)
            sums[key].counts.append(one.counts)
        rows = [
            (dict(key), _merged(each, found.values) * view.scale, _added(found.counts))
            for key, found in sums.items()
        ]
        return _family(each, f"sglang:{view.name}", each.family.help, rows)

    def _labels(
        self, each: FamilyTotal, view: SglangMetric, one: Total, ranks: Mapping[str, str]
    ) -> dict[str, str]:
        """SGLang's labels of one of our series."""
        labels = dict(self._extra)
        if view.side is not Side.PLAIN:
            labels["model_name"] = self._model
        if view.side is Side.SCHEDULER:
            labels |= {**_RANKS, _RANK: ranks.get(one.worker, "0")}
        given = dict(zip(self._names(each), one.labels, strict=True))
        kept = (*view.labels, *(self._custom if each.family.custom else ()))
        return labels | {name: given[name] for name in kept} | dict(view.fixed)


def _counts(each: FamilyTotal, view: SglangMetric, one: Total) -> bool:
    """Whether SGLang's metric includes one of our series."""
    if view.only is None:
        return True
    label, value = view.only
    return one.labels[each.family.labels.index(label)] == value


def _merged(each: FamilyTotal, values: list[float]) -> float:
    if each.family.kind is Kind.GAUGE and each.family.merge is Merge.MEAN:
        return sum(values) / len(values)
    if each.family.kind is Kind.GAUGE and each.family.merge is Merge.MAX:
        return max(values)
    return sum(values)


def _added(counts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple([sum(column) for column in zip(*counts, strict=True)])


def _family(
    each: FamilyTotal,
    name: str,
    help_: str,
    rows: Iterable[tuple[Mapping[str, str], float, tuple[float, ...]]],
) -> Metric:
    rows = list(rows)
    names = sorted(rows[0][0])
    match each.family.kind:
        case Kind.HISTOGRAM:
            made = HistogramMetricFamily(name, help_, labels=names)
            bounds = [*map(str, each.bounds), "+Inf"]
            for labels, value, counts in rows:
                buckets = list(zip(bounds, counts, strict=True))
                made.add_metric([labels[key] for key in names], buckets, sum_value=value)
            return made
        case Kind.COUNTER:
            counter = CounterMetricFamily(name, help_, labels=names)
            for labels, value, _ in rows:
                counter.add_metric([labels[key] for key in names], value)
            return counter
        case Kind.GAUGE:
            gauge = GaugeMetricFamily(name, help_, labels=names)
            for labels, value, _ in rows:
                gauge.add_metric([labels[key] for key in names], value)
            return gauge
