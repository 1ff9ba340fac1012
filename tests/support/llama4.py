"""A tiny Llama 4 with random weights: images are cut into tiles on a canvas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers
from tests.support.llava import TEXT, TOWER, write_random, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PLACEHOLDER, IMAGE = "<|patch|>", "<|image|>"
MARKS = (
    *("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<|header_start|>", "<|header_end|>", "<|eot|>"),
)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<|image|>' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}"
)
"""As published, without tools."""
PROCESSOR = {"size": {"height": 28, "width": 28}, "max_patches": 6}
TILE_TOKENS = 4
_TEXT = {
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 64,
    "pad_token_id": 0,
}


def write_llama4(folder: Path, **tower: Any) -> Path:
    """Write a model whose images have up to seven tiles, each of `TILE_TOKENS`."""
    tokenizer = write_tokenizer(folder, [PLACEHOLDER, IMAGE, *MARKS], TEMPLATE)
    behind = {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}
    wide = {"intermediate_size": 4 * TOWER["hidden_size"]}  # also that of four patches in a row
    fields: dict[str, Any] = {
        "vision_config": {**TOWER, **wide, **behind, **tower},
        "text_config": {**TEXT, **_TEXT, "vocab_size": tokenizer.get_vocab_size()},
        "image_token_index": tokenizer.token_to_id(PLACEHOLDER) or 0,
        "tie_word_embeddings": False,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    config = transformers.Llama4Config(**fields)
    return write_random(folder, transformers.Llama4ForConditionalGeneration(config))
