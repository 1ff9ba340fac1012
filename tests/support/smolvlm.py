"""A tiny SmolVLM with random weights: images are cut into tiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import transformers
from tests.support.llava import TEXT, TOWER, write_random, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PLACEHOLDER = "<image>"
TILE_TOKENS = 4
FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"
MARKS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As published: it reads parts, and shows no content that is a text."""
PROCESSOR = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}


def write_smolvlm(folder: Path) -> Path:
    """Write a model whose images have up to ten tiles, each of `TILE_TOKENS`."""
    special = [PLACEHOLDER, FAKE, WHOLE, *MARKS, "<end_of_utterance>", "<|im_start|>"]
    tokenizer = write_tokenizer(folder, special, TEMPLATE)
    config = transformers.SmolVLMConfig(
        vision_config={"model_type": "smolvlm_vision", **TOWER},
        text_config={**TEXT, "vocab_size": tokenizer.get_vocab_size(), "pad_token_id": 0},
        image_token_id=tokenizer.token_to_id(PLACEHOLDER) or 0,
        scale_factor=2,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return write_random(folder, transformers.SmolVLMForConditionalGeneration(config))
