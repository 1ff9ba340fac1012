"""gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamp."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.experts import ClampedSwish, ExpertsSpec, StackedExperts
from antiphon.layers.moe import MoeSpec
from antiphon.model_worker.model.llama_parts import attention, layers, model, rms_norm
from antiphon.model_worker.model.moe import Count, check_routing
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class GptOssFields(msgspec.Struct, frozen=True, kw_only=True):
    """Config fields of this family."""

    num_experts: Count
    num_experts_per_tok: Count = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ only in their window."""
    norm, fields = rms_norm(config), config.family_fields(GptOssFields)
    check_routing(fields.num_experts, fields.num_experts_per_tok)
    experts = MoeSpec(
        routing=RoutingSpec(top_k=fields.num_experts_per_tok, renormalised=True),
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
        mixer = replace(
            attention(config, window=window),
            qkv_bias=fields.attention_bias,
            out_bias=fields.attention_bias,
            sinks=True,
        )
        return LayerSpec(mixer=mixer, feed_forward=experts, norm=norm)

    return model("gpt-oss", config, layers(config.windows(), layer), norm)


GPT_OSS = ModelFamily(
    name="gpt-oss",
    declare=declare,
    features=(
        *("sinks", "window", "biases", "rope scaling"),
        *("expert biases", "router bias", "normalised top-k weights"),
        *("clamped gate", "gate alpha", "interleaved gate and up"),
    ),
)
