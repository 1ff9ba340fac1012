"""Sizes of media that keep their shape and are grids of tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_card.vision.base import LIMITS, LOW_PIXELS, Size
from antiphon.model_card.vision.videos import PAIR
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.claim import PixelLimits

ASPECT_MAX = 200
"""Of edges of an image that Qwen2-VL takes, how many times the longer one is the shorter one."""


class GridSizes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To which sizes Qwen2-VL's preprocessor scales images, keeping their shape.

    Attributes:
        patch: Edge of a patch, in pixels.
        merge: Edge of the square of patches that becomes a token, in patches.
        pixels_min: Of a scaled image, roughly.
        pixels_max: Likewise.
        grows: Whether an image narrower than a token is scaled to one first.
        fills: Likewise, but edge by edge, rounded, and before the edges are compared.
        joint: Whether the numbers of pixels are those of all frames of a video.
        total: Pixels of all grids of a video, at most; each stands for a pair of frames.
    """

    patch: Size
    merge: Size
    pixels_min: Size
    pixels_max: Size
    grows: bool = False
    fills: bool = False
    joint: bool = False
    total: Size | None = None

    @property
    def edge(self) -> int:
        """Edge of a token, in pixels."""
        return self.patch * self.merge

    def within(self, limits: PixelLimits) -> GridSizes:
        """These sizes within the limits of a request.

        Raises:
            InvalidRequest: No image has a size within them, or they exceed the model's.
        """
        least, most = limits.least or self.pixels_min, limits.most or self.pixels_max
        if most > self.pixels_max:
            raise InvalidRequest.at(
                LIMITS, f"max_pixels = {most}: must be at most {self.pixels_max}, the model's"
            )
        if most < self.edge**2:
            raise InvalidRequest.at(
                LIMITS, f"max_pixels = {most}: must be at least {self.edge**2}, those of a token"
            )
        if least > most:
            raise InvalidRequest.at(LIMITS, f"min_pixels = {least}: exceeds max_pixels = {most}")
        if limits.low:
            most = max(min(most, LOW_PIXELS), least, self.edge**2)
        # A request that sets numbers of pixels has so many in each frame.
        total = None if limits.least or limits.most else self.total
        return msgspec.structs.replace(self, pixels_min=least, pixels_max=most, total=total)

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most, or nearly so: a narrow one may have more."""
        return self.pixels_max // self.edge**2

    def scaled(self, width: int, height: int, frames: int = 1) -> tuple[int, int]:
        """Width and height of the scaled image, or of a video's frames: whole tokens.

        Raises:
            InvalidRequest: The image is too narrow.
        """
        # Rounded to pairs, as the sizes are, where numbers of pixels are compared.
        edge, least, most = self.edge, self.pixels_min, self.pixels_max
        if self.total is not None:
            most = max(edge**2, min(most, self.total * PAIR // frames))
            least = min(least, most)
        frames, paired = (frames, round(frames / PAIR) * PAIR) if self.joint else (1, 1)
        if self.fills and height < edge:
            width, height = round(width * edge / height), edge
        if self.fills and width < edge:
            width, height = edge, round(height * edge / width)
        if max(width, height) > ASPECT_MAX * min(width, height):
            raise InvalidRequest(
                f"an image of {width} x {height} pixels is too narrow: the longer edge may be "
                f"{ASPECT_MAX} times the shorter one"
            )
        if self.grows and min(width, height) < edge:
            scale = max(edge / height, edge / width)
            width, height = int(width * scale), int(height * scale)
        across, down = (round(each / edge) * edge for each in (width, height))
        if paired * across * down > most:
            factor = math.sqrt(frames * width * height / most)
            across, down = (
                max(edge, math.floor(each / factor / edge) * edge) for each in (width, height)
            )
        elif paired * across * down < least:
            factor = math.sqrt(least / (frames * width * height))
            across, down = (math.ceil(each * factor / edge) * edge for each in (width, height))
        return across, down
