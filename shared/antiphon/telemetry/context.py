"""What every log line and span knows of the work at hand, without being told each time."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)
traceparent_var: ContextVar[str | None] = ContextVar("traceparent", default=None)


@contextmanager
def request_context(request_id: str | None) -> Generator[None]:
    """Put a request's id into each record that is logged inside."""
    before = request_id_var.get()
    request_id_var.set(request_id)
    try:
        yield
    finally:
        # Set, not reset by token: an async generator may end in another context than it began.
        request_id_var.set(before)


def trace_id() -> str | None:
    """The 32 hexadecimal digits of the trace at hand, from W3C `00-<trace>-<span>-<flags>`."""
    traceparent = traceparent_var.get()
    return traceparent[3:35] if traceparent else None
