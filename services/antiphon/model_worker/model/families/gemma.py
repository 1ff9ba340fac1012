"""Gemma: norms with 1 + weight, a GELU (tanh) gate, a scaled embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.mlp import GatedMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.llama_parts import attention, model
from antiphon.model_worker.model.spec import EmbeddingSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    bias, norm = config.attention_bias, one_plus(config)
    layer = LayerSpec(
        mixer=replace(attention(config), qkv_bias=bias, out_bias=bias),
        feed_forward=tanh_gated(config),
        norm=norm,
    )
    return scaled(model("gemma", config, (layer,) * config.num_hidden_layers, norm))


def one_plus(config: ConfigFile) -> NormSpec:
    """The norm of this family and later ones: factors are 1 + weight."""
    return NormSpec(kind="rms_one_plus", eps=config.rms_norm_eps)


def tanh_gated(config: ConfigFile) -> GatedMlpSpec:
    """Its feed-forward block; `gelu` in its first configs meant the tanh approximation."""
    activation = "gelu_tanh" if config.activation == "gelu" else config.activation
    return GatedMlpSpec(width=config.width, activation=activation)


def scaled(spec: ModelSpec) -> ModelSpec:
    """Scale the embedding by the square root of the hidden size."""
    return msgspec.structs.replace(spec, embedding=EmbeddingSpec(scale=spec.hidden**0.5))


GEMMA = ModelFamily(
    name="gemma",
    declare=declare,
    features=("norms of 1 + weight", "tanh GELU", "scaled embedding"),
)
