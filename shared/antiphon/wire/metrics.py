"""The numbers of one process for the gateways, which put those of a model together."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Process, Role, Value
from antiphon.wire.bounds import Count, Finite, Port
from antiphon.wire.ids import ModelName

FAMILIES_MAX = 256
SERIES_MAX = 1024
"""Of one metric in one process."""
BUCKETS_MAX = 256
PARTS_MAX = 64
"""Of one report."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=512)]
Labels = Annotated[tuple[Label, ...], Meta(max_length=32)]
Bounds = Annotated[tuple[Finite, ...], Meta(max_length=BUCKETS_MAX)]


class MetricSeries(Value):
    """One series of a metric, since the process began.

    Attributes:
        labels: Values of the metric's labels, in its own order.
        value: Of a counter or a gauge; of a histogram the sum of what was observed.
        counts: Of a histogram: how much was observed at or below each bound, the last one all.
    """

    labels: Labels = ()
    value: Finite = 0.0
    counts: Bounds = ()


class MetricFamily(Value):
    """One metric of a process; its type, labels and meaning stand in the catalog of metrics.

    Attributes:
        bounds: Upper bounds of a histogram's buckets, without the infinite one.
    """

    name: Name
    series: Annotated[tuple[MetricSeries, ...], Meta(max_length=SERIES_MAX)] = ()
    bounds: Bounds = ()


class MetricsReport(Message):
    """All that a process has counted so far; each second.

    It is whole each time, so that a lost one does no harm and a gateway that joins knows all. One
    that is too large for a message comes in parts; a metric may stand in several of them.

    Attributes:
        model: The model that it serves, if it serves one.
        metrics_port: Where it answers `/metrics` itself.
        number: Counts the reports of a process; the parts of a report have the same one.
        part: Which part of the report this is, from 0.
        parts: How many there are.
    """

    role: Role
    process: Process
    model: ModelName | None = None
    metrics_port: Port = 0
    families: Annotated[tuple[MetricFamily, ...], Meta(max_length=FAMILIES_MAX)] = ()
    number: Count = 0
    part: Annotated[int, Meta(ge=0, lt=PARTS_MAX)] = 0
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX)] = 1
