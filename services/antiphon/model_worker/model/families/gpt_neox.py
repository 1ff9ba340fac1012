"""GPT-NeoX and Pythia: parallel blocks with a norm each, QKV fused head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionNames
from antiphon.layers.mlp import PlainMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.llama_parts import attention, model
from antiphon.model_worker.model.spec import PRE, EmbeddingSpec, HeadSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

QKV = "attention.query_key_value"
NAMES = AttentionNames(query=QKV, key=QKV, value=QKV, out="attention.dense", by_head=True)


class _GptNeoxFields(msgspec.Struct, frozen=True):
    use_parallel_residual: bool = True


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    bias = config.attention_bias
    norm = NormSpec(kind="layer", eps=config.layer_norm_eps, bias=True)
    layer = LayerSpec(
        mixer=replace(attention(config), qkv_bias=bias, out_bias=bias, names=NAMES),
        feed_forward=PlainMlpSpec(
            width=config.width,
            activation=config.activation,
            bias=True,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        norm=norm,
        norms=PRE,
        parallel=config.family_fields(_GptNeoxFields).use_parallel_residual,
    )
    return msgspec.structs.replace(
        model("gpt_neox", config, (layer,) * config.num_hidden_layers, norm),
        norm_name="gpt_neox.final_layer_norm",
        embedding=EmbeddingSpec(name="gpt_neox.embed_in"),
        head=HeadSpec(name="embed_out", tied=config.tie_word_embeddings),
        layer_name="gpt_neox.layers.{}",
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    )


GPT_NEOX = ModelFamily(
    name="gpt_neox",
    declare=declare,
    features=("biases", "layer norms", "exact GELU", "parallel blocks", "partial RoPE"),
)
