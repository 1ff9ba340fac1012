"""A tiny Gemma 3 with random weights whose images' tokens attend to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers
from tests.support.llava import TEXT, TOWER, write_random, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PLACEHOLDER, MARKER = "<image_soft_token>", "<start_of_image>"
IMAGE_TOKENS = 16
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def write_gemma_vision(folder: Path) -> Path:
    """Write a model of a windowed and a global layer; an image has `IMAGE_TOKENS`."""
    special = [PLACEHOLDER, MARKER, "<end_of_image>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = write_tokenizer(folder, special, TEMPLATE)
    config = transformers.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **TOWER, "image_size": 56},
        text_config={
            **TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 20,
            "vocab_size": tokenizer.get_vocab_size(),
        },
        image_token_index=tokenizer.token_to_id(PLACEHOLDER) or 0,
        boi_token_index=tokenizer.token_to_id(MARKER) or 0,
        eoi_token_index=tokenizer.token_to_id("<end_of_image>") or 0,
        mm_tokens_per_image=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )
    return write_random(folder, transformers.Gemma3ForConditionalGeneration(config))
