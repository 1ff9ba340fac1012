"""Granite 3: Llama's shape with four multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.model.llama_parts import attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import EmbeddingSpec, HeadSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class _GraniteFields(msgspec.Struct, frozen=True):
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    by, bias, norm = config.family_fields(_GraniteFields), config.attention_bias, rms_norm(config)
    mixer = replace(attention(config), scale=by.attention_multiplier)
    layer = LayerSpec(
        mixer=replace(mixer, qkv_bias=bias, out_bias=bias),
        feed_forward=replace(gated(config), bias=config.mlp_bias),
        norm=norm,
        multiplier=by.residual_multiplier,
    )
    return msgspec.structs.replace(
        model("granite", config, (layer,) * config.num_hidden_layers, norm),
        embedding=EmbeddingSpec(scale=by.embedding_multiplier),
        head=HeadSpec(tied=config.tie_word_embeddings, scale=1 / by.logits_scaling),
    )


GRANITE = ModelFamily(
    name="granite",
    declare=declare,
    features=(
        *("biases", "attention scale", "residual multiplier"),
        *("scaled embedding", "scaled logits"),
    ),
)
