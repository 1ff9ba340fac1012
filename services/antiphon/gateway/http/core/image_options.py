"""Options of the images of a request, of the APIs that have them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import Unsupported

NO_FRAMES = "only videos have frames, and this server takes images"
Pixels = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of pixels that images are scaled to. Unknown fields are rejected."""

    min_pixels: Pixels | None = None
    """Minimum, of models that keep the shape of images. Defaults to the model's."""
    max_pixels: Pixels | None = None
    """Maximum, at most the model's, which is the default."""
    fps: float | None = None
    """Not supported: only videos have frames, and the server takes images."""


def pixel_limits(options: ImageOptions | None) -> PixelLimits | None:
    """Return the limits of a request; None if it has none.

    Raises:
        Unsupported: It is about videos.
    """
    if options is None:
        return None
    if options.fps is not None:
        raise Unsupported.at("mm_processor_kwargs.fps", NO_FRAMES)
    return limits_of(options.min_pixels, options.max_pixels)


def limits_of(least: int | None, most: int | None) -> PixelLimits | None:
    """Return these limits; None if neither is set."""
    if least is None and most is None:
        return None
    return PixelLimits(least=least or 0, most=most or 0)
