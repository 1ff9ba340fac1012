"""Tiny models from Qwen-VL to PaddleOCR-VL with random weights: images keep their shape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.support.llava import TEXT, write_random, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

PATCH, MERGE = 4, 2
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PLACEHOLDER_ID = 1024 + SPECIAL.index("<|image_pad|>")
"""Behind the embedded model's tokens."""
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As published."""
GLM_SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
"""Those of pictures in the same places."""
OCR_SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    "<|IMAGE_PLACEHOLDER|>",
)
VIDEO_IN_TEXT = "<|vision_start|><|video_pad|><|vision_end|>"
PROCESSOR = {
    "min_pixels": 4 * 64,
    "max_pixels": 30 * 64,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}
"""Images of four to thirty tokens."""
VIDEO_PROCESSOR = {
    "size": {"shortest_edge": 4 * 64, "longest_edge": 12 * 8 * 64},
    "min_frames": 4,
    "max_frames": 16,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
}
"""Sixteen frames at most."""
GLM_PROCESSOR = {
    "size": {"shortest_edge": 2 * 4 * 64, "longest_edge": 2 * 30 * 64},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_processor_type": "Glm4vImageProcessor",
}
GLM_VIDEO_PROCESSOR = {
    "size": {"shortest_edge": 4 * 64, "longest_edge": 12 * 8 * 64},
    "max_duration": 8,
    "num_frames": 16,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
}
OCR_PROCESSOR = {
    **{name: PROCESSOR[name] for name in ("min_pixels", "max_pixels", "patch_size", "merge_size")},
    "temporal_patch_size": 1,
    "image_processor_type": "PaddleOCRVLImageProcessor",
}
TOWER_25: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "window_size": 24,
    "fullatt_block_indexes": [1],
}
"""Windows of three tokens an edge."""
TOWER_2: Mapping[str, Any] = {
    "depth": 3,
    "embed_dim": 32,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": PATCH,
}
TOWER_3: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}
"""Positions of a square of five patches an edge."""
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}


def write_qwen25_vl(folder: Path) -> Path:
    tower = {**TOWER_25, "out_hidden_size": TEXT["hidden_size"]}
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    return _write(folder, kind, transformers.Qwen2_5_VLConfig, tower)


def write_qwen2_vl(folder: Path) -> Path:
    tower = {**TOWER_2, "hidden_size": TEXT["hidden_size"]}
    kind = transformers.Qwen2VLForConditionalGeneration
    return _write(folder, kind, transformers.Qwen2VLConfig, tower)


def write_qwen3_vl(folder: Path) -> Path:
    tower = {**TOWER_3, "out_hidden_size": TEXT["hidden_size"]}
    kind = transformers.Qwen3VLForConditionalGeneration
    text = {"head_dim": 16, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
    return _write(folder, kind, transformers.Qwen3VLConfig, tower, text)


def write_qwen35(folder: Path) -> Path:
    """Write a Qwen3.5, whose first layer has a state."""
    tower = {**TOWER_3, "out_hidden_size": TEXT["hidden_size"]}
    del tower["deepstack_visual_indexes"]
    kind = transformers.Qwen3_5ForConditionalGeneration
    text = {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    }
    return _write(folder, kind, transformers.Qwen3_5Config, tower, text)


def write_glm4v(folder: Path) -> Path:
    """Write a GLM-4V, with the same texts; its pixels are counted of two frames."""
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": PATCH,
        "image_size": 5 * PATCH,
        "out_hidden_size": TEXT["hidden_size"],
    }
    rope = {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    kind, config = transformers.Glm4vForConditionalGeneration, transformers.Glm4vConfig
    text = {"rope_parameters": rope}
    template = TEMPLATE.replace(VIDEO_IN_TEXT, "<|begin_of_video|><|video|><|end_of_video|>")
    for name, ours in zip(SPECIAL, GLM_SPECIAL, strict=False):
        template = template.replace(name, ours)
    words = GLM_SPECIAL, template
    return _write(folder, kind, config, tower, text, (GLM_PROCESSOR, GLM_VIDEO_PROCESSOR), words)


def write_paddleocr_vl(folder: Path) -> Path:
    """Write a PaddleOCR-VL, with the same texts; it takes no videos."""
    tower = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "image_size": 5 * PATCH,
    }
    template = TEMPLATE
    for name, ours in zip(SPECIAL, OCR_SPECIAL, strict=False):
        template = template.replace(name, ours)
    kind, config = transformers.PaddleOCRVLForConditionalGeneration, transformers.PaddleOCRVLConfig
    text, words = {"head_dim": 16}, (OCR_SPECIAL, template)
    return _write(folder, kind, config, tower, text, (OCR_PROCESSOR,), words)


def _write(
    folder: Path,
    model: Any,
    config: Any,
    tower: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    processors: Sequence[Mapping[str, Any]] = (PROCESSOR, VIDEO_PROCESSOR),
    words: tuple[Sequence[str], str] = (SPECIAL, TEMPLATE),
) -> Path:
    tokenizer = write_tokenizer(folder, *words)
    assert tokenizer.id_to_token(PLACEHOLDER_ID) == words[0][SPECIAL.index("<|image_pad|>")]
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "rope_parameters": ROPE, **(own or {})}
    made = config(
        vision_config=dict(tower),
        text_config={**text, **sizes, "bos_token_id": None, "eos_token_id": None},
        image_token_id=PLACEHOLDER_ID,
        video_token_id=PLACEHOLDER_ID + 1,
        vision_start_token_id=PLACEHOLDER_ID - 2,
        vision_end_token_id=PLACEHOLDER_ID - 1,
    )
    for name, settings in zip(("preprocessor", "video_preprocessor"), processors, strict=False):
        (folder / f"{name}_config.json").write_text(json.dumps(settings))
    return write_random(folder, model(made))


def video_patches(pixels: Tensor) -> dict[str, Tensor]:
    """What transformers is given of the frames of one video, (F, 3, height, width), F even."""
    rows, columns = (edge // PATCH for edge in pixels.shape[-2:])
    blocks = pixels.view(-1, 2, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    cut = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(len(pixels) // 2 * rows * columns, -1)
    grid = torch.tensor([[len(pixels) // 2, rows, columns]])
    return {"pixel_values_videos": cut, "video_grid_thw": grid}


def patches(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """What transformers is given of images (1, 3, height, width)."""
    cut: list[Tensor] = []
    grids: list[list[int]] = []
    for image in images:
        rows, columns = (edge // PATCH for edge in image.shape[-2:])
        blocks = image.view(3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
        ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        cut.append(ordered.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(cut), "image_grid_thw": torch.tensor(grids)}


def rows_of_patches(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same for PaddleOCR-VL, whose patches are row by row, (P, 3, patch, patch)."""
    cut: list[Tensor] = []
    grids: list[list[int]] = []
    for image in images:
        rows, columns = (edge // PATCH for edge in image.shape[-2:])
        blocks = image.view(3, rows, PATCH, columns, PATCH).permute(1, 3, 0, 2, 4)
        cut.append(blocks.reshape(rows * columns, 3, PATCH, PATCH))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(cut), "image_grid_thw": torch.tensor(grids)}
