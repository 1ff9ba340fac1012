"""What of config.json decides the grids of models from Qwen-VL to PaddleOCR-VL."""

from __future__ import annotations

import msgspec
from msgspec import field

from antiphon.model_card.vision.base import Size

DEEPSTACKS = ("qwen3_vl", "qwen3_vl_moe")

QWEN35S = ("qwen3_5", "qwen3_5_moe")

QWEN3S = (*DEEPSTACKS, *QWEN35S)
"""Those with patches of 16 pixels, and seconds between the grids of a video."""

GLMS = ("glm4v", "glm4v_moe")

PADDLEOCR = "paddleocr_vl"

VIDEO_GRIDS = ("qwen2_5_vl", "qwen2_vl", *QWEN3S, *GLMS)
"""Those that take videos, too."""

GRIDS = (*VIDEO_GRIDS, PADDLEOCR)


class _GridTower(msgspec.Struct, frozen=True):
    patch_size: Size | None = None
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    tokens_per_second: float = 4
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class GridFields(msgspec.Struct, frozen=True):
    model_type: str
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_config: _GridTower = field(default_factory=_GridTower)

    @property
    def placeholder(self) -> int:
        if self.image_token_id is not None:
            return self.image_token_id
        return _PLACEHOLDERS.get(self.model_type, 151655)

    @property
    def video_placeholder(self) -> int:
        if self.video_token_id is not None:
            return self.video_token_id
        return 248057 if self.model_type in QWEN35S else 151656

    @property
    def deepstack(self) -> int:
        stacked = self.model_type in DEEPSTACKS
        return len(self.vision_config.deepstack_visual_indexes) if stacked else 0

    @property
    def patch(self) -> int:
        return self.vision_config.patch_size or (16 if self.model_type in QWEN3S else 14)


_PLACEHOLDERS = {
    "glm4v": 151343,
    "glm4v_moe": 151363,
    PADDLEOCR: 100295,
    **dict.fromkeys(QWEN35S, 248056),
}
