"""Images that are scaled down in their shape, and padded to grids of tokens: Kimi K2.5."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import PixelFields, image_processor_file
from antiphon.model_card.vision.base import (
    LOW_PIXELS,
    Pieces,
    Size,
    VisionBase,
    check_unscaled,
    rescaled,
)

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

KIMI_K25 = "kimi_k25"


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
        return rescaled(self, sizes=self.sizes.within(limits))


class _KimiPatches(msgspec.Struct, frozen=True):
    patch_size: Size = 14
    merge_kernel_size: tuple[Size, ...] = (2, 2)


class _Kimi(msgspec.Struct, frozen=True):
    image_token_id: int = 163605
    vision_config: _KimiPatches = field(default_factory=_KimiPatches)


class _SideEdges(msgspec.Struct, frozen=True):
    """Numbers of patches, whatever their names say."""

    max_height: Size = 512
    max_width: Size = 512


class _PaddedFile(PixelFields, frozen=True):
    """The preprocessor_config.json of Kimi K2.5, with the defaults of its class."""

    size: _SideEdges = field(default_factory=_SideEdges)
    max_patches: Size = 16384
    patch_size: Size = 14
    merge_size: Size = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def read_padded(folder: Path) -> PaddedImages:
    """Read how a Kimi K2.5 model takes images.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file, sizes = read_padded_file(folder)
    settings = msgspec.json.encode([file, sizes])
    return PaddedImages(
        placeholder=read_json(folder / "config.json", _Kimi).image_token_id,
        sizes=sizes,
        processing=hashlib.sha256(b"padded\0" + settings).digest(),
    )


def read_padded_file(folder: Path) -> tuple[PixelFields, PaddedSizes]:
    """Read how the preprocessor of a Kimi K2.5 model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, read = found.file, found.read(_PaddedFile)
    tower = read_json(folder / "config.json", _Kimi).vision_config
    made, taken = (read.merge_size, read.merge_size), tower.merge_kernel_size
    if read.patch_size != tower.patch_size or made != taken:
        raise ConfigError(
            f"{file}: makes patches of {read.patch_size} pixels, {read.merge_size} an edge of a "
            f"token; the tower takes {tower.patch_size} and {' x '.join(map(str, taken))}"
        )
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    if read.size.max_height != read.size.max_width:
        raise ConfigError(f"{file}: size: max_height and max_width must be equal")
    sizes = PaddedSizes(
        patch=read.patch_size,
        merge=read.merge_size,
        patches_max=read.max_patches,
        side_max=read.size.max_height,
    )
    return read, sizes
