"""GPT-2, GPT-NeoX, Phi, StarCoder2 and Whisper: layer norms and plain blocks; and gpt-oss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.attention import AttentionNames
from antiphon.layers.cross_attention import CrossAttentionSpec
from antiphon.layers.moe import ClampedSwish, ExpertsSpec, MoeSpec, StackedExperts
from antiphon.model_worker.model.errors import UnsupportedVariant
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    layer_norm,
    layers,
    model,
    plain,
    rms_norm,
)
from antiphon.model_worker.model.spec import (
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
    Norms,
)

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile

_GPT2_QKV = "attn.c_attn"
GPT2_NAMES = AttentionNames(
    query=_GPT2_QKV, key=_GPT2_QKV, value=_GPT2_QKV, out="attn.c_proj", transposed=True
)
_NEOX_QKV = "attention.query_key_value"
NEOX_NAMES = AttentionNames(
    query=_NEOX_QKV, key=_NEOX_QKV, value=_NEOX_QKV, out="attention.dense", by_head=True
)
PHI_NAMES = AttentionNames(
    out="self_attn.dense", query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm"
)


WHISPER_NORMS = Norms(
    before_mixer="self_attn_layer_norm",
    before_cross="encoder_attn_layer_norm",
    before_feed_forward="final_layer_norm",
)


class _Gpt2Fields(msgspec.Struct, frozen=True):
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


def declare_gpt2(config: ConfigFile) -> ModelSpec:
    """GPT-2: learned positions, and weights stored as (inputs, outputs)."""
    fields = config.family_fields(_Gpt2Fields)
    if not fields.scale_attn_weights or fields.scale_attn_by_inverse_layer_idx:
        raise UnsupportedVariant("config.json: other attention scales of GPT-2 are not supported")
    layer = LayerSpec(
        mixer=attention(config, bias=True, rotary=None, names=GPT2_NAMES),
        feed_forward=plain(config, transposed=True, up="mlp.c_fc", down="mlp.c_proj"),
        norm=layer_norm(config),
        norms=Norms(before_mixer="ln_1", before_feed_forward="ln_2"),
    )
    return model(
        config,
        layer,
        norm_name="transformer.ln_f",
        embedding=EmbeddingSpec(name="transformer.wte", positions="transformer.wpe"),
        layer_name="transformer.h.{}",
        ignored=(".attn.bias", ".attn.masked_bias"),
        prefix="transformer.",
    )


class _GptNeoxFields(msgspec.Struct, frozen=True):
    use_parallel_residual: bool = True


def declare_gpt_neox(config: ConfigFile) -> ModelSpec:
    """GPT-NeoX and Pythia: parallel blocks with a norm each, QKV fused head by head."""
    layer = LayerSpec(
        mixer=attention(config, bias=config.attention_bias, names=NEOX_NAMES),
        feed_forward=plain(config, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        norm=layer_norm(config),
        parallel=config.family_fields(_GptNeoxFields).use_parallel_residual,
    )
    return model(
        config,
        layer,
        norm_name="gpt_neox.final_layer_norm",
        embedding=EmbeddingSpec(name="gpt_neox.embed_in"),
        head=HeadSpec(name="embed_out", tied=config.tie_word_embeddings),
        layer_name="gpt_neox.layers.{}",
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    )


class _PhiFields(msgspec.Struct, frozen=True):
    qk_layernorm: bool = False


def declare_phi(config: ConfigFile) -> ModelSpec:
    """Phi 1, 1.5 and 2: parallel blocks that share a norm, with biases everywhere."""
    norm = layer_norm(config)
    qk_norm = norm if config.family_fields(_PhiFields).qk_layernorm else None
    layer = LayerSpec(
        mixer=attention(config, bias=True, qk_norm=qk_norm, names=PHI_NAMES),
        feed_forward=plain(config, up="mlp.fc1", down="mlp.fc2"),
        norm=norm,
        norms=Norms(before_mixer="input_layernorm"),
        parallel=True,
    )
    head = HeadSpec(tied=config.tie_word_embeddings, bias=True)
    return model(config, layer, norm_name="model.final_layernorm", head=head)


class _Starcoder2Fields(msgspec.Struct, frozen=True):
    use_bias: bool = True


def declare_starcoder2(config: ConfigFile) -> ModelSpec:
    """StarCoder2: layer norms, plain feed-forward blocks, biases everywhere."""
    bias = config.family_fields(_Starcoder2Fields).use_bias
    layer = LayerSpec(
        mixer=attention(config, window=config.sliding_window, bias=bias),
        feed_forward=plain(config, bias=bias, up="mlp.c_fc", down="mlp.c_proj"),
        norm=layer_norm(config),
    )
    return model(config, layer)


class _GptOssFields(ExpertFields, frozen=True, kw_only=True):
    num_experts_per_tok: Count = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True


def declare_gpt_oss(config: ConfigFile) -> ModelSpec:
    """gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamp."""
    norm, fields = rms_norm(config), config.family_fields(_GptOssFields)
    experts = MoeSpec(
        routing=fields.routing(renormalised=True),
        experts=ExpertsSpec(
            count=fields.num_experts,
            width=config.width,
            activation=ClampedSwish(alpha=fields.swiglu_alpha, limit=fields.swiglu_limit),
            bias=True,
            names=StackedExperts(interleaved=True),
        ),
        router="mlp.router",
        router_bias=True,
    )

    def layer(window: int | None) -> LayerSpec:
        mixer = attention(config, window=window, bias=fields.attention_bias, sinks=True)
        return LayerSpec(mixer=mixer, feed_forward=experts, norm=norm)

    return model(config, layers(config.windows(), layer))


class _WhisperFields(msgspec.Struct, frozen=True):
    max_source_positions: Count = 1500
    scale_embedding: bool = False


def declare_whisper(config: ConfigFile) -> ModelSpec:
    """The text model; what it attends to comes from outside.

    Source: Radford et al. 2022, arXiv:2212.04356, section 2.2.
    """
    fields = config.family_fields(_WhisperFields)
    if fields.scale_embedding:
        raise UnsupportedVariant("config.json: scale_embedding of Whisper is not supported")
    names = AttentionNames(out="self_attn.out_proj")
    layer = LayerSpec(
        mixer=attention(config, bias=True, key_bias=False, rotary=None, names=names),
        cross=CrossAttentionSpec(
            heads=config.num_attention_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            source_tokens=fields.max_source_positions,
        ),
        feed_forward=plain(config, up="fc1", down="fc2"),
        norm=layer_norm(config),
        norms=WHISPER_NORMS,
    )
    return model(
        config,
        layer,
        norm_name="model.decoder.layer_norm",
        embedding=EmbeddingSpec(
            name="model.decoder.embed_tokens", positions="model.decoder.embed_positions"
        ),
        head=HeadSpec(name="proj_out", tied=config.tie_word_embeddings),
        layer_name="model.decoder.layers.{}",
    )


GPT2 = ModelFamily("gpt2", declare_gpt2)
GPT_NEOX = ModelFamily("gpt_neox", declare_gpt_neox)
PHI = ModelFamily("phi", declare_phi)
STARCODER2 = ModelFamily("starcoder2", declare_starcoder2)
GPT_OSS = ModelFamily("gpt-oss", declare_gpt_oss)
WHISPER = ModelFamily("whisper", declare_whisper)
