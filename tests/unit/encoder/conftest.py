from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, WIDE, IMAGE, PATCH = 16, 24, 16, 8
TOKENS = (IMAGE // PATCH) ** 2


def write_siglip(folder: Path) -> Path:
    """One layer of random weights."""
    shapes = {
        "embeddings.patch_embedding.weight": (HIDDEN, 3, PATCH, PATCH),
        "embeddings.patch_embedding.bias": (HIDDEN,),
        "embeddings.position_embedding.weight": (TOKENS, HIDDEN),
    }
    linears = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "out")}
    linears |= {"mlp.fc1": (WIDE, HIDDEN), "mlp.fc2": (HIDDEN, WIDE)}
    named = {f"encoder.layers.0.{name}": shape for name, shape in linears.items()}
    norms = ("encoder.layers.0.layer_norm1", "encoder.layers.0.layer_norm2", "post_layernorm")
    for name, shape in (named | dict.fromkeys(norms, (HIDDEN,))).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "siglip_vision_model",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": IMAGE,
        "patch_size": PATCH,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tower of 4 tokens of 16 numbers."""
    return write_siglip(tmp_path_factory.mktemp("siglip"))
