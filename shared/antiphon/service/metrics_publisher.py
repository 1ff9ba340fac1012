"""Publish this process's metrics to the gateways, once a second."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.telemetry import catalog
from antiphon.wire.codec import encode
from antiphon.wire.errors import EngineError
from antiphon.wire.heartbeat import PARTS_MAX, SERIES_MAX, MetricFamily, MetricSeries, MetricsReport
from antiphon.wire.routes import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.service.service import Runtime
    from antiphon.telemetry.metrics import Published, Series
    from antiphon.wire.base import Role
    from antiphon.wire.ids import ModelName

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PART_BYTES_MAX = 256 * 1024
"""Maximum message size of a report: larger ones delay other messages on the connection."""
_HEAD_BYTES = 1024
"""Size of a message without its metrics."""
_VALUE_MAX = 1e18
"""Maximum value in a message."""


class MetricsPublisher:
    """Publishes the metrics of the process: all of them each time, since messages may be lost."""

    def __init__(self, role: Role, model: ModelName | None, runtime: Runtime) -> None:
        self._role = role
        self._model = model
        self._runtime = runtime
        self._cpu = runtime.metrics.counter(catalog.PROCESS_CPU).labels(role)
        self._cpu_s = 0.0
        self._number = 0
        runtime.metrics.before_collect(self._count_cpu)

    async def publish(self) -> None:
        """Send a report now, since the process is ready, and each `PERIOD_S`, until cancelled."""
        while True:
            self.send()
            await asyncio.sleep(PERIOD_S)

    def send(self) -> None:
        role, bus, errors = self._role, self._runtime.bus, self._runtime.metrics.bus_errors
        self._number += 1
        report = report_of(role, self._model, self._runtime, self._number)
        parts, lost = parts_of(report, min(PART_BYTES_MAX, bus.transport.payload_bytes_max))
        if lost:
            errors.labels("metrics_size").inc(lost)
        try:
            for part in parts:
                bus.publish(METRICS, part, role=role, instance=bus.process.instance)
        except EngineError as error:
            errors.labels("metrics").inc()
            log.debug("metrics not sent", extra={"code": error.code})

    def _count_cpu(self) -> None:
        spent_s = time.process_time()
        self._cpu.inc(max(0.0, spent_s - self._cpu_s))
        self._cpu_s = spent_s


def report_of(
    role: Role, model: ModelName | None, runtime: Runtime, number: int = 0
) -> MetricsReport:
    """Create the report of a process; values out of the message's bounds are counted."""
    published = runtime.metrics.published()
    if bad := sum(not _sendable(one) for each in published for one in each.series):
        runtime.metrics.bus_errors.labels("metrics_value").inc(bad)
    return MetricsReport(
        role=role,
        process=runtime.process,
        model=model,
        metrics_port=runtime.metrics_port,
        families=families(published),
        number=number,
    )


def parts_of(report: MetricsReport, bytes_max: int) -> tuple[list[MetricsReport], int]:
    """Split a report into messages of at most `bytes_max`.

    Returns the messages, and the number of series in none of them: more than `PARTS_MAX` messages
    would be needed, or one series alone is too large.
    """
    if len(encode(report)) <= bytes_max:
        return [report], 0
    room = bytes_max - _HEAD_BYTES
    groups: list[list[MetricFamily]] = []
    left = lost = 0
    for family in report.families:
        for piece, size in _pieces(family, room):
            if size > left and size <= room and len(groups) < PARTS_MAX:
                groups.append([])
                left = room
            if size > left:
                lost += len(piece.series)
                continue
            groups[-1].append(piece)
            left -= size
    return [
        msgspec.structs.replace(report, part=part, parts=len(groups), families=tuple(group))
        for part, group in enumerate(groups)
    ], lost


def _pieces(family: MetricFamily, bytes_max: int) -> Iterator[tuple[MetricFamily, int]]:
    """Halve the series of a metric until each piece fits, or is a single series."""
    size = len(msgspec.msgpack.encode(family))
    count = len(family.series)
    if size <= bytes_max or count <= 1:
        yield family, size
        return
    for series in (family.series[: count // 2], family.series[count // 2 :]):
        yield from _pieces(msgspec.structs.replace(family, series=series), bytes_max)


def families(published: Iterable[Published]) -> tuple[MetricFamily, ...]:
    """Convert metrics to the form of a report; metrics with many series are split."""
    return tuple([piece for each in published for piece in _family(each)])


def _family(each: Published) -> Iterator[MetricFamily]:
    series = [
        MetricSeries(
            labels=one.labels, value=_short(one.value), counts=tuple(map(_short, one.counts))
        )
        for one in each.series
        if _sendable(one)
    ]
    for at in range(0, len(series), SERIES_MAX):
        piece = tuple(series[at : at + SERIES_MAX])
        yield MetricFamily(name=each.family.name, bounds=each.bounds, series=piece)


def _sendable(series: Series) -> bool:
    """Whether the values are within bounds; one that is not would make the message invalid."""
    values = (series.value, *series.counts)
    return all(math.isfinite(value) and abs(value) <= _VALUE_MAX for value in values)


def _short(value: float) -> float:
    """Convert whole numbers to int: a few bytes of MessagePack, where a float takes nine."""
    return int(value) if value.is_integer() else value
