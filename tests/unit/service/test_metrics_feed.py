"""What a process has counted reaches the gateways, however much it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import client_bus, process, running
from tests.support.wait import until
from tests.unit.service.test_run import EchoService

from antiphon.config.settings import Settings
from antiphon.gateway.metrics_exposition import ModelMetrics
from antiphon.gateway.request_metrics import CustomLabels
from antiphon.service import metrics_publisher as metrics_feed
from antiphon.telemetry import catalog
from antiphon.telemetry.metrics import Metrics, Published
from antiphon.wire.base import Role
from antiphon.wire.codec import encode
from antiphon.wire.heartbeat import MetricsReport
from antiphon.wire.ids import ModelName
from antiphon.wire.routes import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.bus.bus import Delivery

MODEL = ModelName("toy")
READER = process("gateway-0")
COUNTED = (
    catalog.NUM_REQUESTS,
    catalog.PROMPT_TOKENS,
    catalog.GENERATION_TOKENS,
    catalog.CACHED_TOKENS,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_feed, "PERIOD_S", 0.02)


class Reader:
    """A gateway's side: what came, and what it makes of it."""

    def __init__(self, labels: str = "") -> None:
        self.reports: list[MetricsReport] = []
        self.model = ModelMetrics(
            msgspec.structs.replace(Settings().metrics, custom_labels=labels),
            MODEL,
            READER,
            lambda: 0.0,
            lambda: MetricsReport(role=Role.GATEWAY, process=READER),
        )

    def take(self, delivery: Delivery) -> None:
        report = msgspec.structs.replace(delivery.read(METRICS), model=MODEL)
        self.reports.append(report)
        self.model.take(report)

    def series(self) -> dict[str, int]:
        return {each.family.name: len(each.series) for each in self.model.totals()}


async def published(
    count: Callable[[Metrics], None], wanted: Callable[[Reader], bool], labels: str = ""
) -> Reader:
    """Run a service whose metrics `count` fills until a reader knows what is `wanted`."""
    broker, reader = MemoryBroker(), Reader(labels)
    async with client_bus(MemoryTransport(broker), "gateway-9", party=Role.GATEWAY) as bus:
        await bus.listen(METRICS, reader.take)
        async with running(EchoService(), MemoryTransport(broker)) as run:
            count(run.metrics)
            await until(lambda: wanted(reader))
    return reader


async def test_labels_of_many_bytes_come_in_parts() -> None:
    names = tuple(f"label_{number}" for number in range(16))

    def count(metrics: Metrics) -> None:
        for family in COUNTED:
            counter = metrics.counter(family, *names)
            own = ("x",) * len(family.labels)
            for number in range(100):
                counter.labels(*own, f"{number}", *("ü" * 128,) * 15).inc()

    expected = {family.name: 100 for family in COUNTED}
    reader = await published(
        count, lambda reader: expected.items() <= reader.series().items(), " ".join(names)
    )
    assert max(report.parts for report in reader.reports) > 1
    assert max(len(encode(report)) for report in reader.reports) <= metrics_feed.PART_BYTES_MAX
    assert reader.model.rejected == 0


async def test_more_series_than_a_family_holds_are_not_cut_off() -> None:
    def count(metrics: Metrics) -> None:
        counter = metrics.counter(catalog.TENANT_REQUESTS)
        for number in range(1500):
            counter.labels(f"tenant-{number}", "stop").inc()

    name = catalog.TENANT_REQUESTS.name
    reader = await published(count, lambda reader: reader.series().get(name) == 1500)
    assert reader.model.rejected == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
async def test_number_that_is_not_finite_costs_no_other(value: float) -> None:
    def count(metrics: Metrics) -> None:
        metrics.gauge(catalog.GEN_THROUGHPUT).set(value)
        metrics.gauge(catalog.TOKEN_USAGE).set(0.5)

    reader = await published(count, lambda reader: "bus_errors_total" in reader.series())
    assert "token_usage" in reader.series()
    assert "gen_throughput" not in reader.series()
    series = [
        (one.labels, one.value > 0)
        for each in reader.model.totals()
        if each.family is catalog.BUS_ERRORS
        for one in each.series
    ]
    assert (("metrics_value",), True) in series


def test_parts_of_a_report_count_only_when_all_have_come() -> None:
    reader = Reader()
    whole = MetricsReport(
        role=Role.WORKER,
        process=process("worker-0"),
        model=MODEL,
    )
    one = metrics_feed.families(_counted(catalog.COMPUTED_TOKENS, 5.0))
    two = metrics_feed.families(_counted(catalog.STALLS, 1.0))

    def part(number: int, part: int, parts: int = 2) -> MetricsReport:
        given = (one, two)[part % 2]
        return msgspec.structs.replace(whole, number=number, part=part, parts=parts, families=given)

    reader.model.take(part(1, 0))
    reader.model.take(part(2, 1))
    assert reader.series() == {}
    reader.model.take(part(2, 0))
    assert reader.series() == {"computed_tokens_total": 1, "stalls_total": 1}
    reader.model.take(part(3, 2))
    assert reader.model.rejected == 1, "a part beyond the last"


def _counted(family: catalog.MetricSpec, value: float) -> list[Published]:
    metrics = Metrics()
    metrics.counter(family).inc(value)
    return [each for each in metrics.published() if each.family is family]


def test_sets_of_custom_labels_are_bounded_in_bytes() -> None:
    names = [f"l{number}" for number in range(14)]
    config = msgspec.structs.replace(Settings().metrics, custom_labels=" ".join(names))
    labels = CustomLabels(config)
    seen: set[tuple[str, ...]] = set()
    for number in range(90):
        values = dict.fromkeys(names, f"{number:03}" + "ü" * 125)
        labels.read({"x-custom-labels": msgspec.json.encode(values).decode()})
        seen.add(labels.current())
    assert ("other",) * 14 in seen
    assert sum(len(each.encode()) for one in seen for each in one) <= 64 * 1024 + 5 * 14
