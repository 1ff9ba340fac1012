"""Images that are cut into tiles between marks, and frames likewise: Idefics3, SmolVLM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
from msgspec import Meta, field

from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import (
    ModelKind,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, check_unscaled, rescaled
from antiphon.model_card.vision.frame_videos import WORDS_MAX, FrameVideos
from antiphon.model_card.vision.videos import SkippingSampling

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

IDEFICS = ("idefics3", "smolvlm")

EDGE_MAX = 4096
"""Edge beyond which Idefics3 scales no image, whatever its preprocessor says."""


class Tiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How Idefics3 cuts images into tiles, as its preprocessor does.

    Attributes:
        longest_edge: What the longer edge of an image is scaled to first.
        tile: Edge of a tile.
        splits: Whether images are cut; else each is one tile.
    """

    longest_edge: Size
    tile: Size
    splits: bool

    def within(self, limits: PixelLimits) -> Tiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, splits=self.splits and not limits.low)

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        if not self.splits:
            return 1
        return math.ceil(min(self.longest_edge, EDGE_MAX) / self.tile) ** 2 + 1

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is scaled first, in its aspect ratio, about."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > EDGE_MAX:
            width, height = EDGE_MAX, int(EDGE_MAX / ratio)
        elif height > width and height > EDGE_MAX:
            width, height = int(EDGE_MAX * ratio), EDGE_MAX
        return max(width, 1), max(height, 1)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles that an image is scaled to next; 1 and 1: it is not cut."""
        if not self.splits:
            return 1, 1
        width, height = self.scaled(width, height)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            return columns, math.ceil(int(columns * self.tile / ratio) / self.tile)
        rows = math.ceil(height / self.tile)
        return math.ceil(int(rows * self.tile * ratio) / self.tile), rows


class TiledImages(VisionBase, frozen=True, kw_only=True):
    """An image has a row of `tile_tokens` for each of its tiles, and for all of it: Idefics3."""

    tiling: Tiling
    tile_tokens: int
    videos: FrameVideos | None = None

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, tiling=self.tiling.within(limits))

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        columns, rows = self.tiling.grid(width, height)
        whole = "<fake_token_around_image><global-img>"
        ends: Pieces = (self.tile_tokens, "<fake_token_around_image>")
        if (columns, rows) == (1, 1):
            return (whole, *ends)
        pieces: list[str | int] = []
        after = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                mark = f"<fake_token_around_image><row_{row}_col_{column}>"
                pieces += [after + mark, self.tile_tokens]
                after = ""
            after = "\n"
        return (*pieces, f"\n\n{whole}", *ends)


class _LongestEdge(msgspec.Struct, frozen=True):
    longest_edge: Size


class _TilingFile(msgspec.Struct, frozen=True):
    """Idefics3's preprocessor_config.json: what decides the tiles."""

    size: _LongestEdge = field(default_factory=lambda: _LongestEdge(4 * 364))
    max_image_size: _LongestEdge = field(default_factory=lambda: _LongestEdge(364))
    do_image_splitting: bool = True


def read_tiling(folder: Path) -> Tiling:
    """Read how the preprocessor of an Idefics3 model cuts images.

    Raises:
        ConfigError: preprocessor_config.json is malformed.
    """
    read = image_processor_file(folder).read(_TilingFile)
    return Tiling(
        longest_edge=read.size.longest_edge,
        tile=read.max_image_size.longest_edge,
        splits=read.do_image_splitting,
    )


class _IdeficsTower(msgspec.Struct, frozen=True):
    image_size: Size = 224
    patch_size: Size = 32


class _Idefics(msgspec.Struct, frozen=True):
    image_token_id: int = 128257
    scale_factor: Size = 2
    vision_config: _IdeficsTower = field(default_factory=_IdeficsTower)


def read_idefics(folder: Path) -> TiledImages:
    """Read how an Idefics3 or SmolVLM model takes images, and videos, if it does.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    config = read_json(folder / "config.json", _Idefics)
    tower = config.vision_config
    tokens, videos = (tower.image_size // tower.patch_size) ** 2 // config.scale_factor**2, None
    if (seen := read_smol_videos(folder)) is not None:
        mark = "<fake_token_around_image>"
        videos = FrameVideos(
            placeholder=config.image_token_id,
            markers=("<video>",),
            in_templates=False,
            sampling=seen[1],
            frame_tokens=tokens,
            intro="You are provided the following series of {} frames from a {} [H:MM:SS] video.\n",
            before=f"\nFrame from {{1}}:{mark}<global-img>",
            after=mark,
            end="\n\n",
            processing=video_processor_file(folder).digest(config),
        )
    return TiledImages(
        placeholder=config.image_token_id,
        tiling=read_tiling(folder),
        tile_tokens=tokens,
        videos=videos,
        processing=image_processor_file(folder).digest(config),
    )


class _VideoSampling(msgspec.Struct, frozen=True):
    fps: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    max_frames: Annotated[int, Meta(ge=1, le=WORDS_MAX)] = 64
    video_size: _LongestEdge = field(default_factory=lambda: _LongestEdge(4 * 364))


class _SmolVideoFile(msgspec.Struct, frozen=True):
    """SmolVLM's settings of videos, which are beside those of its images.

    The size of images, if it is there, wins over that of videos, as in transformers.
    """

    size: _LongestEdge | None = None
    max_image_size: _LongestEdge = field(default_factory=lambda: _LongestEdge(364))
    video_sampling: _VideoSampling | None = None


def read_smol_videos(folder: Path) -> tuple[Tiling, SkippingSampling] | None:
    """Read how a SmolVLM model scales frames, and which ones it sees; None: it takes no videos.

    Raises:
        ConfigError: The file is malformed.
    """
    if read_json(folder / "config.json", ModelKind).model_type != "smolvlm":
        return None
    read = video_processor_file(folder).read(_SmolVideoFile)
    if (sampling := read.video_sampling) is None:
        return None
    tiling = Tiling(
        longest_edge=(read.size or sampling.video_size).longest_edge,
        tile=read.max_image_size.longest_edge,
        splits=False,
    )
    return tiling, SkippingSampling(fps=sampling.fps, most=sampling.max_frames)
