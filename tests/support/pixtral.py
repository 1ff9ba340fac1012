"""Tiny Pixtral and Mistral 3 with random weights: rows of an image's tokens have ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
import transformers
from tests.support.llava import TEXT, write_random, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

PLACEHOLDER = "[IMG]"
SPECIAL = (PLACEHOLDER, "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}"
    "{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}{% endfor %}{% endif %}"
    "[/INST]{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""As the templates of Mistral's models: images and texts where they are in a message."""
TOWER: Mapping[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 60,
    "patch_size": 5,
}
PROCESSOR = {"size": {"longest_edge": 60}, "patch_size": 5}


def write_pixtral(folder: Path) -> Path:
    """Write a LLaVA model of Pixtral's tower; a patch is a token."""
    kind = transformers.LlavaForConditionalGeneration
    return _write(folder, kind, {"vision_feature_layer": -1})


def write_mistral3(folder: Path) -> Path:
    """Write a model of which four patches are a token."""
    return _write(folder, transformers.Mistral3ForConditionalGeneration, {})


def _write(folder: Path, architecture: Any, fields: Mapping[str, Any]) -> Path:
    tokenizer = write_tokenizer(folder, SPECIAL, TEMPLATE)
    text = {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-4}
    config = architecture.config_class(
        vision_config=dict(TOWER),
        text_config={**TEXT, **text, "vocab_size": tokenizer.get_vocab_size()},
        image_token_index=tokenizer.token_to_id(PLACEHOLDER) or 0,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
        **fields,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return write_random(folder, architecture(config))


def batched(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """What transformers is given of images (1, 3, height, width)."""
    sizes = [tuple(image.shape[-2:]) for image in images]
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    filled = [
        F.pad(image, (0, width - size[1], 0, height - size[0]))
        for image, size in zip(images, sizes, strict=True)
    ]
    return {"pixel_values": torch.cat(filled), "image_sizes": torch.tensor(sizes)}
