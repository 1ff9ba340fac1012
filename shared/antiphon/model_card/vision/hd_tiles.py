"""Images that are padded to a grid of tiles, whose padding has no tokens: Phi-4-multimodal.

Source: Dong et al. 2024, arXiv:2404.06512, section 3.2 (dynamic HD); Microsoft 2025,
arXiv:2503.01743, section 2.2.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import PixelFields, image_processor_file
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, check_unscaled, rescaled
from antiphon.model_card.vision.stacked_tiles import AspectTiling
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

PHI4 = "phi4_multimodal"
MERGE = 2
"""Edge of the square of patches that becomes a token, in patches."""
EDGE_MIN = 10
"""Minimum of an edge of a scaled image, in pixels, whatever the size of tiles."""
_BICUBIC = 3


class HdTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How Phi-4-multimodal cuts images: at the top left of a grid of tiles, in their shape.

    Small images have as many tiles as cover them, larger ones the grid whose shape is nearest to
    theirs. Patches that are padding alone have no tokens. All of the grid is a tile, too.

    Attributes:
        tile: Edge of a tile, in pixels: an even number of patches.
        patch: Edge of a patch, in pixels.
        most: Tiles of an image, without that which shows all of it.
    """

    tile: Size
    patch: Size
    most: Size = 36

    @property
    def frames_max(self) -> int:
        """Tiles of an image, at most, and all of it."""
        return self.most + 1

    @property
    def side(self) -> int:
        """Edge of a tile, in patches."""
        return self.tile // self.patch

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most: the tiles are one below the other."""
        side = self.side // MERGE
        return self.frames_max * side * (side + 1) + 1

    def within(self, limits: PixelLimits) -> HdTiling:
        """This tiling within the limits of a request: one tile is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return self.of(1) if limits.low else self

    def of(self, tiles: int) -> HdTiling:
        """This tiling as an image was cut that has so many tiles, without that of all of it."""
        return msgspec.structs.replace(self, most=1) if tiles == 1 else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles, apart from that which shows all of an image."""
        columns, rows = math.ceil(width / self.tile), math.ceil(height / self.tile)
        if columns * rows <= self.most:
            return columns, rows
        return AspectTiling(tile=self.tile, most=self.most).grid(width, height)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image within the grid, in its shape.

        Raises:
            InvalidRequest: The image is too narrow.
        """
        across, down = (self.tile * count for count in self.grid(width, height))
        by_width, by_height = across / width, down / height
        if by_width < by_height:
            down = int(height * by_width)
        else:
            across = int(width * by_height)
        if min(across, down) < EDGE_MIN:
            raise InvalidRequest(
                f"an image of {width} x {height} pixels is too narrow: scaled to {across} x {down} "
                f"pixels, an edge has fewer than {EDGE_MIN}"
            )
        return across, down

    def patches(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of the grid that are not padding alone."""
        columns, rows = self.grid(width, height)
        across, down = self.scaled(width, height)
        return (
            rows * self.side - (rows * self.tile - down) // self.patch,
            columns * self.side - (columns * self.tile - across) // self.patch,
        )

    def tokens(self, width: int, height: int) -> int:
        """Tokens of an image: those of its grid and of all of it, in rows with an end each.

        There is one between the two.
        """
        down, across = (math.ceil(count / MERGE) for count in self.patches(width, height))
        side = self.side // MERGE
        return down * (across + 1) + 1 + side * (side + 1)


class HdImages(VisionBase, frozen=True, kw_only=True):
    """An image has as many tokens as its grid of tiles has without padding, and all of it."""

    tiling: HdTiling

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        return (self.tiling.tokens(width, height),)

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, tiling=self.tiling.within(limits))


class HdTower(msgspec.Struct, frozen=True):
    """What of Phi-4-multimodal's vision_config decides the rows of an image."""

    image_size: Size = 448
    patch_size: Size = 14
    crop_size: Size = 448
    feature_layer: int = -2
    image_token_id: int = 200_010


class _Phi4(msgspec.Struct, frozen=True):
    vision_config: HdTower = field(default_factory=HdTower)


class _TileEdges(msgspec.Struct, frozen=True):
    height: Size = 448
    width: Size = 448


class _HdFile(PixelFields, frozen=True):
    """Phi-4-multimodal's preprocessor_config.json. Whatever it says, images are scaled.

    Its filter is that of all of an image; the grid has a filter of its own.
    """

    size: _TileEdges = field(default_factory=_TileEdges)
    patch_size: Size = 14
    dynamic_hd: Annotated[int, Meta(ge=1, le=256)] = 36
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def read_hd_file(folder: Path) -> tuple[PixelFields, HdTiling]:
    """Read how the preprocessor of a Phi-4-multimodal model cuts images.

    Raises:
        ConfigError: The file is malformed, not supported, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, read = found.file, found.read(_HdFile)
    tower = _tower(folder)
    edge, patch = tower.image_size, tower.patch_size
    if tower.crop_size != edge or edge % (MERGE * patch):
        raise ConfigError(
            f"{folder / 'config.json'}: vision_config: crop_size = {tower.crop_size}, image_size = "
            f"{edge}: must be equal, and an even number of patches of {patch} pixels"
        )
    if {read.size.height, read.size.width} != {edge} or read.patch_size != patch:
        raise ConfigError(
            f"{file}: makes tiles of {read.size.height} x {read.size.width} pixels, and patches of "
            f"{read.patch_size}; the tower takes {edge} x {edge}, and {patch}"
        )
    if read.resample != _BICUBIC:
        raise ConfigError(f"{file}: resample = {read.resample}: must be {_BICUBIC} (bicubic)")
    return read, HdTiling(tile=edge, patch=patch, most=read.dynamic_hd)


def read_hd(folder: Path) -> HdImages:
    """Read how a Phi-4-multimodal model takes images.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    (read, tiling), tower = read_hd_file(folder), _tower(folder)
    return HdImages(
        placeholder=tower.image_token_id,
        tiling=tiling,
        processing=hashlib.sha256(b"hd\0" + msgspec.json.encode([read, tower])).digest(),
    )


def _tower(folder: Path) -> HdTower:
    return read_json(folder / "config.json", _Phi4).vision_config
