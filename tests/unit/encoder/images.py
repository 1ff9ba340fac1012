"""Encoded images."""

from __future__ import annotations

import io

from PIL import Image


def png(colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20, 30), colour).save(out, "PNG")
    return out.getvalue()


RED, BLUE = png("red"), png("blue")
