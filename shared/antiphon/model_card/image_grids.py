"""Images that keep their shape, about: to which sizes they are scaled, and what stands for them."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from antiphon.model_card.images import LIMITS, LOW_PIXELS, Pieces, Size, VisionBase, check_unscaled
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
    """

    patch: Size
    merge: Size
    pixels_min: Size
    pixels_max: Size
    grows: bool = False

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
        return msgspec.structs.replace(self, pixels_min=least, pixels_max=most)

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most, or nearly so: a narrow one may have more."""
        return self.pixels_max // self.edge**2

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the scaled image: whole tokens.

        Raises:
            InvalidRequest: The image is too narrow.
        """
        if max(width, height) > ASPECT_MAX * min(width, height):
            raise InvalidRequest(
                f"an image of {width} x {height} pixels is too narrow: the longer edge may be "
                f"{ASPECT_MAX} times the shorter one"
            )
        edge = self.edge
        if self.grows and min(width, height) < edge:
            scale = max(edge / height, edge / width)
            width, height = int(width * scale), int(height * scale)
        across, down = (round(each / edge) * edge for each in (width, height))
        if across * down > self.pixels_max:
            factor = math.sqrt(width * height / self.pixels_max)
            across, down = (
                max(edge, math.floor(each / factor / edge) * edge) for each in (width, height)
            )
        elif across * down < self.pixels_min:
            factor = math.sqrt(self.pixels_min / (width * height))
            across, down = (math.ceil(each * factor / edge) * edge for each in (width, height))
        return across, down


class GridImages(VisionBase, frozen=True, kw_only=True):
    """An image has as many rows and columns of tokens as fit into its scaled size: Qwen2-VL."""

    sizes: GridSizes

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        across, down = self.sizes.scaled(width, height)
        return (across // self.sizes.edge * (down // self.sizes.edge),)

    def columns(self, width: int, height: int) -> int:
        return self.sizes.scaled(width, height)[0] // self.sizes.edge

    def pixels(self, patches: tuple[int, int]) -> tuple[int, int]:
        down, across = patches
        return across * self.sizes.patch, down * self.sizes.patch

    def within(self, limits: PixelLimits) -> Self:
        return _scaled_within(self, limits)


class RowSizes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To which sizes Pixtral's preprocessor scales images: whole tokens, and no smaller ones up.

    Attributes:
        edge: Of a token, in pixels.
        longest: Edge to which larger images are scaled down.
    """

    edge: Size
    longest: Size

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most."""
        return math.ceil(self.longest / self.edge) ** 2

    def within(self, limits: PixelLimits) -> RowSizes:
        """These sizes within the limits of a request.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        longest = min(self.longest, math.isqrt(LOW_PIXELS)) if limits.low else self.longest
        return msgspec.structs.replace(self, longest=longest)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the scaled image: whole tokens.

        Raises:
            InvalidRequest: The image is too narrow.
        """
        ratio = max(height / self.longest, width / self.longest)
        across, down = width, height
        if ratio > 1:
            across, down = math.floor(width / ratio), math.floor(height / ratio)
        if not min(across, down):
            raise InvalidRequest(
                f"an image of {width} x {height} pixels is too narrow: scaled to {self.longest} "
                "pixels, nothing is left of the shorter edge"
            )
        edge = self.edge
        return math.ceil(across / edge) * edge, math.ceil(down / edge) * edge


class RowImages(VisionBase, frozen=True, kw_only=True):
    """An image has as many rows of tokens as fit into its scaled size, with ends: Pixtral."""

    sizes: RowSizes

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        columns, rows = (each // self.sizes.edge for each in self.sizes.scaled(width, height))
        return (*(columns, "[IMG_BREAK]") * (rows - 1), columns, "[IMG_END]")

    def within(self, limits: PixelLimits) -> Self:
        return _scaled_within(self, limits)


Scaled = TypeVar("Scaled", GridImages, RowImages)


def _scaled_within(card: Scaled, limits: PixelLimits) -> Scaled:
    sizes = card.sizes.within(limits)
    if sizes == card.sizes:  # what a request repeats changes no key
        return card
    processing = hashlib.sha256(card.processing + msgspec.json.encode(sizes)).digest()
    return msgspec.structs.replace(card, sizes=sizes, processing=processing)
