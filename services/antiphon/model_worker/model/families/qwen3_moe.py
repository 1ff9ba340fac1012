"""Qwen3-MoE: Qwen3 with experts in place of feed-forward blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.layers.moe import MoeSpec
from antiphon.model_worker.model.llama_parts import attention, gated, layers, model, rms_norm
from antiphon.model_worker.model.moe import QwenMoeFields, sparse_by_step
from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ in whether they have experts."""
    norm, fields = rms_norm(config), config.family_fields(QwenMoeFields)
    bias = config.attention_bias
    window = config.sliding_window if config.use_sliding_window else None
    mixer = replace(attention(config, window=window), qkv_bias=bias, out_bias=bias, qk_norm=norm)

    def layer(feed_forward: FeedForwardSpec) -> LayerSpec:
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    sparse = MoeSpec(routing=fields.routing(), experts=fields.experts(config))
    blocks = sparse_by_step(config, fields, gated(config), sparse)
    return model("qwen3-moe", config, layers(blocks, layer), norm)


QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    declare=declare,
    features=("qk-norm", "biases", "window", "normalised top-k weights"),
)
