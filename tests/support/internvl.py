"""A tiny InternVL with random weights: images are cut into tiles behind each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers
from tests.support.llava import TEXT, TOWER, write_random, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PLACEHOLDER = "<IMG_CONTEXT>"
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\\n' }}{% elif content['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{'<|im_start|>assistant\\n' }}{% endif %}"
)
"""As published."""
PROCESSOR = {"size": {"height": 28, "width": 28}, "max_patches": 6}


def write_internvl(folder: Path, **tower: Any) -> Path:
    """Write a model whose images have up to seven tiles, each of four tokens."""
    special = [PLACEHOLDER, "<img>", "</img>", "<|im_start|>", "<|im_end|>"]
    tokenizer = write_tokenizer(folder, special, TEMPLATE)
    sizes = {"image_size": [28, 28], "patch_size": [7, 7]}
    config = transformers.InternVLConfig(
        vision_config={**TOWER, **sizes, **tower},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size()},
        image_token_id=tokenizer.token_to_id(PLACEHOLDER) or 0,
        tie_word_embeddings=False,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return write_random(folder, transformers.InternVLForConditionalGeneration(config))
