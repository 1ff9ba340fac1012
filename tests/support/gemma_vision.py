"""Tiny Gemma 3 and 4 with random weights whose images' tokens attend to each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.support.llava import TEXT, TOWER, write_random, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

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


AREA_PLACEHOLDER, AREA_BEFORE, AREA_AFTER = "<|image|>", "<|image>", "<image|>"
AREA_TEMPLATE = (
    "{% for message in messages %}<|turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<|image|>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
AREA_PROCESSOR = {
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 70,
    "image_processor_type": "Gemma4ImageProcessor",
}
AREA_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 210,
}


def write_gemma4(folder: Path, tower: Mapping[str, Any] | None = None, seed: int = 17) -> Path:
    """Write a model whose images attend to each other in local layers, of up to 70 tokens.

    Its last two layers share keys and values of others, and all have inputs of their own.
    """
    special = [AREA_PLACEHOLDER, AREA_BEFORE, AREA_AFTER, "<|turn>", "<turn|>"]
    tokenizer = write_tokenizer(folder, special, AREA_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(AREA_PROCESSOR))
    vocabulary = tokenizer.get_vocab_size()
    config = transformers.Gemma4Config(
        vision_config={**AREA_TOWER, **(tower or {})},
        text_config={
            **TEXT,
            "model_type": "gemma4_text",
            "num_hidden_layers": 5,
            "head_dim": 16,
            "global_head_dim": 32,
            # A layer behind the global one has keys of its own.
            "layer_types": [
                *("sliding_attention", "full_attention"),
                *("sliding_attention", "sliding_attention", "full_attention"),
            ],
            "sliding_window": 72,
            "num_kv_shared_layers": 2,
            "vocab_size": vocabulary,
            "vocab_size_per_layer_input": vocabulary,
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
        },
        image_token_id=tokenizer.token_to_id(AREA_PLACEHOLDER) or 0,
        boi_token_id=tokenizer.token_to_id(AREA_BEFORE) or 0,
        eoi_token_id=tokenizer.token_to_id(AREA_AFTER) or 0,
        tie_word_embeddings=False,
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    write_random(folder, model, seed=seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("q_norm.weight"):  # scores are not scaled: else softmax saturates
                tensor.mul_(0.3)
        for name, tensor in model.named_buffers():
            if name.endswith(("_min", "_max")):
                tensor.fill_(-0.9 if name.endswith("_min") else 1.1)
            elif name.endswith(("std_bias", "std_scale")):
                tensor.copy_(torch.linspace(0.4, 1.2, len(tensor)))
    model.save_pretrained(folder)
    return folder


def area_patches(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pixels (1, 3, height, width) each, as transformers' tower takes them, padded to the most."""
    edge, most = AREA_TOWER["patch_size"], 70 * AREA_TOWER["pooling_kernel_size"] ** 2
    values = torch.zeros(len(images), most, 3 * edge**2)
    places = torch.full((len(images), most, 2), -1)
    for index, (pixels,) in enumerate(images):
        down, across = (each // edge for each in pixels.shape[1:])
        cut = pixels.view(3, down, edge, across, edge).permute(1, 3, 2, 4, 0)
        values[index, : down * across] = cut.reshape(down * across, -1)
        rows, columns = torch.arange(down), torch.arange(across)
        of_patch = torch.stack((columns.repeat(down), rows.repeat_interleave(across)), dim=1)
        places[index, : down * across] = of_patch
    return {"pixel_values": values, "image_position_ids": places}
