"""Server-sent events: one `data:` line each, and the end marker of OpenAI's streams."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients ignore; it keeps the connection alive."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"


def event(payload: bytes) -> bytes:
    """Format JSON, which has no raw line break, as one event."""
    return b"data: %b\n\n" % payload


def named_event(name: str, payload: bytes) -> bytes:
    """Format JSON as a named event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)
