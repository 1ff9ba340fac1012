"""This process's metrics to the gateways, once a second."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from antiphon.telemetry import catalog
from antiphon.wire.base import State
from antiphon.wire.errors import EngineError
from antiphon.wire.metrics import SERIES_MAX, MetricFamily, MetricSeries, MetricsReport
from antiphon.wire.routes import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.service.service import Runtime, Service
    from antiphon.telemetry.metrics import Published

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class MetricsFeed:
    """Publishes what the process has counted: all of it each time, since messages may be lost."""

    def __init__(self, service: Service, runtime: Runtime) -> None:
        self._service = service
        self._runtime = runtime
        self._cpu = runtime.metrics.counter(catalog.PROCESS_CPU).labels(service.role)
        self._cpu_s = 0.0
        runtime.metrics.settle_with(self._count_cpu)

    async def publish(self) -> None:
        """Send a report each `PERIOD_S` once the process is ready, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._runtime.health.state is not State.STARTING:
                self.send()

    def send(self) -> None:
        """Send one report. One that cannot be sent is counted; the next says the same and more."""
        role, process = self._service.role, self._runtime.process
        report = report_of(self._service, self._runtime)
        try:
            self._runtime.bus.publish(METRICS, report, role=role, instance=process.instance)
        except EngineError as error:
            self._runtime.metrics.bus_errors.labels("metrics").inc()
            log.debug("metrics not sent", extra={"code": error.code})

    def _count_cpu(self) -> None:
        spent_s = time.process_time()
        self._cpu.inc(max(0.0, spent_s - self._cpu_s))
        self._cpu_s = spent_s


def report_of(service: Service, runtime: Runtime) -> MetricsReport:
    """Write all that a process has counted so far."""
    return MetricsReport(
        role=service.role,
        process=runtime.process,
        model=service.model(),
        metrics_port=runtime.metrics_port,
        families=families(runtime.metrics.published()),
    )


def families(published: Iterable[Published]) -> tuple[MetricFamily, ...]:
    """Write metrics as a report has them."""
    return tuple(
        MetricFamily(
            name=each.family.name,
            bounds=each.bounds,
            series=tuple(
                [
                    MetricSeries(
                        labels=one.labels, value=_short(one.value), counts=_shorts(one.counts)
                    )
                    for one in each.series[:SERIES_MAX]
                ]
            ),
        )
        for each in published
    )


def _shorts(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple([_short(value) for value in values])


def _short(value: float) -> float:
    """Whole numbers as such: they take a few bytes of MessagePack where a float takes nine."""
    return int(value) if value.is_integer() else value
