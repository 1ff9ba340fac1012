"""Server-sent events: one `data:` line each, and the mark that ends an OpenAI stream."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients pass over; proxies and they see that the connection lives."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"


def event(payload: bytes) -> bytes:
    """Wrap JSON, which holds no raw line break, as one event."""
    return b"data: %b\n\n" % payload


def named_event(name: str, payload: bytes) -> bytes:
    """Wrap JSON as an event that also has a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)
