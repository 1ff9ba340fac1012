"""The page of a gateway that has served one request, beside workers that report."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.wire.examples import EXAMPLES

from antiphon.gateway.metrics_exposition import Exposition, ModelMetrics
from antiphon.gateway.owner.actions import Accepted, Ended, TextDelta
from antiphon.gateway.request_metrics import GatewayMetrics
from antiphon.gateway.stream.stream import RequestStream
from antiphon.service.metrics_publisher import families
from antiphon.telemetry import catalog
from antiphon.telemetry.metrics import Metrics
from antiphon.telemetry.tracing import span
from antiphon.wire.base import Process, Role, Usage
from antiphon.wire.heartbeat import MetricsReport
from antiphon.wire.ids import Incarnation, InstanceId, ModelName
from antiphon.wire.submit import SubmitRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from antiphon.config.settings import Settings
    from antiphon.gateway.access.limits import QuotaReservation

MODEL = ModelName("toy")
GATEWAY = Process(instance=InstanceId("gateway-0"), incarnation=Incarnation("1"))
Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class _Hold:
    def end(self, tokens: int) -> None:
        """Charge nothing."""


class Door:
    """What a gateway counts, and its page. `now` is its clock."""

    def __init__(self, settings: Settings) -> None:
        self.now = 100.0
        self.metrics = Metrics()
        self.counted = GatewayMetrics(self.metrics, settings.metrics)
        self.metrics.before_collect(self.counted.latencies.flush_inter_token)
        self.model = ModelMetrics(
            settings.metrics, MODEL, GATEWAY, lambda: self.now, lambda: report(self.metrics)
        )
        self.page = Exposition(self.model, settings.metrics.extra_labels)

    def serve(self, headers: Mapping[str, str] | None = None) -> None:
        """Serve a request of 40 tokens, 10 of them cached, with three tokens in 0.3 s each.

        It is encoded after 0.1 s and accepted after 0.15 s.
        """
        self.counted.custom.read(headers or {})
        submit = cast("SubmitRequest", EXAMPLES[SubmitRequest])
        trace, hold = span("x").start(), cast("QuotaReservation", _Hold())
        stream = RequestStream(submit, trace, hold, api="chat", received_at=0.0, submitted_at=0.1)
        stream.labels = self.counted.custom.current()
        stream.put(Accepted(), 0.15)
        for index, now in enumerate((0.3, 0.6, 0.9)):
            if stream.last_token_at is None:
                self.counted.latencies.observe_ttft(stream, now)
            else:
                self.counted.latencies.observe_inter_token(stream, now - stream.last_token_at)
            stream.put(TextDelta(choice=0, text_offset=index, text="x"), now)
        end = Ended(usage=Usage(prompt_tokens=40, completion_tokens=3, cached_tokens=10))
        stream.put(end, 0.9)
        self.counted.observe_finished(stream, end)

    def text(self, *, private: bool = False) -> str:
        class Collected:
            def __init__(self, collect: Callable[[bool], object]) -> None:
                self.collect = lambda: collect(private)

        return generate_latest(Collected(self.page.collect)).decode()  # pyright: ignore[reportArgumentType]

    def read(self, *, private: bool = False) -> Page:
        """Every sample by its name and its labels."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.text(private=private))
            for sample in family.samples
        }


def report(
    metrics: Metrics, process: Process = GATEWAY, role: Role = Role.GATEWAY
) -> MetricsReport:
    return MetricsReport(
        role=role, process=process, model=MODEL, families=families(metrics.published())
    )


def worker(
    instance: str, life: str = "1", *, running: int = 0, usage: float = 0.0, tokens: int = 0
) -> MetricsReport:
    """Report of a worker, which has spent 2 s of processor time."""
    metrics = Metrics()
    metrics.counter(catalog.PROCESS_CPU).labels(Role.WORKER).inc(2)
    metrics.gauge(catalog.NUM_RUNNING_REQS).set(running)
    metrics.gauge(catalog.TOKEN_USAGE).set(usage)
    metrics.counter(catalog.REALTIME_TOKENS).labels("decode").inc(tokens)
    steps = metrics.histogram(catalog.STEP_SECONDS)
    for _ in range(tokens):
        steps.observe(0.003)
    process = Process(instance=InstanceId(instance), incarnation=Incarnation(life))
    return msgspec.structs.replace(report(metrics, process, Role.WORKER), metrics_port=30100)


def value(page: Page, name: str, **labels: str) -> float:
    """Sum of the series that have these labels."""
    found = [
        amount
        for (sample, given), amount in page.items()
        if sample == name and labels.items() <= dict(given).items()
    ]
    assert found, f"no series {name} {labels}"
    return sum(found)


def labels_of(page: Page, name: str) -> list[dict[str, str]]:
    return [dict(given) for sample, given in page if sample == name]
