"""Newline-delimited JSON streams."""

from __future__ import annotations

CONTENT_TYPE = "application/x-ndjson"


def line(payload: bytes) -> bytes:
    """Terminate JSON, which has no raw line break, as one line."""
    return payload + b"\n"
