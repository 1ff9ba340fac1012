"""Streams of JSON, an object a line."""

from __future__ import annotations

CONTENT_TYPE = "application/x-ndjson"


def line(payload: bytes) -> bytes:
    """End JSON, which holds no raw line break, as one line."""
    return payload + b"\n"
