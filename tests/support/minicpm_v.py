"""A tiny MiniCPM-V 4.6 with random weights: images are cut to slices, whatever their shape."""

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

PATCH = 4
PLACEHOLDER = "<|image_pad|>"
SPECIAL = (
    *(PLACEHOLDER, "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>"),
    *("<image_id>", "</image_id>", "<|im_start|>", "<|im_end|>"),
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|image_pad|>\n{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR: Mapping[str, Any] = {
    "max_slice_nums": 4,
    "scale_resolution": 32,
    "patch_size": PATCH,
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
}
"""Frames of about two tokens an edge, of four patches an edge."""
TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 5 * PATCH,
    "patch_size": PATCH,
}
_TEXT: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    },
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_minicpm_v(folder: Path, **fields: Any) -> Path:
    """Write a model of which windows of patches are merged behind the first of two layers."""
    tokenizer = write_tokenizer(folder, SPECIAL, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    config = transformers.MiniCPMV4_6Config(
        vision_config=dict(TOWER),
        text_config={**TEXT, **_TEXT, "vocab_size": tokenizer.get_vocab_size()},
        image_token_id=tokenizer.token_to_id(PLACEHOLDER) or 0,
        video_token_id=tokenizer.token_to_id("<|video_pad|>") or 0,
        tie_word_embeddings=False,
        **{"insert_layer_id": 0, **fields},
    )
    return write_random(folder, transformers.MiniCPMV4_6ForConditionalGeneration(config))


def slices_in_a_row(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """What transformers is given of frames, those of one size together (F, 3, H, W)."""
    cut: list[Tensor] = []
    sizes: list[list[int]] = []
    for frame in (frame for part in parts for frame in part):
        rows, columns = (edge // PATCH for edge in frame.shape[-2:])
        patches = frame.reshape(3, rows, PATCH, columns, PATCH).permute(0, 2, 1, 3, 4)
        cut.append(patches.reshape(3, PATCH, -1))
        sizes.append([rows, columns])
    target = torch.tensor(sizes, dtype=torch.int32)
    return {"pixel_values": torch.cat(cut, dim=-1)[None], "target_sizes": target}
