"""SmolLM3: Llama's shape with every fourth layer without RoPE (NoPE)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.model.llama_parts import attention, gated, layers, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class _SmolLm3Fields(msgspec.Struct, frozen=True):
    no_rope_layers: tuple[int, ...] | None = None
    """Despite the name, 1 marks a layer with RoPE."""
    no_rope_layer_interval: int = 4


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ in whether they have RoPE."""
    fields, bias, norm = (
        config.family_fields(_SmolLm3Fields),
        config.attention_bias,
        rms_norm(config),
    )
    rotated = fields.no_rope_layers or tuple(
        int((index + 1) % fields.no_rope_layer_interval != 0)
        for index in range(config.num_hidden_layers)
    )

    def layer(kind: tuple[int | None, int]) -> LayerSpec:
        window, rotates = kind
        mixer = replace(attention(config, window=window), qkv_bias=bias, out_bias=bias)
        return LayerSpec(
            mixer=mixer if rotates else replace(mixer, rotary=None),
            feed_forward=replace(gated(config), bias=config.mlp_bias),
            norm=norm,
        )

    kinds = tuple(zip(config.windows(), rotated, strict=True))
    return model("smollm3", config, layers(kinds, layer), norm)


SMOLLM3 = ModelFamily(name="smollm3", declare=declare, features=("NoPE layers", "biases", "window"))
