"""Images that are cut to slices of about one number of pixels: MiniCPM-V."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import PixelFields, image_processor_file
from antiphon.model_card.vision.base import Pieces, Size, VisionBase, check_unscaled, rescaled
from antiphon.model_card.vision.tower_fields import SquareTower

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

MINICPM = "minicpmv4_6"


class SliceTiling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How MiniCPM-V cuts images: to slices of about one number of pixels, in about their shape.

    All of the image comes first, in another size. Both are whole tokens.

    Attributes:
        resolution: Edge of a square of as many pixels as an image or a slice has.
        edge: Of a token, in pixels.
        most: Slices of an image; 1: it is not cut.
    """

    resolution: Size
    edge: Size
    most: Size

    @property
    def tokens_max(self) -> int:
        """Tokens of an image, at most, or nearly so: sizes are rounded, and narrow ones are up."""
        return self.frames_max * math.ceil(self.resolution / self.edge) ** 2

    @property
    def frames_max(self) -> int:
        """Slices of an image, at most, and all of it."""
        return 1 + (self.most if self.most > 1 else 0)

    def within(self, limits: PixelLimits) -> SliceTiling:
        """This tiling within the limits of a request: all of an image is what low detail needs.

        Raises:
            InvalidRequest: They are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, most=1) if limits.low else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of slices: the shape that is nearest to the image's; 1 and 1: none."""
        wanted = min(math.ceil(width * height / self.resolution**2), self.most)
        best, least, shape = (1, 1), math.inf, math.log(width / height)
        if wanted <= 1:
            return best
        for slices in (wanted - 1, wanted, wanted + 1):
            if not 1 < slices <= self.most:
                continue
            for rows in (each for each in range(1, slices + 1) if slices % each == 0):
                columns = slices // rows
                distance = abs(shape - math.log(columns / rows))
                if distance < least or (distance == least and rows > best[1]):
                    best, least = (columns, rows), distance
        return best

    def whole(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of all of an image, scaled."""
        return self._scaled(width, height)

    def slices(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of all slices of an image together, side by side."""
        columns, rows = self.grid(width, height)
        across, down = (
            max(round(edge / count) * count, count) / count
            for edge, count in ((width, columns), (height, rows))
        )
        across, down = self._scaled(across, down)
        return across * columns, down * rows

    def _scaled(self, width: float, height: float) -> tuple[int, int]:
        ratio = width / height
        down = int(self.resolution / math.sqrt(ratio))
        across = int(down * ratio)
        edge = self.edge
        return max(round(across / edge) * edge, edge), max(round(down / edge) * edge, edge)


class SlicedImages(VisionBase, frozen=True, kw_only=True):
    """All of an image has its rows, and each of its slices, between marks: MiniCPM-V."""

    tiling: SliceTiling

    def within(self, limits: PixelLimits) -> Self:
        return rescaled(self, tiling=self.tiling.within(limits))

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        tiling = self.tiling
        pieces: list[str | int] = ["<image>", self._tokens(*tiling.whole(width, height))]
        columns, rows = tiling.grid(width, height)
        before = "</image>"
        if columns * rows > 1:
            tokens = self._tokens(*tiling.slices(width, height)) // (columns * rows)
            for number in range(columns * rows):
                pieces += [f"{before}<slice>", tokens]
                before = "</slice>" if (number + 1) % columns else "</slice>\n"
            before = "</slice>"
        return (*pieces, before)

    def _tokens(self, width: int, height: int) -> int:
        return width // self.tiling.edge * (height // self.tiling.edge)


class MiniCpmTower(SquareTower, frozen=True):
    """What of MiniCPM-V's vision_config decides the number of rows of an image."""

    image_size: Size | tuple[Size, ...] = 224
    patch_size: Size | tuple[Size, ...] = 16


class MiniCpmFields(msgspec.Struct, frozen=True):
    """What of MiniCPM-V's config.json decides the number of rows of an image."""

    image_token_id: int | None = None
    downsample_mode: Literal["4x", "16x"] = "16x"
    merge_kernel_size: tuple[Size, ...] = (2, 2)
    merger_times: Size = 1
    vision_config: MiniCpmTower = field(default_factory=MiniCpmTower)

    @property
    def merge(self) -> int:
        """Edge of the square of patches that becomes a token."""
        return 4 if self.downsample_mode == "16x" else 2


class _SliceFile(PixelFields, frozen=True):
    """The preprocessor_config.json of MiniCPM-V, with the defaults of its class."""

    max_slice_nums: Annotated[int, Meta(ge=1, le=256)] = 9
    scale_resolution: Size = 448
    patch_size: Size = 14
    slice_mode: bool = True
    downsample_mode: Literal["4x", "16x"] = "16x"
    use_image_id: bool = True
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def read_minicpm(folder: Path) -> SlicedImages:
    """Read how a MiniCPM-V model takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    config, file, read = _slices(folder)
    if config.image_token_id is None:
        raise ConfigError(f"{folder / 'config.json'}: image_token_id is missing")
    return SlicedImages(
        placeholder=config.image_token_id,
        counted="<image_id>{}</image_id>" if read.use_image_id else "",
        tiling=_slice_tiling(config, file, read),
        processing=image_processor_file(folder).digest(config),
    )


def read_slices(folder: Path) -> tuple[PixelFields, SliceTiling]:
    """Read how the preprocessor of a MiniCPM-V model scales and cuts images.

    Raises:
        ConfigError: A file is malformed, not supported, or does not fit the other one.
    """
    config, file, read = _slices(folder)
    return read, _slice_tiling(config, file, read)


def _slices(folder: Path) -> tuple[MiniCpmFields, Path, _SliceFile]:
    found = image_processor_file(folder)
    return read_json(folder / "config.json", MiniCpmFields), found.file, found.read(_SliceFile)


def _slice_tiling(config: MiniCpmFields, file: Path, read: _SliceFile) -> SliceTiling:
    _, patch = config.vision_config.edges(file.parent / "config.json")
    found, taken = (read.patch_size, read.downsample_mode), (patch, config.downsample_mode)
    if found != taken:
        raise ConfigError(
            f"{file}: patch_size = {found[0]}, downsample_mode = {found[1]!r}: those of "
            f"config.json are {taken[0]} and {taken[1]!r}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    return SliceTiling(
        resolution=read.scale_resolution,
        edge=read.patch_size * config.merge,
        most=read.max_slice_nums if read.slice_mode else 1,
    )
