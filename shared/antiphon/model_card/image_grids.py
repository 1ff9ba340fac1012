"""Media that keep their shape, about: to which sizes they are scaled, and what stands for them."""

from __future__ import annotations

import hashlib
import math
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from antiphon.model_card.images import LIMITS, LOW_PIXELS, Pieces, Size, VisionBase, check_unscaled
from antiphon.model_card.videos import PAIR, Sampling, SeenVideo
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.claim import PixelLimits, VideoHeader

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


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around each grid of a video.

    Attributes:
        before: With a place for the seconds, or without.
        after: Likewise.
        between: The seconds are those between the two frames; else the whole ones of the first.
    """

    before: str
    after: str
    between: bool = False

    def pieces(self, tokens: int, first: float, last: float) -> Pieces:
        """What stands for two frames, which are seen at these seconds."""
        seconds = (first + last) / 2 if self.between else math.floor(first)
        return self.before.format(seconds), tokens, self.after.format(seconds)


class GridVideos(msgspec.Struct, frozen=True, kw_only=True):
    """A video is a grid of tokens for each two of its frames: Qwen-VL, GLM-4V.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        markers: What chat templates write for a video; of several the first one that is there.
        stamp: Set: each grid stands alone, with the seconds at which it is seen.
        tokens_per_second: Positions of a second; None: of a grid.
        processing: Digest of what decides the embedding beside sampling, sizes and the weights.
    """

    placeholder: int
    markers: tuple[str, ...]
    sampling: Sampling
    sizes: GridSizes
    stamp: Stamp | None = None
    tokens_per_second: float | None = None
    processing: bytes

    def within(self, limits: PixelLimits) -> Self:
        """The card of videos whose frames and sizes are limited by their request.

        Raises:
            InvalidRequest: No video has such sizes, or they exceed the model's.
        """
        sizes, sampling = self.sizes.within(limits), self.sampling.within(limits)
        return msgspec.structs.replace(self, sizes=sizes, sampling=sampling)

    def seen(self, width: int, height: int, video: VideoHeader) -> SeenVideo:
        """What stands for a video whose frames have this size in pixels.

        Raises:
            InvalidRequest: It is too narrow, or has too many frames.
        """
        indices = self.sampling.indices(video)
        across, down = self.sizes.scaled(width, height, self.sampling.counted(indices))
        edge, times = self.sizes.edge, -(-len(indices) // PAIR)
        tokens, columns = across // edge * (down // edge), across // edge
        if self.stamp is not None:
            ends = [(indices[at], indices[min(at + 1, len(indices) - 1)]) for at in _pairs(indices)]
            written = [
                self.stamp.pieces(tokens, *(each / video.fps for each in pair)) for pair in ends
            ]
            return SeenVideo(tuple(chain.from_iterable(written)), columns)
        step = 1.0
        if self.tokens_per_second is not None:
            step = self.tokens_per_second * PAIR / (len(indices) / video.frames * video.fps)
        if (times - 1) * step >= times * tokens:
            # Positions are looked up in tables that are as long as the context.
            raise InvalidRequest(
                f"the {len(indices)} frames that are seen lie too far apart for "
                f"{times * tokens} tokens: ask for more of them (fps), or larger ones"
            )
        return SeenVideo((times * tokens,), columns, times, step)

    def processed(self, video: VideoHeader) -> bytes:
        """Digest of all that decides a video's embedding and positions beside its bytes."""
        settings = msgspec.json.encode([self.sampling, self.sizes, video])
        return hashlib.sha256(b"video\0" + self.processing + settings).digest()


def _pairs(indices: Sequence[int]) -> range:
    return range(0, len(indices), PAIR)


class GridImages(VisionBase, frozen=True, kw_only=True):
    """An image has as many rows and columns of tokens as fit into its scaled size: Qwen2-VL."""

    sizes: GridSizes
    videos: GridVideos | None = None

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


class PaddedSizes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How Kimi K2.5's preprocessor scales images down, in their shape, and pads them to tokens.

    Attributes:
        patch: Edge of a patch, in pixels.
        merge: Edge of the square of patches that becomes a token, in patches.
        patches_max: Of an image, roughly.
        side_max: Of the longer edge of an image, in patches.
    """

    patch: Size
    merge: Size
    patches_max: Size
    side_max: Size

    @property
    def edge(self) -> int:
        """Edge of a token, in pixels."""
        return self.patch * self.merge

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most, or nearly so: its edges are rounded up."""
        side = math.ceil(self.side_max / self.merge)
        return min(side**2, self.patches_max // self.merge**2 + 2 * side + 1)

    def within(self, limits: PixelLimits) -> PaddedSizes:
        """These sizes within the limits of a request.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        most = self.patches_max
        if limits.low:
            most = min(most, max(1, LOW_PIXELS // self.patch**2))
        return msgspec.structs.replace(self, patches_max=most)

    def content(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the scaled image, without the padding."""
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        side = self.side_max * self.patch
        scale = min(1.0, math.sqrt(self.patches_max / patches), side / height, side / width)
        across, down = (min(max(1, int(edge * scale)), side) for edge in (width, height))
        return across, down

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the padded image: whole tokens."""
        across, down = self.content(width, height)
        edge = self.edge
        return math.ceil(across / edge) * edge, math.ceil(down / edge) * edge


class PaddedImages(VisionBase, frozen=True, kw_only=True):
    """An image has the rows and columns of tokens of its padded size, in a line: Kimi K2.5."""

    sizes: PaddedSizes

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        across, down = self.sizes.scaled(width, height)
        return (across // self.sizes.edge * (down // self.sizes.edge),)

    def within(self, limits: PixelLimits) -> Self:
        return _scaled_within(self, limits)


Scaled = TypeVar("Scaled", GridImages, RowImages, PaddedImages)


def _scaled_within(card: Scaled, limits: PixelLimits) -> Scaled:
    sizes = card.sizes.within(limits)
    if sizes == card.sizes:  # what a request repeats changes no key
        return card
    processing = hashlib.sha256(card.processing + msgspec.json.encode(sizes)).digest()
    return msgspec.structs.replace(card, sizes=sizes, processing=processing)
