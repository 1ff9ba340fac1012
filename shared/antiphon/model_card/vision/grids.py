"""Images that keep their shape and are grids of tokens: Qwen-VL, GLM-4V, PaddleOCR-VL."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import PixelFields, image_processor_file
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, rescaled
from antiphon.model_card.vision.grid_fields import GLMS, PADDLEOCR, VIDEO_GRIDS, GridFields
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.grid_videos import GridVideos, read_grid_videos

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits


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
        return rescaled(self, sizes=self.sizes.within(limits))


class _GridEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels, whatever their names say."""

    shortest_edge: Size = 56 * 56
    longest_edge: Size = 28 * 28 * 1280


class GridFile(PixelFields, frozen=True):
    """The preprocessor_config.json of Qwen2-VL, with the defaults of its class."""

    size: _GridEdges = field(default_factory=_GridEdges)
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    patch_size: Size = 14
    merge_size: Size = 2

    @property
    def sizes(self) -> GridSizes:
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=self.min_pixels or self.size.shortest_edge,
            pixels_max=self.max_pixels or self.size.longest_edge,
        )


class _OcrFile(GridFile, frozen=True):
    """The preprocessor_config.json of PaddleOCR-VL, with the defaults of its class."""

    size: _GridEdges = field(default_factory=lambda: _GridEdges(384 * 384, 1536 * 1536))

    @property
    def sizes(self) -> GridSizes:
        return msgspec.structs.replace(super().sizes, fills=True)


class _GlmEdges(msgspec.Struct, frozen=True):
    """Numbers of pixels of all frames, of which an image is two."""

    shortest_edge: Size = 112 * 112
    longest_edge: Size = 28 * 28 * 15000


class _GlmFile(PixelFields, frozen=True):
    """The preprocessor_config.json of GLM-4V, with the defaults of its class."""

    size: _GlmEdges = field(default_factory=_GlmEdges)
    patch_size: Size = 14
    merge_size: Size = 2
    temporal_patch_size: Size = 2

    @property
    def sizes(self) -> GridSizes:
        frames = self.temporal_patch_size
        return GridSizes(
            patch=self.patch_size,
            merge=self.merge_size,
            pixels_min=max(1, self.size.shortest_edge // frames),
            pixels_max=max(1, self.size.longest_edge // frames),
            grows=True,
        )

    @property
    def divides(self) -> bool:
        edges = self.size.shortest_edge, self.size.longest_edge
        return not any(edge % self.temporal_patch_size for edge in edges)


def read_grid(folder: Path) -> GridImages:
    """Read how a Qwen-VL, GLM-4V or PaddleOCR-VL model takes images, and videos, if it does.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    file = read_grid_file(folder)
    # As resolved: a default that is written down changes no key.
    plain = (
        msgspec.structs.replace(file, size=_GlmEdges())
        if isinstance(file, _GlmFile)
        else msgspec.structs.replace(file, size=_GridEdges(), min_pixels=None, max_pixels=None)
    )
    settings = msgspec.json.encode([plain, file.sizes])
    config = read_json(folder / "config.json", GridFields)
    return GridImages(
        placeholder=config.placeholder,
        deepstack=config.deepstack,
        sizes=file.sizes,
        videos=read_grid_videos(folder, config) if config.model_type in VIDEO_GRIDS else None,
        processing=hashlib.sha256(b"grid\0" + settings).digest(),
    )


def read_grid_file(folder: Path) -> GridFile | _GlmFile:
    """Read how the preprocessor of a Qwen2-VL, GLM-4V or PaddleOCR-VL model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, config = found.file, read_json(folder / "config.json", GridFields)
    plain = _OcrFile if config.model_type == PADDLEOCR else GridFile
    read = found.read(_GlmFile if config.model_type in GLMS else plain)
    if isinstance(read, _GlmFile) and not read.divides:
        raise ConfigError(
            f"{file}: size: must be multiples of temporal_patch_size = {read.temporal_patch_size}"
        )
    patch, merge = config.patch, config.vision_config.spatial_merge_size
    if (read.patch_size, read.merge_size) != (patch, merge):
        raise ConfigError(
            f"{file}: makes patches of {read.patch_size} pixels, {read.merge_size} an edge of a "
            f"token; the tower takes {patch} and {merge}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    if read.sizes.pixels_min > read.sizes.pixels_max:
        raise ConfigError(
            f"{file}: min_pixels = {read.sizes.pixels_min} exceeds "
            f"max_pixels = {read.sizes.pixels_max}"
        )
    return read
