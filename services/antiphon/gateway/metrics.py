"""What the gateway counts, and the one line a request in the log."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from antiphon.gateway.owner.actions import Ended
    from antiphon.gateway.stream import Stream

log = logging.getLogger(__name__)

_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


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
        self.asked = counter("text_asked", "Times that missing text was asked for.")
        self.first = histogram("first_text_seconds", "From the door to the first text.", _FIRST_S)
        self.token_gap = histogram("text_gap_seconds", "Between two texts of a request.", _GAP_S)
        self.whole = histogram("request_seconds", "From the door to the end.", _WHOLE_S)

    def watch_open(self, count: Callable[[], int]) -> None:
        """Serve the number of open requests."""
        gauge = Gauge("antiphon_gateway_open_requests", "Open requests.", registry=self._registry)
        gauge.set_function(count)

    @contextmanager
    def refusals(self) -> Generator[None]:
        """Log and count the error that ends a request inside, before it is open."""
        try:
            yield
        except EngineError as error:
            self._refused(error)
            raise

    def ended(self, stream: Stream, end: Ended) -> None:
        """A request that was open has its terminal."""
        outcome = end.error.code if end.error else str(stream.reason)
        self.requests.labels(outcome).inc()
        self.tokens.labels("prompt").inc(end.usage.prompt_tokens)
        self.tokens.labels("completion").inc(end.usage.completion_tokens)
        assert stream.ended_at is not None
        if stream.said_at is not None:
            self.first.observe(stream.said_at - stream.came_at)
        self.whole.observe(stream.ended_at - stream.came_at)
        log.info("request ended", extra=_line(stream, end, outcome))

    def _refused(self, error: EngineError) -> None:
        self.requests.labels(error.code).inc()
        log.info(
            "request refused",
            extra={"code": error.code, "param": error.param, "reason": error.message},
        )


def _line(stream: Stream, end: Ended, outcome: str) -> dict[str, object]:
    line: dict[str, object] = {
        "request_id": stream.submit.request_id,
        "key": stream.name[1] if stream.name else None,
        "door": stream.door,
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
