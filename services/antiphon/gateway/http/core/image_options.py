"""Options of the images of a request, of the APIs that have them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.claim import PixelLimits

Pixels = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of pixels that images are scaled to. Unknown fields are rejected."""

    min_pixels: Pixels | None = None
    """Minimum, of models that keep the shape of images. Defaults to the model's."""
    max_pixels: Pixels | None = None
    """Maximum, at most the model's, which is the default."""


def pixel_limits(options: ImageOptions | None) -> PixelLimits | None:
    """Return the limits of a request; None if it has none."""
    if options is None or (options.min_pixels, options.max_pixels) == (None, None):
        return None
    return PixelLimits(least=options.min_pixels or 0, most=options.max_pixels or 0)
