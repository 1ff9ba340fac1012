"""How a model that sees takes images: its placeholder, and what stands in a prompt for an image.

Read by the tokenizer, which writes markers and repeats placeholders, and by the encoder, which must
come to the same number of rows; without torch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json

if TYPE_CHECKING:
    from pathlib import Path

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PROCESSOR = "preprocessor_config.json"


Pieces = tuple[str | int, ...]
"""What stands in a prompt for an image: texts, and numbers of placeholders in a row."""


class VisionBase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the ways to take images have in common.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        marker: What chat templates write for an image; empty: the placeholder.
        processing: Digest of all that decides the embedding beside the image and the weights.
    """

    placeholder: int
    marker: str = ""
    processing: bytes


class SquareImages(VisionBase, frozen=True, kw_only=True):
    """Every image is scaled to one square, and has `image_tokens` rows: LLaVA 1.5."""

    image_tokens: int

    def pieces(self, width: int, height: int) -> Pieces:
        """What stands for an image of this size in pixels."""
        del width, height
        return (self.image_tokens,)


VisionCard = SquareImages
"""How a model takes images."""


class FeatureFields(msgspec.Struct, frozen=True):
    """LLaVA's fields about what it takes of its tower."""

    image_token_id: int | None = None
    image_token_index: int = 32000
    vision_feature_layer: int | list[int] = -2
    vision_feature_select_strategy: str = "default"

    def check(self, file: Path) -> None:
        if self.vision_feature_select_strategy not in ("default", "full"):
            raise ConfigError(
                f"{file}: vision_feature_select_strategy = "
                f"{self.vision_feature_select_strategy!r}: must be default or full"
            )
        if not isinstance(self.vision_feature_layer, int):
            raise ConfigError(f"{file}: vision_feature_layer: only a single layer is supported")

    @property
    def drops_first(self) -> bool:
        """Whether the class token of the tower is left out."""
        return self.vision_feature_select_strategy == "default"


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = "clip_vision_model"
    image_size: Size = 224
    patch_size: Size = 32


class _Llava(FeatureFields, frozen=True):
    vision_config: _Tower = field(default_factory=_Tower)


class _ModelKind(msgspec.Struct, frozen=True):
    model_type: str = ""


SEEING = ("llava",)
"""Types of models whose images are served."""


def read_vision(folder: Path) -> VisionCard | None:
    """Read how a model takes images; None if it does not, or only its text part is served.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    if not file.is_file() or read_json(file, _ModelKind).model_type not in SEEING:
        return None
    config = read_json(file, _Llava)
    config.check(file)
    tower = config.vision_config
    has_class = tower.model_type == "clip_vision_model"
    dropped = int(config.drops_first)
    processor = folder / PROCESSOR
    recipe = processor.read_bytes() if processor.is_file() else b""
    settings = msgspec.json.encode(config)
    placeholder = config.image_token_id
    return SquareImages(
        placeholder=config.image_token_index if placeholder is None else placeholder,
        image_tokens=(tower.image_size // tower.patch_size) ** 2 + has_class - dropped,
        processing=hashlib.sha256(settings + b"\0" + recipe).digest(),
    )
