"""Phi 1, 1.5 and 2: parallel blocks that share a norm, with biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionNames
from antiphon.layers.mlp import PlainMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.llama_parts import attention, model
from antiphon.model_worker.model.spec import HeadSpec, LayerSpec, ModelFamily, Norms

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class _PhiFields(msgspec.Struct, frozen=True):
    qk_layernorm: bool = False


NAMES = AttentionNames(
    out="self_attn.dense",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
)


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    norm = NormSpec(kind="layer", eps=config.layer_norm_eps, bias=True)
    layer = LayerSpec(
        mixer=replace(
            attention(config),
            qkv_bias=True,
            out_bias=True,
            qk_norm=norm if config.family_fields(_PhiFields).qk_layernorm else None,
            names=NAMES,
        ),
        feed_forward=PlainMlpSpec(
            width=config.width,
            activation=config.activation,
            bias=True,
            up="mlp.fc1",
            down="mlp.fc2",
        ),
        norm=norm,
        norms=Norms(before_mixer="input_layernorm"),
        parallel=True,
    )
    spec = model("phi", config, (layer,) * config.num_hidden_layers, norm)
    head = HeadSpec(tied=config.tie_word_embeddings, bias=True)
    return msgspec.structs.replace(spec, norm_name="model.final_layernorm", head=head)


PHI = ModelFamily(
    name="phi",
    declare=declare,
    features=(
        "biases",
        "biased head",
        "parallel blocks",
        "partial RoPE",
        "qk-norm",
        "layer norms",
        "tanh GELU",
    ),
)
