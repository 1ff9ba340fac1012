"""DeepSeek V2 and V3, and the experts of GLM-4.5, which are routed as theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.latent import LatentSizes
from antiphon.layers.mla import LatentSpec
from antiphon.layers.moe import MoeSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.config_file import ConfigFile, mscale
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    gated,
    layers,
    model,
    rms_norm,
    rotary_with_axes,
)
from antiphon.model_worker.model.spec import (
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    ModelFamily,
    ModelSpec,
)

if TYPE_CHECKING:
    from antiphon.layers.mlp import GatedMlpSpec

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the config sets for the others."""


class _DeepseekMoeFields(ExpertFields, frozen=True, kw_only=True):
    """What decides routing has no default: the defaults of transformers' classes differ."""

    moe_intermediate_size: Count
    n_shared_experts: int | None = None
    first_k_dense_replace: int
    moe_layer_freq: int = 1
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int = 0


class _DeepseekFields(_DeepseekMoeFields, frozen=True, kw_only=True):
    kv_lora_rank: Count
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    rope_interleave: bool = True
    topk_method: str | None = None


class _Glm4MoeFields(_DeepseekMoeFields, frozen=True, kw_only=True):
    use_qk_norm: bool = False


def declare_v2(config: ConfigFile) -> ModelSpec:
    """DeepSeek V2 and models of its shape: latent attention and experts."""
    fields = msgspec.structs.replace(config.family_fields(_DeepseekFields), rope_interleave=True)
    return _model(config, fields, _latent(config, fields), _softmax_moe(config, fields))


def declare_v3(config: ConfigFile) -> ModelSpec:
    """DeepSeek V3 and models of its shape, such as Kimi K2: latent attention and experts."""
    fields = config.family_fields(_DeepseekFields)
    return _model(config, fields, _latent(config, fields), _sigmoid_moe(config, fields))


def declare_glm4_moe(config: ConfigFile) -> ModelSpec:
    """GLM-4.5 and later with experts: RoPE on half of each head, routing as in DeepSeek V3."""
    fields = config.family_fields(_Glm4MoeFields)
    qk_norm = rms_norm(config) if fields.use_qk_norm else None
    mixer = attention(config, qkv_bias=config.attention_bias, qk_norm=qk_norm)
    return _model(config, fields, mixer, _sigmoid_moe(config, fields))


def declare_glm4v_moe(config: ConfigFile) -> ModelSpec:
    """GLM-4.5V: GLM-4.5 whose positions have axes; its images come from outside."""
    fields = config.family_fields(_Glm4MoeFields)
    rotary = rotary_with_axes(config)
    mixer = attention(config, qkv_bias=config.attention_bias, rotary=rotary)
    return _model(config, fields, mixer, _sigmoid_moe(config, fields))


def _model(
    config: ConfigFile, fields: _DeepseekMoeFields, mixer: MixerSpec, sparse: MoeSpec
) -> ModelSpec:
    """Dense blocks in the first layers, experts in the others."""
    if fields.moe_layer_freq != 1:
        raise ModelLoadError(
            f"config.json: moe_layer_freq {fields.moe_layer_freq} is not supported: use 1"
        )
    norm, dense = rms_norm(config), gated(config)

    def layer(feed_forward: FeedForwardSpec) -> LayerSpec:
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    blocks: list[FeedForwardSpec] = [
        dense if index < fields.first_k_dense_replace else sparse
        for index in range(config.num_hidden_layers)
    ]
    return model(config, layers(blocks, layer), further_layers=fields.num_nextn_predict_layers)


def _latent(config: ConfigFile, fields: _DeepseekFields) -> LatentSpec:
    """Latent attention (MLA), with mscale in the scale of its scores."""
    sizes = LatentSizes(
        heads=config.num_attention_heads,
        latent=fields.kv_lora_rank,
        content=fields.qk_nope_head_dim,
        position=fields.qk_rope_head_dim,
        value=fields.v_head_dim,
    )
    rotated = msgspec.structs.replace(config, head_dim=fields.qk_rope_head_dim)
    return LatentSpec(
        sizes=sizes,
        scale=(sizes.content + sizes.position) ** -0.5 * _mscale(config) ** 2,
        rotary=rotated.rotary(),
        interleaved_rope=fields.rope_interleave,
        query_latent=fields.q_lora_rank,
        norm=NormSpec(eps=LATENT_EPS),
        bias=config.attention_bias,
    )


def _mscale(config: ConfigFile) -> float:
    """The mscale of queries and keys. Source: DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.4."""
    field = config.rope
    if field.kind == "default" or not field.mscale_all_dim:
        return 1.0
    return mscale(field.factor or 1.0, field.mscale_all_dim)


def _softmax_moe(config: ConfigFile, fields: _DeepseekFields) -> MoeSpec:
    """Softmax scores; with expert groups, only experts of the best groups are selected."""
    if fields.topk_method not in ("greedy", "group_limited_greedy"):
        raise ModelLoadError(
            f"config.json: topk_method {fields.topk_method!r} is not supported:"
            " there are greedy and group_limited_greedy"
        )
    if fields.norm_topk_prob:
        # No published model has it, and implementations disagree on whether the factor then counts.
        raise ModelLoadError("config.json: norm_topk_prob is not supported in this family")
    grouped = fields.topk_method == "group_limited_greedy"
    groups, kept = (fields.n_group or 1, fields.topk_group or 1) if grouped else (1, 1)
    return MoeSpec(
        routing=fields.routing(groups, kept, factor=fields.routed_scaling_factor),
        experts=fields.experts(config, fields.moe_intermediate_size),
        shared=_shared(config, fields),
    )


def _sigmoid_moe(config: ConfigFile, fields: _DeepseekMoeFields) -> MoeSpec:
    """Sigmoid scores with a balancing correction, expert groups, and a shared expert."""
    return MoeSpec(
        routing=fields.routing(
            fields.n_group or 1,
            fields.topk_group or 1,
            scoring="sigmoid",
            renormalised=fields.norm_topk_prob,
            factor=fields.routed_scaling_factor,
            group_best=2,
        ),
        experts=fields.experts(config, fields.moe_intermediate_size),
        correction="mlp.gate.e_score_correction_bias",
        shared=_shared(config, fields),
    )


def _shared(config: ConfigFile, fields: _DeepseekMoeFields) -> GatedMlpSpec | None:
    """The shared expert that processes all tokens: as wide as several routed experts."""
    if not fields.n_shared_experts:
        return None
    return gated(
        config,
        width=fields.n_shared_experts * fields.moe_intermediate_size,
        gate="mlp.shared_experts.gate_proj",
        up="mlp.shared_experts.up_proj",
        down="mlp.shared_experts.down_proj",
    )


DEEPSEEK_V2 = ModelFamily("deepseek-v2", declare_v2)
DEEPSEEK_V3 = ModelFamily("deepseek-v3", declare_v3)
GLM4_MOE = ModelFamily("glm4-moe", declare_glm4_moe)
GLM4V_MOE = ModelFamily("glm4v-moe", declare_glm4v_moe)
