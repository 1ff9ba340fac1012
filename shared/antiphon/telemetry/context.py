"""Context variables for log lines and spans: the current request and trace."""

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
    """Add a request's id to each record logged inside the block."""
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
