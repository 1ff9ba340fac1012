"""A tiny LLaVA with random weights, whose tokenizer is the embedded model's with a placeholder."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from antiphon import embedded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PLACEHOLDER = "<image>"
IMAGE_TOKENS = 16
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""As the templates of LLaVA: images and texts where they are in a message."""
TOWER: Mapping[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
TEXT: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def write_llava(
    folder: Path, tower: Mapping[str, int] = TOWER, text: Mapping[str, object] = TEXT
) -> Path:
    """Write a model; an image has a token a patch: `IMAGE_TOKENS` unless sizes are given."""
    tokenizer = write_tokenizer(folder, [PLACEHOLDER], TEMPLATE)
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **tower},
        text_config={**text, "vocab_size": tokenizer.get_vocab_size()},
        image_token_index=tokenizer.token_to_id(PLACEHOLDER) or 0,
        image_seq_length=(tower["image_size"] // tower["patch_size"]) ** 2,
        tie_word_embeddings=False,
    )
    return write_random(folder, transformers.LlavaForConditionalGeneration(config))


def write_tokenizer(folder: Path, special: Sequence[str], template: str) -> Tokenizer:
    """Write the embedded model's tokenizer with further special tokens."""
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tokenizer


def write_random(
    folder: Path, model: transformers.PreTrainedModel, spread: float = 0.15, seed: int = 17
) -> Path:
    """Write a model with weights so large that what an image shows changes what is generated."""
    draw_random(model, spread, seed).save_pretrained(folder)
    return folder


def draw_random(
    model: transformers.PreTrainedModel, spread: float = 0.15, seed: int = 17
) -> transformers.PreTrainedModel:
    """Give a model such weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.float().named_parameters():
            middle = 1.0 if parameter.ndim == 1 and "norm" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(middle + noise * spread)
    return model


def picture(seed: int, width: int = 40, height: int = 33, kind: str = "PNG") -> bytes:
    """An image of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, kind)
    return file.getvalue()
