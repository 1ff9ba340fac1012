"""A tiny Kimi K2.5 with random weights, under the names of published files.

transformers writes another mixture of names than it reads, so that its own files are none of these.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from tests.support.llava import TEXT, draw_random, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

PLACEHOLDER = "<|media_pad|>"
SPECIAL = (
    *(PLACEHOLDER, "<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    "<|kimi_k25_video_placeholder|>",
)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
"""As published, without tools and reasoning."""
PROCESSOR: Mapping[str, Any] = {
    "size": {"max_height": 12, "max_width": 12},
    "max_patches": 100,
    "patch_size": 4,
    "merge_size": 2,
    "image_processor_type": "Kimi_K25ImageProcessor",
}
"""Images of up to 12 patches an edge, which is less than a hundred of a square."""
TOWER: Mapping[str, Any] = {
    "patch_size": 4,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
}
_TEXT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "bos_token_id": None,
    "eos_token_id": None,
}
_BEGINNINGS = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.final_layernorm.": "vision_tower.encoder.final_layernorm.",
    "model.vision_tower.patch_embed.pos_emb.position_embeddings": (
        "vision_tower.patch_embed.pos_emb.weight"
    ),
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.in_proj.": "mm_projector.proj.0.",
    "model.mm_projector.out_proj.": "mm_projector.proj.2.",
    "model.mm_projector.": "mm_projector.",
}
_OF_BLOCKS = {
    ".norm1.": ".norm0.",
    ".norm2.": ".norm1.",
    ".mlp.fc1.": ".mlp.fc0.",
    ".mlp.fc2.": ".mlp.fc1.",
    ".attn.proj.": ".wo.",
}
"""By transformers' names: those that were published; of several the first one counts."""


def write_kimi_k25(folder: Path) -> Path:
    """Write a model with DeepSeek V3's text model, whose second layer has experts."""
    tokenizer = write_tokenizer(folder, SPECIAL, TEMPLATE)
    text = {**TEXT, **_TEXT, "model_type": "deepseek_v3"}
    config = transformers.Kimi_K25Config(
        vision_config=dict(TOWER),
        text_config={**text, "vocab_size": tokenizer.get_vocab_size()},
        projection_hidden_size=TOWER["hidden_size"],
        image_token_id=tokenizer.token_to_id(PLACEHOLDER) or 0,
        video_token_id=tokenizer.token_to_id(SPECIAL[-1]) or 0,
        tie_word_embeddings=False,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return write_published(
        draw_random(transformers.Kimi_K25ForConditionalGeneration(config)), folder
    )


def write_published(model: Any, folder: Path) -> Path:
    """Write a model as the published ones are."""
    heads = model.config.vision_config.num_attention_heads
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                tensors |= _by_expert(name, part, half)
        elif name.endswith("experts.down_proj"):
            tensors |= _by_expert(name, "down_proj", tensor)
        elif ".attn.q_proj." in name:
            parts = [model.state_dict()[name.replace("q_proj", each)] for each in _QKV]
            fused = [_in_pairs(parts[0], heads), _in_pairs(parts[1], heads), parts[2]]
            tensors[_published(name.replace("attn.q_proj", "wqkv"))] = torch.cat(fused)
        elif ".attn.k_proj." not in name and ".attn.v_proj." not in name:
            tensors[_published(name)] = tensor
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


_QKV = ("q_proj", "k_proj", "v_proj")


def _published(name: str) -> str:
    theirs = next(theirs for theirs in _BEGINNINGS if name.startswith(theirs))
    ours = _BEGINNINGS[theirs] + name.removeprefix(theirs)
    if ".blocks." not in ours:
        return ours
    found = next((part for part in _OF_BLOCKS if part in ours), "")
    return ours.replace(found, _OF_BLOCKS[found]) if found else ours


def _by_expert(name: str, part: str, stacked: Tensor) -> dict[str, Tensor]:
    """One tensor for each expert: (E, O, I)  ->  E times (O, I)."""
    before = _published(name).rpartition(".")[0]
    return {f"{before}.{index}.{part}.weight": each for index, each in enumerate(stacked)}


def _in_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows of which those that are rotated together are neighbours; they are half a head apart."""
    return x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
