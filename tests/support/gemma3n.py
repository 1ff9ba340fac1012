"""The text model of Gemma 3n, as its multimodal checkpoints have it.

transformers' class of the whole needs timm, for the tower of images, which is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

TOWERS = (
    *("vision_tower.timm_model.conv_stem.conv.weight", "audio_tower.conformer.0.norm.weight"),
    *("embed_vision.embedding.weight", "embed_audio.embedding_projection.weight"),
)
"""Some names of their tensors."""


class Gemma3nForConditionalGeneration(transformers.Gemma3nForCausalLM):
    """The text model of the config of the whole."""

    config_class: ClassVar[Any] = transformers.Gemma3nConfig

    def __init__(self, config: transformers.Gemma3nConfig) -> None:
        assert isinstance(config.text_config, transformers.Gemma3nTextConfig)
        super().__init__(config.text_config)


def write_published(model: Any, folder: Path) -> None:
    """Save a model under the published names, beside tensors that nothing reads.

    These are those of the towers, and keys and values of layers that attend to those of others.
    """
    model.save_pretrained(folder)
    text, file = model.config, folder / "model.safetensors"
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(file).items()
    }
    first = text.num_hidden_layers - text.num_kv_shared_layers
    for layer in range(first, text.num_hidden_layers):
        attention = f"model.language_model.layers.{layer}.self_attn"
        for name in ("k_proj", "v_proj"):
            size = text.num_key_value_heads * text.head_dim
            tensors[f"{attention}.{name}.weight"] = torch.ones(size, text.hidden_size)
        tensors[f"{attention}.k_norm.weight"] = torch.ones(text.head_dim)
    tensors |= {f"model.{name}": torch.ones(4) for name in TOWERS}
    save_file(tensors, file, metadata={"format": "pt"})
    whole = transformers.Gemma3nConfig(text_config=text.to_dict())
    whole.architectures = [Gemma3nForConditionalGeneration.__name__]
    whole.save_pretrained(folder)
