"""Spans across processes, in W3C format: messages carry the `traceparent` as a string.

    with span("gateway.submit", request.traceparent, tokens=12) as here:
        await bus.call(SUBMIT, submit(traceparent=here.traceparent), ...)

Without a collector a span costs about a microsecond and propagates its parent unchanged.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Generator

    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, Tracer

Value = str | int | float | bool

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
traceparent_var: ContextVar[str | None] = ContextVar("traceparent", default=None)

_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

_tracer: Tracer | None = None


class Span:
    """A span of a trace in this process.

    A `with` block makes it the parent of spans, and the trace of log lines, inside the block. For
    work that no block encloses (a request's time in a queue), call `start` and `end`.
    """

    __slots__ = ("_attributes", "_before", "_given", "_name", "_span", "traceparent")

    def __init__(
        self, name: str, traceparent: str | None, attributes: dict[str, Value] | None
    ) -> None:
        self._name = name
        self._given = traceparent
        self._attributes = attributes
        self._span: OtelSpan | None = None
        self._before: str | None = None
        self.traceparent: str | None = None
        """Value for messages sent inside the span; None outside of any trace."""

    def start(self) -> Self:
        """Start the span. An invalid parent counts as none."""
        parent = valid(self._given) or traceparent_var.get()
        if _tracer is None:
            self.traceparent = parent
        else:
            self._span = _tracer.start_span(
                self._name, context=_context(parent), attributes=self._attributes
            )
            self.traceparent = _format(self._span.get_span_context())
        return self

    def end(self, error: BaseException | None = None) -> None:
        """End the span, recording the error, if any."""
        if self._span is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415  # see _context

            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end()

    def set(self, **attributes: Value) -> None:
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(name, value)

    def __enter__(self) -> Self:
        self.start()
        self._before = traceparent_var.get()
        traceparent_var.set(self.traceparent)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Set, not reset by token: an async generator may end in another context than it started in.
        traceparent_var.set(self._before)
        self.end(error)


def span(name: str, traceparent: str | None = None, **attributes: Value) -> Span:
    return Span(name, traceparent, attributes or None)


def current() -> str | None:
    return traceparent_var.get()


@contextmanager
def request_context(request_id: str | None) -> Generator[None]:
    before = request_id_var.get()
    request_id_var.set(request_id)
    try:
        yield
    finally:
        # Set, not reset by token: an async generator may end in another context than it started in.
        request_id_var.set(before)


def trace_id() -> str | None:
    """Return the current trace id, 32 hexadecimal digits of W3C `00-<trace>-<span>-<flags>`."""
    traceparent = traceparent_var.get()
    return traceparent[3:35] if traceparent else None


def valid(traceparent: str | None) -> str | None:
    """Return the value if it is a W3C `traceparent` of version 00, else None."""
    if traceparent is not None and _TRACEPARENT.fullmatch(traceparent):
        return traceparent
    return None


def use(tracer: Tracer | None) -> None:
    """Record spans with `tracer` from now on; None: no recording."""
    global _tracer  # noqa: PLW0603  # one per process, as the collector
    _tracer = tracer


def _context(traceparent: str | None) -> Context | None:
    # Imported only with tracing on: it takes 25 ms of each service's start.
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context  # noqa: PLC0415

    if (parts := _TRACEPARENT.fullmatch(traceparent or "")) is None:
        return None
    trace, span_id, flags = (int(part, 16) for part in parts.groups())
    parent = SpanContext(trace, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(parent))


def _format(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
