"""What the gateway counts, and the one line a request in the log."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from antiphon.gateway.owner.actions import Ended
    from antiphon.gateway.stream import Stream
    from antiphon.wire.ids import TenantId

log = logging.getLogger(__name__)

_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

TENANTS_MAX = 100
"""As many tenants have a label of their own; the others share one."""
_OTHERS = "other"


class GatewayMetrics:
    """Named `antiphon_gateway_*`, in the process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"antiphon_gateway_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"antiphon_gateway_{name}", meaning, registry=registry, buckets=buckets
            )

        self._registry = registry
        self.requests = counter("requests", "Requests ended or refused, by outcome.", "outcome")
        self.tokens = counter("tokens", "Tokens of ended requests.", "kind")
        self.unknown_fields = counter("unknown_fields", "Fields that nobody documents, ignored.")
        self.tenant_requests = counter(
            "tenant_requests", "Requests ended or refused, by tenant.", "tenant", "outcome"
        )
        self.tenant_tokens = counter(
            "tenant_tokens", "Tokens of ended requests, by tenant.", "tenant", "kind"
        )
        self.keys_read = counter("keys_read", "Times that the keys file had changed.", "outcome")
        self._tenants: set[TenantId] = set()
        self.asked = counter("text_asked", "Times that missing text was asked for.")
        self.first = histogram("first_text_seconds", "From the door to the first text.", _FIRST_S)
        self._gaps: list[float] = []
        self._gap = histogram("text_gap_seconds", "Between two texts of a request.", _GAP_S)
        self.whole = histogram("request_seconds", "From the door to the end.", _WHOLE_S)

    def note_gap(self, seconds: float) -> None:
        """Note the time between two texts of a request; each text does it, so it must be cheap."""
        self._gaps.append(seconds)

    def settle(self) -> None:
        """Show the gaps that were noted: twice a second, and when they are read."""
        for seconds in self._gaps:
            self._gap.observe(seconds)
        self._gaps.clear()

    def watch_open(self, count: Callable[[], int]) -> None:
        """Serve the number of open requests."""
        gauge = Gauge("antiphon_gateway_open_requests", "Open requests.", registry=self._registry)
        gauge.set_function(count)

    def know(self, tenants: Iterable[TenantId]) -> None:
        """Give tenants labels of their own, as long as there are any."""
        for tenant in tenants:
            if len(self._tenants) < TENANTS_MAX:
                self._tenants.add(tenant)

    @contextmanager
    def refusals(self, tenant: TenantId | None = None) -> Generator[None]:
        """Log and count the error that ends a request inside, before it is open."""
        try:
            yield
        except EngineError as error:
            self._refused(error, tenant)
            raise

    def ended(self, stream: Stream, end: Ended) -> None:
        """A request that was open has its terminal."""
        outcome = end.error.code if end.error else str(stream.reason)
        self.requests.labels(outcome).inc()
        self.tokens.labels("prompt").inc(end.usage.prompt_tokens)
        self.tokens.labels("completion").inc(end.usage.completion_tokens)
        tenant = self._label(stream.submit.tenant)
        self.tenant_requests.labels(tenant, outcome).inc()
        self.tenant_tokens.labels(tenant, "prompt").inc(end.usage.prompt_tokens)
        self.tenant_tokens.labels(tenant, "completion").inc(end.usage.completion_tokens)
        assert stream.ended_at is not None
        if stream.said_at is not None:
            self.first.observe(stream.said_at - stream.came_at)
        self.whole.observe(stream.ended_at - stream.came_at)
        log.info("request ended", extra=_line(stream, end, outcome))

    def _refused(self, error: EngineError, tenant: TenantId | None) -> None:
        self.requests.labels(error.code).inc()
        if tenant is not None:
            self.tenant_requests.labels(self._label(tenant), error.code).inc()
        log.info(
            "request refused",
            extra={
                "code": error.code,
                "param": error.param,
                "reason": error.message,
                "tenant": tenant,
            },
        )

    def _label(self, tenant: TenantId) -> str:
        """A client may call itself as it likes where no key is asked for: labels are bounded."""
        return tenant if tenant in self._tenants else _OTHERS


def _line(stream: Stream, end: Ended, outcome: str) -> dict[str, object]:
    line: dict[str, object] = {
        "request_id": stream.submit.request_id,
        "key": stream.name[1] if stream.name else None,
        "door": stream.door,
        "tenant": stream.submit.tenant,
        "outcome": outcome,
        "prompt_tokens": end.usage.prompt_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "encode_ms": _ms(stream.came_at, stream.opened_at),
        "submit_ms": _ms(stream.opened_at, stream.accepted_at),
        "queue_ms": _ms(stream.accepted_at, stream.said_at),
        "first_ms": _ms(stream.came_at, stream.said_at),
        "total_ms": _ms(stream.came_at, stream.ended_at),
    }
    if end.error is not None:
        line["reason"] = end.error.message
    return line


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000, 1)
