"""Options of the media of a request, of the APIs that have them."""

from __future__ import annotations

import sys
from array import array
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.media import Edge, EmbeddingForm, NumberType


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers, row by row, little-endian."""

    data: str
    """Base64, or a URL of the bytes, as of an image."""
    shape: Annotated[list[Edge], Meta(min_length=2, max_length=2)]
    """Number of rows, and of numbers in each: the model's hidden size, or more with deepstack."""
    dtype: NumberType = "float32"
    """Type of the numbers."""


Grids = Annotated[list[Annotated[list[Edge], Meta(max_length=3)]], Meta(max_length=1)]


class ImageEmbeds(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of an image, as the model's own tower and projector make it."""

    feature: list[list[float]] | EmbeddingData | None = None
    """A row of numbers for each placeholder of the image: lists of numbers, or the numbers as
    bytes."""
    image_grid_thw: Grids | None = None
    """As the processor of a Qwen2-VL model returns it: 1, and rows and columns of patches."""
    image_sizes: Grids | None = None
    """Height and width of the image in pixels, for models whose tokens go by the size."""

    def source(self, param: str) -> MediumSource:
        """The embedding as a medium of a request, whose part is `param`.

        Raises:
            InvalidRequest: There is none, or its rows have several lengths.
        """
        given = self.feature
        if not given:
            raise InvalidRequest.at(f"{param}.feature", "an embedding requires feature")
        patches = size = None
        if self.image_grid_thw:
            match self.image_grid_thw[0]:
                case [1, down, across]:
                    patches = down, across
                case _:
                    text = "must be [[1, rows, columns]]: embeddings are of one image each"
                    raise InvalidRequest.at(f"{param}.image_grid_thw", text)
        if self.image_sizes:
            match self.image_sizes[0]:
                case [height, width]:
                    size = width, height
                case _:
                    raise InvalidRequest.at(f"{param}.image_sizes", "must be [[height, width]]")
        if isinstance(given, EmbeddingData):
            rows, width = given.shape
            form = EmbeddingForm(
                rows=rows, width=width, dtype=given.dtype, patches=patches, size=size
            )
            return MediumSource(given.data, param, embedding=form)
        width = len(given[0])
        if not width or any(len(row) != width for row in given):
            raise InvalidRequest.at(f"{param}.feature", "rows must have the same length, not 0")
        numbers = array("f", chain.from_iterable(given))
        if sys.byteorder == "big":
            numbers.byteswap()
        form = EmbeddingForm(rows=len(given), width=width, patches=patches, size=size)
        return MediumSource(numbers.tobytes(), param, embedding=form)


Pixels = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of pixels that media are scaled to, and of frames that are seen of videos.

    Unknown fields are rejected.
    """

    min_pixels: Pixels | None = None
    """Minimum, of models that keep the shape of images. Defaults to the model's."""
    max_pixels: Pixels | None = None
    """Maximum, at most the model's, which is the default."""
    fps: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Frames a second that are seen of videos. Defaults to the model's. Of a list of frames, how
    many there are a second; by default 2."""
    max_frames: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Maximum frames that are seen of a video, at most the model's, which is the default."""


def pixel_limits(options: ImageOptions | None) -> PixelLimits | None:
    """Return the limits of a request; None if it has none."""
    if options is None:
        return None
    return limits_of(options.min_pixels, options.max_pixels, options.fps, options.max_frames)


def limits_of(
    least: int | None, most: int | None, fps: float | None = None, frames: int | None = None
) -> PixelLimits | None:
    """Return these limits; None if none is set."""
    limits = PixelLimits(least=least or 0, most=most or 0, fps=fps or 0.0, frames=frames or 0)
    return None if limits == PixelLimits() else limits
