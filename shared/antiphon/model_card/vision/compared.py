"""Images that are compared with texts: CLIP, SigLIP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import image_processor_file
from antiphon.model_card.vision.base import Pieces, Size, VisionBase

if TYPE_CHECKING:
    from pathlib import Path

CLIP, SIGLIP = "clip", "siglip"


class ComparedImages(VisionBase, frozen=True, kw_only=True):
    """An image is a prompt by itself, whose row is a vector to compare with texts: CLIP, SigLIP.

    The row has `width` numbers. Texts are padded to `text_tokens`; 0: they are not.
    """

    SIZED: ClassVar = False

    width: Size
    text_tokens: Annotated[int, Meta(ge=0)] = 0

    def row_width(self, hidden: int) -> int:
        del hidden
        return self.width

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels: one token, of which nothing is read."""
        del width, height
        return (1,)


class _Clip(msgspec.Struct, frozen=True):
    projection_dim: Size = 512


def read_clip(folder: Path) -> ComparedImages:
    """Read how a CLIP model takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    config = read_json(folder / "config.json", _Clip)
    return ComparedImages(
        placeholder=0,
        width=config.projection_dim,
        processing=image_processor_file(folder).digest(config),
    )


class _SiglipText(msgspec.Struct, frozen=True):
    hidden_size: Size = 768
    projection_size: Size | None = None
    max_position_embeddings: Size = 64


class _SiglipVision(msgspec.Struct, frozen=True):
    hidden_size: Size = 768
    vision_use_head: bool = True


class _Siglip(msgspec.Struct, frozen=True):
    text_config: _SiglipText = field(default_factory=_SiglipText)
    vision_config: _SiglipVision = field(default_factory=_SiglipVision)


def read_siglip(folder: Path) -> ComparedImages:
    """Read how a SigLIP model takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _Siglip)
    text, vision = config.text_config, config.vision_config
    if not vision.vision_use_head:
        raise ConfigError(f"{file}: vision_config: vision_use_head = false is not supported")
    if (width := text.projection_size or text.hidden_size) != vision.hidden_size:
        raise ConfigError(
            f"{file}: vectors of texts have {width} numbers, and those of images "
            f"{vision.hidden_size}: they cannot be compared"
        )
    return ComparedImages(
        placeholder=0,
        width=width,
        # It was trained on padded texts, whose padding is attended to.
        text_tokens=text.max_position_embeddings,
        processing=image_processor_file(folder).digest(config),
    )
