"""Decodes and preprocesses an image for a vision tower, or rejects it with the reason."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from antiphon.wire.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.encoder.preprocessor_config import PreprocessorConfig

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The usual web formats. Pillow's other decoders are not exposed to untrusted data."""

_BROKEN = (
    OSError,  # unknown formats and truncated files too
    SyntaxError,  # a broken PNG
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,  # features that a decoder does not implement too
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow raises on bytes that are not an image."""

# Pillow's own guard has one limit per process and only warns between that limit and twice as much.
# `pixels_max` is checked against the header, before any pixel is decoded.
Image.MAX_IMAGE_PIXELS = None


class Preprocessor:
    """Decodes, resizes, crops and normalizes. Called in one thread; has no mutable state.

    Args:
        pixels_max: Maximum pixels of an image, both as received and as resized.
    """

    def __init__(self, recipe: PreprocessorConfig, *, pixels_max: int) -> None:
        self._recipe = recipe
        self._pixels_max = pixels_max
        self._mean = np.array(recipe.mean, dtype=np.float32)
        self._std = np.array(recipe.std, dtype=np.float32)

    def __call__(self, data: bytes | bytearray) -> NDArray[np.float32]:
        """Return the pixels as (3, size, size), in RGB order.

        Raises:
            InvalidRequest: It is not an image of one of `FORMATS`, or it is too narrow.
            RequestTooLarge: The image has too many pixels.
        """
        image = self._fit(self._decode(data))
        values = np.asarray(image, dtype=np.float32) * np.float32(self._recipe.scale)  # (H, W, 3)
        return np.ascontiguousarray(((values - self._mean) / self._std).transpose(2, 0, 1))

    def _decode(self, data: bytes | bytearray) -> Image.Image:
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._check_size(image)
                # Cameras store the orientation in EXIF data.
                return _opaque(ImageOps.exif_transpose(image))
        except Image.UnidentifiedImageError as error:
            raise InvalidRequest(
                f"not an image of a known format ({', '.join(FORMATS)})", param="image"
            ) from error
        except _BROKEN as error:
            raise InvalidRequest(f"the image cannot be decoded: {error}", param="image") from error

    def _check_size(self, image: Image.Image) -> None:
        pixels = image.width * image.height
        if pixels > self._pixels_max:
            raise RequestTooLarge(
                f"The image has {pixels} pixels; the limit is {self._pixels_max} pixels.",
                param="image",
                details={"pixels": str(pixels), "pixels_max": str(self._pixels_max)},
            )

    def _fit(self, image: Image.Image) -> Image.Image:
        """Resize to the tower's square."""
        size, short, filter_ = self._recipe.size, self._recipe.short_edge, self._recipe.resample
        if short is None:
            return image.resize((size, size), filter_)
        width, height = (short * edge // min(image.size) for edge in image.size)
        if width * height > self._pixels_max:
            # An image a few pixels wide and millions long would be resized to billions of pixels.
            raise InvalidRequest(
                f"an image of {image.width} x {image.height} pixels is too narrow", param="image"
            )
        left, top = (width - size) // 2, (height - size) // 2
        return image.resize((width, height), filter_).crop((left, top, left + size, top + size))


def _opaque(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparent pixels are blended with white, as most pages show them."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
