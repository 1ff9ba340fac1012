"""DeepSeek V2, V3 and models of their shape, such as Kimi K2: latent attention and experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.mla import LatentSpec
from antiphon.layers.moe import MoeSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import gated, layers, model, rms_norm
from antiphon.model_worker.model.moe import (
    Count,
    DeepseekMoeFields,
    check_routing,
    experts,
    feed_forwards,
    shared,
    sigmoid_moe,
)
from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the config sets for the others."""


class DeepseekFields(DeepseekMoeFields, frozen=True, kw_only=True):
    """The config fields of latent attention (MLA)."""

    kv_lora_rank: Count
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    rope_interleave: bool = True
    topk_method: str | None = None


def latent(config: ConfigFile, fields: DeepseekFields) -> LatentSpec:
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
    field = config.rope_parameters or config.rope_scaling
    if field is None or (field.rope_type or field.type or "default") == "default":
        return 1.0
    if not field.mscale_all_dim or field.factor is None or field.factor <= 1:
        return 1.0
    return 0.1 * field.mscale_all_dim * math.log(field.factor) + 1.0


def softmax_moe(config: ConfigFile, fields: DeepseekFields) -> MoeSpec:
    """Softmax scores; with expert groups, only experts of the best groups are selected.

    Raises:
        ModelLoadError: The routing method is not supported.
    """
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
    check_routing(fields.num_experts, fields.num_experts_per_tok, groups, kept)
    return MoeSpec(
        routing=RoutingSpec(
            top_k=fields.num_experts_per_tok,
            factor=fields.routed_scaling_factor,
            groups=groups,
            groups_kept=kept,
        ),
        experts=experts(config, fields),
        shared=shared(config, fields),
    )


def _model(name: str, config: ConfigFile, fields: DeepseekFields, sparse: MoeSpec) -> ModelSpec:
    norm, mixer = rms_norm(config), latent(config, fields)

    def layer(feed_forward: FeedForwardSpec) -> LayerSpec:
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    blocks = feed_forwards(config, fields, gated(config), sparse)
    spec = model(name, config, layers(blocks, layer), norm)
    return msgspec.structs.replace(spec, further_layers=fields.num_nextn_predict_layers)


def declare_v2(config: ConfigFile) -> ModelSpec:
    """Dense blocks in the first layers, experts in the others."""
    fields = msgspec.structs.replace(config.family_fields(DeepseekFields), rope_interleave=True)
    return _model("deepseek-v2", config, fields, softmax_moe(config, fields))


def declare_v3(config: ConfigFile) -> ModelSpec:
    """Dense blocks in the first layers, experts in the others."""
    fields = config.family_fields(DeepseekFields)
    return _model("deepseek-v3", config, fields, sigmoid_moe(config, fields))


_LATENT = (
    "rope scaling",
    "mscale",
    "interleaved RoPE",
    "shared expert",
    "scaling",
    "groups",
)
DEEPSEEK_V2 = ModelFamily(
    name="deepseek-v2", declare=declare_v2, features=(*_LATENT, "unnormalised top-k weights")
)
DEEPSEEK_V3 = ModelFamily(
    name="deepseek-v3",
    declare=declare_v3,
    features=(
        *_LATENT,
        "biases",
        *("sigmoid scores", "correction", "groups by their two best", "normalised top-k weights"),
    ),
)
