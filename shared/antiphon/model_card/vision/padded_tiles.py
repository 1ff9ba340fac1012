"""Images that are padded to a grid of tiles, in their shape: LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import (
    ModelKind,
    image_processor_file,
    video_processor_file,
)
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, check_unscaled, rescaled
from antiphon.model_card.vision.frame_videos import ONEVISION, FrameVideos, read_frame_sampling
from antiphon.model_card.vision.tower_fields import FeatureFields, TowerFields

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

NEXT = "llava_next"
ANYRES = (NEXT, ONEVISION)


class AnyresTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How LLaVA-NeXT cuts images: padded to one of several sizes, without changing their shape.

    All of the image comes first, as a tile.

    Attributes:
        tile: Edge of a tile, in pixels.
        sizes: Widths and heights of the grids; none: an image is one tile.
    """

    tile: Size
    sizes: tuple[tuple[Size, Size], ...]

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return 1 + max((math.prod(size) // self.tile**2 for size in self.sizes), default=0)

    def within(self, limits: PixelLimits) -> AnyresTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, sizes=()) if limits.low else self

    def target(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is padded to: which shows most of its pixels, and pads least."""
        best, shown, wasted = self.sizes[0], 0, math.inf
        for size in self.sizes:
            scale = min(size[0] / width, size[1] / height)
            showing = min(int(width * scale) * int(height * scale), width * height)
            wasting = math.prod(size) - showing
            if showing > shown or (showing == shown and wasting < wasted):
                best, shown, wasted = size, showing, wasting
        return best

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles, apart from that which shows all of an image."""
        across, down = self.target(width, height)
        return across // self.tile, down // self.tile

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image within the grid, in its shape."""
        across, down = self.target(width, height)
        by_width, by_height = across / width, down / height
        if by_width < by_height:
            return across, min(math.ceil(height * by_width), down)
        return min(math.ceil(width * by_height), across), down

    def margins(self, width: int, height: int, side: int) -> tuple[int, int]:
        """Columns and rows of patches at each edge that are padding, with `side` of them a tile."""
        columns, rows = (count * side for count in self.grid(width, height))
        if width / height > columns / rows:
            return 0, (rows - int(round(height * (columns / width), 7))) // 2
        return (columns - int(round(width * (rows / height), 7))) // 2, 0


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """How LLaVA-NeXT and LLaVA-OneVision make rows of tiles' patches.

    Attributes:
        side: Patches of a tile's edge.
        tiles_max: A grid of patches that exceeds so many tiles by a fifth is scaled down; None: it
            never is.
    """

    side: Size
    tiles_max: Size | None = None

    @property
    def pooled_side(self) -> int:
        """Edge of the grid of a frame of a video."""
        return -(-self.side // 2)

    def grid(self, tiling: AnyresTiling, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of an image's grid of patches, as it is packed."""
        across, down = tiling.margins(width, height, self.side)
        columns, rows = (count * self.side for count in tiling.grid(width, height))
        columns, rows = columns - 2 * across, rows - 2 * down
        if self.tiles_max is None:
            return columns, rows
        ratio = math.sqrt(columns * rows / (self.tiles_max * self.side**2))
        return (int(columns // ratio), int(rows // ratio)) if ratio > 1.1 else (columns, rows)


class PaddedTiles(VisionBase, frozen=True, kw_only=True):
    """An image has the rows of all of it in a tile, and of its grid of tiles: LLaVA-NeXT.

    Behind each row of the grid is one for a new line, and behind an image of one tile.
    """

    tiling: AnyresTiling
    packing: Packing
    videos: FrameVideos | None = None

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, tiling=self.tiling.within(limits))

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        whole = self.packing.side**2
        if not self.tiling.sizes:
            return (whole + 1,)
        columns, rows = self.packing.grid(self.tiling, width, height)
        return (whole + rows * (columns + 1),)


_NEXT_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

_EDGES = range(384, 2305, 384)

_ONEVISION_SIZES = tuple((height, width) for height in _EDGES for width in _EDGES)


class _Next(FeatureFields, frozen=True):
    vision_config: TowerFields = field(default_factory=TowerFields)
    image_grid_pinpoints: tuple[tuple[Size, Size], ...] = _NEXT_SIZES
    vision_aspect_ratio: str = ""


class _Onevision(_Next, frozen=True):
    image_token_index: int = 151646
    video_token_id: int | None = None
    video_token_index: int = 151647
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: str = "full"
    image_grid_pinpoints: tuple[tuple[Size, Size], ...] = _ONEVISION_SIZES
    vision_aspect_ratio: str = "anyres_max_9"


class _AnyresFile(msgspec.Struct, frozen=True):
    image_grid_pinpoints: tuple[tuple[Size, Size], ...] | None = None


def read_anyres_fields(folder: Path, kind: str) -> FeatureFields:
    """Read what a LLaVA-NeXT or LLaVA-OneVision model takes of its tower.

    Raises:
        ConfigError: config.json is malformed, or not supported.
    """
    file = folder / "config.json"
    fields = _anyres_config(folder, kind)
    fields.check(file)
    if fields.drops_first != (fields.vision_config.model_type == "clip_vision_model"):
        raise ConfigError(
            f"{file}: vision_feature_select_strategy = {fields.vision_feature_select_strategy!r}: "
            "must leave only the patches, in their grid"
        )
    return fields


def _anyres_config(folder: Path, kind: str) -> _Next:
    return read_json(folder / "config.json", _Onevision if kind == ONEVISION else _Next)


def read_anyres(folder: Path, kind: str) -> tuple[AnyresTiling, Packing]:
    """Read how such a model's images are cut, and their patches packed.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, not supported, or they differ.
    """
    file, config = folder / "config.json", _anyres_config(folder, kind)
    found = image_processor_file(folder)
    default = _ONEVISION_SIZES if kind == ONEVISION else _NEXT_SIZES
    sizes, tower = config.image_grid_pinpoints, config.vision_config
    if (found.read(_AnyresFile).image_grid_pinpoints or default) != sizes:
        raise ConfigError(f"{found.file}: image_grid_pinpoints: must be those of {file}")
    if not sizes or any(edge % tower.image_size for size in sizes for edge in size):
        raise ConfigError(
            f"{file}: image_grid_pinpoints: must be multiples of image_size = {tower.image_size}"
        )
    most, name = None, config.vision_aspect_ratio
    if kind == ONEVISION:
        number = name.removeprefix("anyres_max_")
        if not number.isdecimal() or not 0 < int(number) < 1000 or number == name:
            raise ConfigError(f"{file}: vision_aspect_ratio = {name!r}: must be anyres_max_N")
        most = int(number)
    tiling = AnyresTiling(
        tile=tower.image_size, sizes=tuple((width, height) for height, width in sizes)
    )
    return tiling, Packing(side=tower.image_size // tower.patch_size, tiles_max=most)


def read_llava_next(folder: Path) -> PaddedTiles:
    """Read how a LLaVA-NeXT or LLaVA-OneVision model takes images, and videos, if it does.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, not supported, or they differ.
    """
    kind = read_json(folder / "config.json", ModelKind).model_type
    read_anyres_fields(folder, kind)
    config = _anyres_config(folder, kind)
    tiling, packing = read_anyres(folder, kind)
    placeholder, videos = config.image_token_id, None
    if isinstance(config, _Onevision):
        of_video = config.video_token_id
        videos = FrameVideos(
            placeholder=config.video_token_index if of_video is None else of_video,
            markers=("<video>",),
            sampling=read_frame_sampling(folder),
            frame_tokens=packing.pooled_side**2,
            end_tokens=1,
            processing=video_processor_file(folder).digest(config),
        )
    return PaddedTiles(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        tiling=tiling,
        packing=packing,
        videos=videos,
        processing=image_processor_file(folder).digest(config),
    )
