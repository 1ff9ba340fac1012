"""Tiny LLaVA-NeXT and LLaVA-OneVision with random weights: images are padded to a grid of tiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.support.llava import PLACEHOLDER, TEMPLATE, TEXT, TOWER, write_random, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

SIZES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
"""Heights and widths of grids of tiles."""
NEXT_PROCESSOR: Mapping[str, Any] = {
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_grid_pinpoints": SIZES,
}
ONEVISION_PROCESSOR: Mapping[str, Any] = {
    "size": {"height": 28, "width": 28},
    "image_grid_pinpoints": SIZES,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_llava_next(folder: Path) -> Path:
    """Write a model of a CLIP tower and a Mistral."""
    return _write(
        folder,
        transformers.LlavaNextForConditionalGeneration,
        {"model_type": "clip_vision_model", **TOWER},
        {**TEXT, "model_type": "mistral", "sliding_window": None},
        NEXT_PROCESSOR,
    )


def write_llava_onevision(folder: Path) -> Path:
    """Write a model of a SigLIP tower and a Qwen2; a grid of over two tiles is scaled down."""
    return _write(
        folder,
        transformers.LlavaOnevisionForConditionalGeneration,
        {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        {**TEXT, "model_type": "qwen2"},
        ONEVISION_PROCESSOR,
        special=[PLACEHOLDER, "<video>"],
        vision_aspect_ratio="anyres_max_2",
    )


def _write(
    folder: Path,
    architecture: Any,
    tower: Mapping[str, Any],
    text: Mapping[str, Any],
    processor: Mapping[str, Any],
    special: Sequence[str] = (PLACEHOLDER,),
    **fields: Any,
) -> Path:
    tokenizer = write_tokenizer(folder, special, TEMPLATE)
    if (of_video := tokenizer.token_to_id("<video>")) is not None:
        fields |= {"video_token_index": of_video}
    config = architecture.config_class(
        vision_config=dict(tower),
        text_config={**text, "vocab_size": tokenizer.get_vocab_size()},
        image_token_index=tokenizer.token_to_id(PLACEHOLDER) or 0,
        image_grid_pinpoints=SIZES,
        tie_word_embeddings=False,
        **fields,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return write_random(folder, architecture(config))


def padded(images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """What transformers is given of images' frames (F, 3, H, W), and widths and heights."""
    most = max(len(image) for image in images)
    filled = [torch.cat((i, i.new_zeros(most - len(i), *i.shape[1:]))) for i in images]
    upright = torch.tensor([[height, width] for width, height in sizes])
    return {"pixel_values": torch.stack(filled), "image_sizes": upright}
