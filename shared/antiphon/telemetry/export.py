"""Spans to an OTLP/HTTP collector. Imported only where one is named: it costs 0.1 s of start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from antiphon.telemetry import tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_TIMEOUT_S = 2.0
_PATH = "/v1/traces"


def start(*, endpoint: str, service: str, instance: str, ratio: float) -> TracerProvider:
    """Send this process's spans to a collector, from a thread, in batches.

    Gives what `stop` takes. Spans that the collector does not take in time are dropped.

    Args:
        endpoint: `http://host:4318`, with or without `/v1/traces`.
        service: `service.name` of the spans.
        instance: `service.instance.id` of the spans.
        ratio: Share of traces kept, of those that begin here; a parent's own decision holds.
    """
    url = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(
        endpoint=url if url.endswith(_PATH) else url + _PATH, timeout=_TIMEOUT_S
    )
    return start_with(exporter, service=service, instance=instance, ratio=ratio)


def start_with(
    exporter: SpanExporter, *, service: str, instance: str, ratio: float
) -> TracerProvider:
    """Send this process's spans to an exporter."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create(
            {
                "service.namespace": "antiphon",
                "service.name": service,
                "service.instance.id": instance,
            }
        ),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(exporter, export_timeout_millis=_TIMEOUT_S * 1000)
    )
    tracing.use(provider.get_tracer("antiphon"))
    return provider


def stop(provider: TracerProvider) -> None:
    """Send what is left and record no more. Blocks, but not long: a slow collector loses spans."""
    tracing.use(None)
    provider.force_flush(int(_TIMEOUT_S * 1000))
    provider.shutdown()
