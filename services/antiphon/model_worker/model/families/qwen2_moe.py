"""Qwen2-MoE: Qwen2 with experts and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.layers.mlp import GatedMlpSpec
from antiphon.layers.moe import MoeSpec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import attention, gated, layers, model, rms_norm
from antiphon.model_worker.model.moe import Count, QwenMoeFields, sparse_by_step
from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class SharedFields(QwenMoeFields, frozen=True, kw_only=True):
    """Config fields of Qwen's models with a gated shared expert."""

    shared_expert_intermediate_size: Count


class Qwen2MoeFields(SharedFields, frozen=True, kw_only=True):
    """Config fields of Qwen2-MoE."""

    qkv_bias: bool = True


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ in their window, and in whether they have experts."""
    norm, fields = rms_norm(config), config.family_fields(Qwen2MoeFields)

    def layer(kind: tuple[int | None, FeedForwardSpec]) -> LayerSpec:
        window, feed_forward = kind
        mixer = replace(attention(config, window=window), qkv_bias=fields.qkv_bias)
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    blocks = sparse_by_step(config, fields, gated(config), mixture(config, fields))
    kinds = list(zip(windows(config), blocks, strict=True))
    return model("qwen2-moe", config, layers(kinds, layer), norm)


def mixture(config: ConfigFile, fields: SharedFields) -> MoeSpec:
    """Experts and a shared expert, whose output is scaled by a gate."""
    return MoeSpec(
        routing=fields.routing(),
        experts=fields.experts(config),
        shared=GatedMlpSpec(
            width=fields.shared_expert_intermediate_size,
            activation=config.activation,
            gate="mlp.shared_expert.gate_proj",
            up="mlp.shared_expert.up_proj",
            down="mlp.shared_expert.down_proj",
        ),
        shared_gate="mlp.shared_expert_gate",
    )


def windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Full attention in every layer, unless `layer_types` lists windows.

    Raises:
        ModelLoadError: Windows are enabled without `layer_types`.
    """
    if not config.use_sliding_window:
        return (None,) * config.num_hidden_layers
    if config.layer_types is None:
        raise ModelLoadError(
            "config.json: use_sliding_window: layer_types must list the layers with windows"
        )
    return config.windows()


QWEN2_MOE = ModelFamily(
    name="qwen2-moe",
    declare=declare,
    features=(
        "biases",
        "window",
        "shared expert",
        "shared gate",
        "unnormalised top-k weights",
        "normalised top-k weights",
    ),
)
