"""Images on a canvas of tiles, in their shape: Llama 4."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import SquareEdges, image_processor_file
from antiphon.model_card.vision.base import (
    Pieces,
    Size,
    VisionBase,
    check_unscaled,
    rescaled,
    single,
)
from antiphon.model_card.vision.tower_fields import shuffle_factor

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

LLAMA4 = "llama4"


class CanvasTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How Llama 4 cuts images: at the top left of a canvas of tiles, without changing their shape.

    Some sizes are computed in float32, as in transformers: which one is nearest depends on it.

    Attributes:
        tile: Edge of a tile, in pixels.
        most: Tiles of an image, without that which shows all of it.
        largest: Whether an image is scaled up to a canvas; else it is to a tile, at most.
    """

    tile: Size
    most: Size = 16
    largest: bool = False

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return self.most + (self.most > 1)

    def within(self, limits: PixelLimits) -> CanvasTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, most=1) if limits.low else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of the canvas: on which an image grows least, or else shrinks least."""
        scales = {
            (columns, rows): min(
                single(self.tile * columns / width), single(self.tile * rows / height)
            )
            for columns, rows in _canvases(self.most)
        }
        growing = [scale for scale in scales.values() if scale >= 1]
        if growing:
            scale = max(growing) if self.largest else min(growing)
        else:
            scale = max(scales.values())
        return min((size for size, each in scales.items() if each == scale), key=math.prod)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image within the canvas, in its shape."""
        across, down = (self.tile * count for count in self.grid(width, height))
        most_across, most_down = max(width, self.tile), max(height, self.tile)
        # What the canvas limits is a tensor in transformers.
        in_single = self.largest or across < most_across, self.largest or down < most_down
        if not self.largest:
            across, down = min(most_across, across), min(most_down, down)
        by_width, by_height = across / width, down / height
        by_both = (single(by_width), single(by_height)) if any(in_single) else (by_width, by_height)
        if by_both[0] < by_both[1]:
            rest = single(height * single(by_width)) if in_single[0] else height * by_width
            return across, max(1, min(math.floor(rest), down))
        rest = single(width * single(by_height)) if in_single[1] else width * by_height
        return max(1, min(math.floor(rest), across)), down


@lru_cache(maxsize=8)
def _canvases(most: int) -> tuple[tuple[int, int], ...]:
    """Columns and rows of all canvases, by their shapes: of equals the first one is taken."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                columns = tiles // rows
                by_shape.setdefault(rows / columns, []).append((columns, rows))
    return tuple(chain.from_iterable(by_shape.values()))


class SeparatedTiles(VisionBase, frozen=True, kw_only=True):
    """An image has `tile_tokens` rows for each of its tiles, and for all of it behind: Llama 4.

    There are separators between tiles. An image of one tile has that alone.
    """

    tiling: CanvasTiling
    tile_tokens: int

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, tiling=self.tiling.within(limits))

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        columns, rows = self.tiling.grid(width, height)
        pieces, before, tiles = list[str | int](), "<|image_start|>", columns * rows
        for number in range(1, tiles + 1 if tiles > 1 else 1):
            pieces += [before, self.tile_tokens]
            before = "<|tile_x_separator|>" if number % columns else "<|tile_y_separator|>"
        return (*pieces, f"{before}<|image|>", self.tile_tokens, "<|image_end|>")


class Llama4Tower(msgspec.Struct, frozen=True):
    """What of Llama 4's vision_config decides the number of rows of a tile."""

    image_size: Size = 448
    patch_size: Size = 14
    pixel_shuffle_ratio: float = 0.5

    def factor(self, file: Path) -> int:
        """Edge of the squares of patches that become one row.

        Raises:
            ConfigError: It is no whole number, or patches are left over.
        """
        factor = shuffle_factor(file, self.pixel_shuffle_ratio, "pixel_shuffle_ratio")
        if (side := self.image_size // self.patch_size) % factor:
            raise ConfigError(f"{file}: pixel_shuffle_ratio: {factor} patches must divide {side}")
        return factor


class _Llama4(msgspec.Struct, frozen=True):
    image_token_index: int = 200092
    vision_config: Llama4Tower = field(default_factory=Llama4Tower)


def read_llama4_tower(file: Path) -> Llama4Tower:
    """Read what of config.json decides the number of rows of a tile.

    Raises:
        ConfigError: It is malformed.
    """
    return read_json(file, _Llama4).vision_config


class _CanvasFile(msgspec.Struct, frozen=True):
    """Llama 4's preprocessor_config.json."""

    size: SquareEdges = field(default_factory=lambda: SquareEdges(336, 336))
    max_patches: Annotated[int, Meta(ge=1, le=256)] = 16
    resize_to_max_canvas: bool = False


def read_canvas_tiling(folder: Path) -> CanvasTiling:
    """Read how the preprocessor of a Llama 4 model cuts images.

    Raises:
        ConfigError: The file is malformed, or its tiles are no squares.
    """
    found = image_processor_file(folder)
    read = found.read(_CanvasFile)
    if read.size.height != read.size.width:
        raise ConfigError(f"{found.file}: size must be a square")
    return CanvasTiling(
        tile=read.size.height, most=read.max_patches, largest=read.resize_to_max_canvas
    )


def read_llama4(folder: Path) -> SeparatedTiles:
    """Read how a Llama 4 model takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _Llama4)
    tower = config.vision_config
    side = tower.image_size // tower.patch_size // tower.factor(file)
    return SeparatedTiles(
        placeholder=config.image_token_index,
        marker="<|image|>",
        tiling=read_canvas_tiling(folder),
        tile_tokens=side**2,
        processing=image_processor_file(folder).digest(config),
    )
