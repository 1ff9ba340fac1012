"""Images that are cut to the grid of tiles nearest to their shape: InternVL."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import (
    SquareEdges,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, check_unscaled, rescaled
from antiphon.model_card.vision.frame_videos import FrameVideos, read_frame_sampling
from antiphon.model_card.vision.tower_fields import SquareTower, shuffle_factor

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits


class AspectTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How InternVL cuts images: to the grid of tiles whose shape is nearest to theirs.

    Attributes:
        tile: Edge of a tile, in pixels.
        least: Tiles of an image, without that which shows all of it.
        most: Likewise.
    """

    tile: Size
    least: Size = 1
    most: Size = 12

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return self.most + (self.most > 1)

    def within(self, limits: PixelLimits) -> AspectTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, least=1, most=1) if limits.low else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles that an image is scaled to."""
        ratio, nearest, best = width / height, math.inf, (1, 1)
        for columns, rows in _grids(self.least, self.most):
            distance = abs(ratio - columns / rows)
            # As near: more tiles only for an image of over half of their pixels.
            larger = width * height > 0.5 * self.tile**2 * columns * rows
            if distance < nearest or (distance == nearest and larger):
                nearest, best = distance, (columns, rows)
        return best

    def frames(self, width: int, height: int) -> int:
        """Tiles of an image, and all of it where there are several."""
        count = math.prod(self.grid(width, height))
        return count + (count > 1)


@lru_cache(maxsize=8)
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Columns and rows of all grids of so many tiles, those of the fewest first."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most // x + 1) if x * y >= least]
    return tuple(sorted(grids, key=math.prod))


class StackedTiles(VisionBase, frozen=True, kw_only=True):
    """An image has a row of `tile_tokens` for each tile and all of it, behind each other: InternVL.

    `before` and `after` are texts around them.
    """

    tiling: AspectTiling
    tile_tokens: int
    before: str
    after: str
    videos: FrameVideos | None = None

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, tiling=self.tiling.within(limits))

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        return (self.before, self.tiling.frames(width, height) * self.tile_tokens, self.after)


class _InternVl(msgspec.Struct, frozen=True):
    image_token_id: int = 151667
    downsample_ratio: float = 0.5
    vision_config: SquareTower = field(default_factory=SquareTower)


class _AspectFile(msgspec.Struct, frozen=True):
    """InternVL's preprocessor_config.json. Whether it says to cut images, its processor does."""

    size: SquareEdges = field(default_factory=SquareEdges)
    min_patches: Size = 1
    max_patches: Size = 12


def read_aspect_tiling(folder: Path) -> AspectTiling:
    """Read how the preprocessor of an InternVL model cuts images.

    Raises:
        ConfigError: The file is malformed, or says nothing that can be done.
    """
    found = image_processor_file(folder)
    read = found.read(_AspectFile)
    if read.size.height != read.size.width or read.min_patches > read.max_patches:
        raise ConfigError(
            f"{found.file}: size must be a square, and min_patches not exceed max_patches"
        )
    return AspectTiling(tile=read.size.height, least=read.min_patches, most=read.max_patches)


def read_internvl(folder: Path) -> StackedTiles:
    """Read how an InternVL model takes images and videos.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _InternVl)
    image, patch = config.vision_config.edges(file)
    by = shuffle_factor(file, config.downsample_ratio)
    tile_tokens = (image // patch // by) ** 2
    videos = FrameVideos(
        placeholder=config.image_token_id,
        markers=("<video>",),
        sampling=read_frame_sampling(folder),
        frame_tokens=tile_tokens,
        before="Frame{}: <img>",
        after="</img>",
        between="\n",
        processing=video_processor_file(folder).digest(config),
    )
    return StackedTiles(
        placeholder=config.image_token_id,
        tiling=read_aspect_tiling(folder),
        tile_tokens=tile_tokens,
        videos=videos,
        before="<img>",
        after="</img>",
        processing=image_processor_file(folder).digest(config),
    )
