"""Request metrics of the gateway, and the log line of a request."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

import msgspec
from prometheus_client import Counter, Histogram

from antiphon.config.metrics import MetricsConfig, bounds, label_names, token_bounds
from antiphon.telemetry import catalog
from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from antiphon.gateway.owner.actions import Ended
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.telemetry.catalog import MetricSpec
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.base import Usage
    from antiphon.wire.ids import TenantId

log = logging.getLogger(__name__)

M = TypeVar("M", Counter, Histogram)

_SIZES = (
    catalog.PROMPT_TOKENS_HISTOGRAM,
    catalog.UNCACHED_PROMPT_TOKENS_HISTOGRAM,
    catalog.GENERATION_TOKENS_HISTOGRAM,
)
_ABORTED = frozenset({"cancelled", "abort"})

TENANTS_MAX = 100
"""Maximum number of tenants with a label of their own; further ones share one."""
SETS_MAX = 100
"""Maximum number of custom label value sets with their own series; further ones share one."""
SETS_BYTES_MAX = 64 * 1024
"""Maximum total size of these sets, which appear in all request metrics."""
_VALUE_MAX = 128
_OTHERS = "other"

custom_labels_var: ContextVar[tuple[str, ...] | None] = ContextVar("custom_labels", default=None)
"""Label values of the current request, in the order of the allowed labels."""


class CustomLabels:
    """Labels that clients set for their own requests, by a header.

    Labels that are not allowed are ignored, as in SGLang.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self.names = label_names(config.custom_labels)
        self._header = config.custom_labels_header
        self._seen: set[tuple[str, ...]] = set()
        self._seen_bytes = 0

    @property
    def none(self) -> tuple[str, ...]:
        return ("",) * len(self.names)

    def read(self, headers: Mapping[str, str]) -> None:
        if self.names:
            # Set every time, since all requests of a connection are read in one task.
            text = headers.get(self._header)
            custom_labels_var.set(self._values(text) if text else None)

    def current(self) -> tuple[str, ...]:
        return (custom_labels_var.get() or self.none) if self.names else ()

    def _values(self, text: str) -> tuple[str, ...]:
        try:
            given = msgspec.json.decode(text, type=dict[str, str | int | float | bool | None])
        except (msgspec.DecodeError, UnicodeError):
            return self.none
        named = [given.get(name) for name in self.names]
        values = tuple(["" if value is None else str(value)[:_VALUE_MAX] for value in named])
        if values in self._seen or values == self.none:
            return values
        size = sum(len(value.encode()) for value in values)
        if len(self._seen) >= SETS_MAX or self._seen_bytes + size > SETS_BYTES_MAX:
            return (_OTHERS,) * len(self.names)
        self._seen.add(values)
        self._seen_bytes += size
        return values


class GatewayMetrics:
    """Request metrics of a gateway; those with `custom` labels get their values too."""

    def __init__(self, metrics: Metrics, config: MetricsConfig) -> None:
        self.custom = CustomLabels(config)
        names = self.custom.names
        self._requests = metrics.counter(catalog.NUM_REQUESTS, *names)
        self._rejected = metrics.counter(catalog.NUM_REJECTED_REQUESTS)
        self._aborted = metrics.counter(catalog.NUM_ABORTED_REQUESTS, *names)
        self._structured = metrics.counter(catalog.NUM_SO_REQUESTS, *names)
        self._prompt_tokens = metrics.counter(catalog.PROMPT_TOKENS, *names)
        self._generation_tokens = metrics.counter(catalog.GENERATION_TOKENS, *names)
        self._cached_tokens = metrics.counter(catalog.CACHED_TOKENS, *names)
        self.tenants = TenantMetrics(metrics)

        def histogram(family: MetricSpec) -> Histogram:
            return metrics.histogram(family, *names, buckets=_bounds(config, family))

        self.latencies = LatencyMetrics(metrics, histogram)
        self._sizes = (
            tuple(histogram(family) for family in _SIZES) if config.tokens_histogram else ()
        )
        self.get_loads = metrics.histogram(catalog.GET_LOADS)
        self.http_requests = metrics.counter(catalog.HTTP_REQUESTS)
        self.http_responses = metrics.counter(catalog.HTTP_RESPONSES)
        self.http_active = metrics.gauge(catalog.HTTP_REQUESTS_ACTIVE)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"antiphon_{name}", text, labels, registry=metrics.registry)

        text = "Undocumented fields of bodies, which were ignored."
        self.unknown_fields = counter("unknown_fields", text)
        text = "Number of changes of the keys file."
        self.keys_read = counter("keys_file_reads", text, "outcome")
        text = "Number of requests for missing text to a detokenizer."
        self.text_resumes = counter("text_resumes", text)

    @contextmanager
    def count_rejections(self, tenant: TenantId | None = None) -> Generator[None]:
        """Log and count an error that ends a request before it is open."""
        try:
            yield
        except EngineError as error:
            self._rejected.labels(error.code).inc()
            if tenant is not None:
                self.tenants.count(tenant, error.code)
            log.info(
                "request rejected",
                extra={
                    "code": error.code,
                    "param": error.param,
                    "reason": error.message,
                    "tenant": tenant,
                },
            )
            raise

    def observe_finished(self, stream: RequestStream, end: Ended) -> None:
        outcome = end.error.code if end.error else str(stream.finish_reason)
        usage, labels = end.usage, stream.labels
        self._requests.labels(outcome, *labels).inc()
        if outcome in _ABORTED:
            _with(self._aborted, labels).inc()
        if stream.submit.sampling.grammar is not None:
            _with(self._structured, labels).inc()
        _with(self._prompt_tokens, labels).inc(usage.prompt_tokens)
        _with(self._generation_tokens, labels).inc(usage.completion_tokens)
        self._cached_tokens.labels("device", *labels).inc(usage.cached_tokens)
        uncached = usage.prompt_tokens - usage.cached_tokens
        sizes = (usage.prompt_tokens, uncached, usage.completion_tokens)
        for histogram, size in zip(self._sizes, sizes, strict=bool(self._sizes)):
            _with(histogram, labels).observe(size)
        self.latencies.observe_finished(stream, usage.completion_tokens)
        self.tenants.count(stream.submit.tenant, outcome, usage)
        log.info("request ended", extra=_log_fields(stream, end, outcome))


class LatencyMetrics:
    def __init__(self, metrics: Metrics, histogram: Callable[[MetricSpec], Histogram]) -> None:
        self._ttft = histogram(catalog.TIME_TO_FIRST_TOKEN)
        self._inter_token = histogram(catalog.INTER_TOKEN_LATENCY)
        self._per_token = histogram(catalog.TIME_PER_OUTPUT_TOKEN)
        self._e2e = histogram(catalog.E2E_REQUEST_LATENCY)
        stages = metrics.histogram(catalog.PER_STAGE_LATENCY)
        self._tokenize = stages.labels("tokenize")
        self._dispatch = stages.labels("api_server_dispatch")
        self._process = stages.labels("request_process")
        self._gaps: dict[tuple[str, ...], list[float]] = {}

    def observe_inter_token(self, stream: RequestStream, seconds: float) -> None:
        # Called per token, so it must be cheap.
        self._gaps.setdefault(stream.labels, []).append(seconds)

    def observe_ttft(self, stream: RequestStream, seconds: float) -> None:
        _with(self._ttft, stream.labels).observe(seconds)

    def flush_inter_token(self) -> None:
        """Publish the recorded times: twice a second, and before they are read."""
        for labels, gaps in self._gaps.items():
            histogram = _with(self._inter_token, labels)
            for seconds in gaps:
                histogram.observe(seconds)
        self._gaps.clear()

    def observe_finished(self, stream: RequestStream, tokens: int) -> None:
        assert stream.ended_at is not None
        _with(self._e2e, stream.labels).observe(stream.ended_at - stream.received_at)
        self._tokenize.observe(stream.submitted_at - stream.received_at)
        if stream.accepted_at is not None:
            self._dispatch.observe(stream.accepted_at - stream.submitted_at)
            self._process.observe(stream.ended_at - stream.accepted_at)
        if stream.first_token_at is not None and tokens > 1:
            seconds = (stream.ended_at - stream.first_token_at) / (tokens - 1)
            _with(self._per_token, stream.labels).observe(seconds)


class TenantMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(catalog.TENANT_REQUESTS)
        self._tokens = metrics.counter(catalog.TENANT_TOKENS)
        self._names: set[TenantId] = set()

    def add(self, tenants: Iterable[TenantId]) -> None:
        """Give tenants labels of their own, up to the limit."""
        for tenant in tenants:
            if len(self._names) < TENANTS_MAX:
                self._names.add(tenant)

    def count(self, tenant: TenantId, outcome: str, usage: Usage | None = None) -> None:
        # The number of labels is bounded: without keys clients may use any tenant name.
        label = tenant if tenant in self._names else _OTHERS
        self._requests.labels(label, outcome).inc()
        if usage is not None:
            self._tokens.labels(label, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(label, "completion").inc(usage.completion_tokens)


def _with(metric: M, labels: tuple[str, ...]) -> M:
    return metric.labels(*labels) if labels else metric


def _bounds(config: MetricsConfig, family: MetricSpec) -> tuple[float, ...]:
    if family is catalog.TIME_TO_FIRST_TOKEN:
        return bounds(config.time_to_first_token_buckets, family.name)
    if family in (catalog.INTER_TOKEN_LATENCY, catalog.TIME_PER_OUTPUT_TOKEN):
        return bounds(config.inter_token_latency_buckets, family.name)
    if family is catalog.E2E_REQUEST_LATENCY:
        return bounds(config.e2e_request_latency_buckets, family.name)
    if family is catalog.GENERATION_TOKENS_HISTOGRAM:
        return token_bounds(config.generation_tokens_buckets, family.name)
    return token_bounds(config.prompt_tokens_buckets, family.name)


def _log_fields(stream: RequestStream, end: Ended, outcome: str) -> dict[str, object]:
    line: dict[str, object] = {
        "request_id": stream.submit.request_id,
        "key": stream.name[1] if stream.name else None,
        "door": stream.api,
        "tenant": stream.submit.tenant,
        "outcome": outcome,
        "prompt_tokens": end.usage.prompt_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "encode_ms": _ms(stream.received_at, stream.submitted_at),
        "submit_ms": _ms(stream.submitted_at, stream.accepted_at),
        "queue_ms": _ms(stream.accepted_at, stream.first_token_at),
        "first_ms": _ms(stream.received_at, stream.first_token_at),
        "total_ms": _ms(stream.received_at, stream.ended_at),
    }
    if end.error is not None:
        line["reason"] = end.error.message
    return line


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000, 1)
