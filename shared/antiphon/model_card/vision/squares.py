"""Images that are scaled to one square: LLaVA 1.5, Gemma 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec import field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import image_processor_file
from antiphon.model_card.vision.base import Pieces, Size, VisionBase
from antiphon.model_card.vision.tower_fields import FeatureFields, TowerFields

if TYPE_CHECKING:
    from pathlib import Path

GEMMA3 = "gemma3"


class SquareImages(VisionBase, frozen=True, kw_only=True):
    """Every image is scaled to one square, and has `image_tokens` rows: LLaVA 1.5, Gemma 3.

    `before` and `after` are texts around them.
    """

    SIZED: ClassVar = False

    image_tokens: int
    before: str = ""
    after: str = ""

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        del width, height
        if not self.before:
            return (self.image_tokens,)
        return (self.before, self.image_tokens, self.after)


class _Llava(FeatureFields, frozen=True):
    vision_config: TowerFields = field(default_factory=TowerFields)


def read_llava(folder: Path) -> SquareImages:
    """Read how a LLaVA model takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _Llava)
    config.check(file)
    tower = config.vision_config
    has_class = tower.model_type == "clip_vision_model"
    dropped = int(config.drops_first)
    placeholder = config.image_token_id
    return SquareImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        image_tokens=(tower.image_size // tower.patch_size) ** 2 + has_class - dropped,
        processing=image_processor_file(folder).digest(config),
    )


class _Windows(msgspec.Struct, frozen=True):
    sliding_window: int | None = 4096


class _Gemma3(msgspec.Struct, frozen=True):
    image_token_id: int | None = None
    image_token_index: int = 262144
    mm_tokens_per_image: Size = 256
    text_config: _Windows = field(default_factory=_Windows)


class _PanAndScan(msgspec.Struct, frozen=True):
    do_pan_and_scan: bool | None = None


def read_gemma3(folder: Path) -> SquareImages:
    """Read how a Gemma 3 model takes images.

    Raises:
        ConfigError: config.json or a preprocessor's is malformed, or not supported.
    """
    config = read_json(folder / "config.json", _Gemma3)
    found = image_processor_file(folder)
    if found.read(_PanAndScan).do_pan_and_scan:
        raise ConfigError(f"{found.file}: do_pan_and_scan = true is not supported")
    placeholder, tokens = config.image_token_id, config.mm_tokens_per_image
    window = config.text_config.sliding_window
    if window is not None and window < tokens:
        raise ConfigError(
            f"{folder / 'config.json'}: sliding_window = {window}: must be at least "
            f"mm_tokens_per_image = {tokens}, so that each token of an image sees all others"
        )
    return SquareImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        marker="<start_of_image>",
        image_tokens=tokens,
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        span_tokens=tokens,
        processing=image_processor_file(folder).digest(config),
    )
