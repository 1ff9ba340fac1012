"""Metrics of one process, sent to the gateways, which merge those of a model."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Process, Role, Value
from antiphon.wire.bounds import Count, Finite, Port
from antiphon.wire.ids import ModelName

FAMILIES_MAX = 256
SERIES_MAX = 1024
"""Maximum series of one metric in one process."""
BUCKETS_MAX = 256
PARTS_MAX = 64
"""Maximum parts of one report."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=512)]
Labels = Annotated[tuple[Label, ...], Meta(max_length=32)]
Bounds = Annotated[tuple[Finite, ...], Meta(max_length=BUCKETS_MAX)]


class MetricSeries(Value):
    """One series of a metric, since the process started.

    Attributes:
        labels: Label values, in the order of the metric's label names.
        value: Value of a counter or gauge; sum of a histogram's observations.
        counts: Cumulative counts of a histogram's buckets, the last one of all observations.
    """

    labels: Labels = ()
    value: Finite = 0.0
    counts: Bounds = ()


class MetricFamily(Value):
    """One metric of a process; the metrics catalog has its type, label names and help text.

    Attributes:
        bounds: Upper bounds of a histogram's buckets, without the infinite one.
    """

    name: Name
    series: Annotated[tuple[MetricSeries, ...], Meta(max_length=SERIES_MAX)] = ()
    bounds: Bounds = ()


class MetricsReport(Message):
    """All metrics of a process, sent each second.

    Each report is complete, so a lost one does no harm and a new gateway is up to date at once. A
    report too large for one message is split; a metric may be in several parts.

    Attributes:
        metrics_port: Port of its own `/metrics` endpoint.
        number: Number of the report, the same in all of its parts.
        part: Index of this part, from 0.
    """

    role: Role
    process: Process
    model: ModelName | None = None
    metrics_port: Port = 0
    families: Annotated[tuple[MetricFamily, ...], Meta(max_length=FAMILIES_MAX)] = ()
    number: Count = 0
    part: Annotated[int, Meta(ge=0, lt=PARTS_MAX)] = 0
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX)] = 1
