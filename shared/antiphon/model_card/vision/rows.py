"""Images that keep their shape, in rows of tokens with ends: Pixtral, Mistral 3."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import ModelKind, PixelFields, image_processor_file
from antiphon.model_card.vision.base import (
    LOW_PIXELS,
    Pieces,
    Size,
    VisionBase,
    check_unscaled,
    rescaled,
)
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits

PIXTRAL, MISTRAL3 = "pixtral", "mistral3"


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
        return rescaled(self, sizes=self.sizes.within(limits))


class _Longest(msgspec.Struct, frozen=True):
    longest_edge: Size = 1024


class _RowFile(PixelFields, frozen=True):
    """Pixtral's preprocessor_config.json. The size of a patch is that of its model."""

    size: _Longest = field(default_factory=_Longest)


class PatchTower(msgspec.Struct, frozen=True):
    """The vision_config of a model that may have Pixtral's tower."""

    model_type: str = "clip_vision_model"
    patch_size: Size = 16


class _Rows(msgspec.Struct, frozen=True):
    model_type: str
    image_token_id: int | None = None
    image_token_index: int = 10
    spatial_merge_size: Size = 2
    vision_config: PatchTower = field(default_factory=PatchTower)

    @property
    def merge(self) -> int:
        """Edge of the square of patches that becomes a token."""
        return self.spatial_merge_size if self.model_type == MISTRAL3 else 1


def has_rows(folder: Path) -> bool:
    """Whether a model has Pixtral's tower.

    Raises:
        ConfigError: It should have, and has not.
    """
    file = folder / "config.json"
    kind = read_json(file, ModelKind).model_type
    if kind not in ("llava", MISTRAL3):
        return False
    tower = read_json(file, _Rows).vision_config.model_type
    if kind == MISTRAL3 and tower != PIXTRAL:
        raise ConfigError(f"{file}: vision_config: model_type = {tower!r}: must be {PIXTRAL}")
    return tower == PIXTRAL


def read_pixtral(folder: Path) -> RowImages:
    """Read how a model with Pixtral's tower takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    config, (_, sizes) = read_json(folder / "config.json", _Rows), read_rows(folder)
    placeholder = config.image_token_id
    return RowImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        sizes=sizes,
        processing=image_processor_file(folder).digest(config),
    )


def read_rows(folder: Path) -> tuple[PixelFields, RowSizes]:
    """Read how the preprocessor of a Pixtral or Mistral 3 model scales images.

    Raises:
        ConfigError: The file is malformed, or does not fit the tower.
    """
    found = image_processor_file(folder)
    file, read = found.file, found.read(_RowFile)
    config = read_json(folder / "config.json", _Rows)
    if not read.do_resize:
        raise ConfigError(f"{file}: do_resize = false: the tower takes whole tokens only")
    edge = config.vision_config.patch_size * config.merge
    return read, RowSizes(edge=edge, longest=read.size.longest_edge)
