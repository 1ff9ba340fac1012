"""Llama 2, 3, 3.1, 3.2, and the many models of the same shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.model_worker.model.llama_parts import attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    bias, norm = config.attention_bias, rms_norm(config)
    layer = LayerSpec(
        mixer=replace(attention(config), qkv_bias=bias, out_bias=bias),
        feed_forward=replace(gated(config), bias=config.mlp_bias),
        norm=norm,
    )
    return model("llama", config, (layer,) * config.num_hidden_layers, norm)


LLAMA = ModelFamily(name="llama", declare=declare, features=("biases", "rope scaling"))
