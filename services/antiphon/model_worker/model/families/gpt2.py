"""GPT-2: learned positions, and weights stored as (inputs, outputs)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionNames
from antiphon.layers.mlp import PlainMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.errors import UnsupportedVariant
from antiphon.model_worker.model.llama_parts import attention, model
from antiphon.model_worker.model.spec import EmbeddingSpec, LayerSpec, ModelFamily, Norms

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

QKV = "attn.c_attn"
NAMES = AttentionNames(query=QKV, key=QKV, value=QKV, out="attn.c_proj", transposed=True)


class _Gpt2Fields(msgspec.Struct, frozen=True):
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    fields = config.family_fields(_Gpt2Fields)
    if not fields.scale_attn_weights or fields.scale_attn_by_inverse_layer_idx:
        raise UnsupportedVariant("config.json: other attention scales of GPT-2 are not supported")
    norm = NormSpec(kind="layer", eps=config.layer_norm_eps, bias=True)
    layer = LayerSpec(
        mixer=replace(attention(config), rotary=None, qkv_bias=True, out_bias=True, names=NAMES),
        feed_forward=PlainMlpSpec(
            width=config.width,
            activation=config.activation,
            bias=True,
            transposed=True,
            up="mlp.c_fc",
            down="mlp.c_proj",
        ),
        norm=norm,
        norms=Norms(before_mixer="ln_1", before_feed_forward="ln_2"),
    )
    return msgspec.structs.replace(
        model("gpt2", config, (layer,) * config.num_hidden_layers, norm),
        norm_name="transformer.ln_f",
        embedding=EmbeddingSpec(name="transformer.wte", positions="transformer.wpe"),
        layer_name="transformer.h.{}",
        ignored=(".attn.bias", ".attn.masked_bias"),
        prefix="transformer.",
    )


GPT2 = ModelFamily(
    name="gpt2",
    declare=declare,
    features=("biases", "layer norms", "tanh GELU", "learned positions"),
)
