"""gpt-oss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.layers.moe import ClampedSwish, ExpertsSpec, MoeSpec, StackedExperts
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    layers,
    model,
    rms_norm,
)
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily, ModelSpec

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile


class _GptOssFields(ExpertFields, frozen=True, kw_only=True):
    num_experts_per_tok: Count = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True


def declare(config: ConfigFile) -> ModelSpec:
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


GPT_OSS = ModelFamily("gpt-oss", declare)
