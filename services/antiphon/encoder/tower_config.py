"""What configs of several towers of `grid_tower.py` say alike, and names that tensors share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.encoder.grid_tower import GridNames
from antiphon.encoder.tower_spec import Size

if TYPE_CHECKING:
    from pathlib import Path


class BlockFields(msgspec.Struct, frozen=True):
    """The blocks of a tower, and the patches that they read; the defaults are SigLIP's."""

    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    num_hidden_layers: Size = 27
    num_attention_heads: Size = 16
    patch_size: Size = 14


def computed_layers(file: Path, name: str, layer: int, most: int) -> int:
    """How many of `most` layers run if the output of one is read, counted from either end.

    Raises:
        ConfigError: There is no such layer.
    """
    layers = layer + (most + 1 if layer < 0 else 0)
    if not 0 < layers <= most:
        raise ConfigError(f"{file}: {name} = {layer}: must be one of {most} layers")
    return layers


SIGLIP_NAMES = GridNames(
    patch="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    layer="encoder.layers.{}",
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norm2="layer_norm2",
    norm_after="post_layernorm",
    first="linear_1",
    second="linear_2",
)
"""With the names of linears behind it in PaddleOCR-VL and MiniCPM-V."""
