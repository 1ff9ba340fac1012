"""Export spans to an OTLP collector by gRPC or HTTP. Imported only if tracing is on: it is slow."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from antiphon.telemetry import tracing

_TIMEOUT_S = 2.0
_PATH = "/v1/traces"
_GRPC_PORT, _HTTP_PORT = 4317, 4318
"""OTLP's default ports of the two transports."""


class OtlpTarget(msgspec.Struct, frozen=True):
    """A collector, with the address in the form that its exporter expects."""

    grpc: bool
    address: str
    insecure: bool = False

    @classmethod
    def parse(cls, endpoint: str) -> OtlpTarget:
        """Parse an endpoint: `host:4317`, `grpc://host`, `grpcs://host`, `http://host:4318/path`.

        Without a scheme it is gRPC, as in SGLang, unless the port is HTTP's. With `http` it is
        HTTP, unless there is no path and the port is gRPC's, a form that collectors document.
        """
        parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        bare = parts.path in ("", "/")
        if parts.scheme in ("http", "https") and not (bare and parts.port == _GRPC_PORT):
            grpc = False
        else:
            grpc = bool(parts.scheme) or parts.port != _HTTP_PORT
        if grpc:
            insecure = parts.scheme not in ("grpcs", "https")
            port = parts.netloc if parts.port else f"{parts.netloc}:{_GRPC_PORT}"
            return cls(grpc=True, address=port, insecure=insecure)
        url = endpoint.rstrip("/") if parts.scheme else f"http://{endpoint.rstrip('/')}"
        return cls(grpc=False, address=url if url.endswith(_PATH) else url + _PATH)


def start(*, endpoint: str, service: str, instance: str, ratio: float) -> TracerProvider:
    """Start to send this process's spans to a collector, in batches from a thread.

    Returns the provider for `stop`. Spans that the collector does not accept in time are dropped.
    `ratio` is the share of the traces started here that is sampled; others follow their parent.
    """
    exporter = _exporter(OtlpTarget.parse(endpoint))
    return start_with(exporter, service=service, instance=instance, ratio=ratio)


def _exporter(target: OtlpTarget) -> SpanExporter:
    """Create an exporter. Transports are imported only when used: gRPC takes 0.3 s."""
    if target.grpc:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(target.address, insecure=target.insecure, timeout=_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(target.address, timeout=_TIMEOUT_S)


def start_with(
    exporter: SpanExporter, *, service: str, instance: str, ratio: float
) -> TracerProvider:
    sampler = ParentBased(TraceIdRatioBased(ratio))
    names = {"namespace": "antiphon", "name": service, "instance.id": instance}
    resource = Resource.create({f"service.{name}": value for name, value in names.items()})
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter, export_timeout_millis=_TIMEOUT_S * 1000)
    provider.add_span_processor(processor)
    tracing.use(provider.get_tracer("antiphon"))
    return provider


def stop(provider: TracerProvider) -> None:
    """Stop recording and flush. Blocks for a bounded time: a slow collector loses spans."""
    tracing.use(None)
    provider.force_flush(int(_TIMEOUT_S * 1000))
    provider.shutdown()
