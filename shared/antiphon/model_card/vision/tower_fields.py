"""What of a tower's config decides the rows of an image, in several families."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.base import Size

if TYPE_CHECKING:
    from pathlib import Path


class FeatureFields(msgspec.Struct, frozen=True):
    """LLaVA's and InternVL's fields about what they take of their towers."""

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


class SquareTower(msgspec.Struct, frozen=True):
    """A tower whose sizes may be written for both edges.

    A bounded number or a tuple of a fixed length crashes msgspec 0.22.
    """

    image_size: Size | tuple[Size, ...] = 448
    patch_size: Size | tuple[Size, ...] = 14

    def edges(self, file: Path) -> tuple[int, int]:
        """Edge of an image, and of a patch.

        Raises:
            ConfigError: They are no squares.
        """
        return _edge(file, "image_size", self.image_size), _edge(
            file, "patch_size", self.patch_size
        )


def _edge(file: Path, name: str, size: int | tuple[int, ...]) -> int:
    edges = {size} if isinstance(size, int) else set(size)
    if len(edges) != 1:
        raise ConfigError(f"{file}: vision_config: {name} = {size}: must be a square")
    return edges.pop()


class TowerFields(msgspec.Struct, frozen=True):
    model_type: str = "clip_vision_model"
    image_size: Size = 224
    patch_size: Size = 32


def shuffle_factor(file: Path, ratio: float, name: str = "downsample_ratio") -> int:
    """Edge of the squares of patches that become one row.

    Raises:
        ConfigError: It is no whole number.
    """
    by = round(1 / ratio) if ratio > 0 else 0
    if by < 1 or 1 / by != ratio:
        raise ConfigError(f"{file}: {name} = {ratio}: must be 1 by a whole number")
    return by
