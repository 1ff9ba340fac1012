"""Qwen2-MoE: Qwen2 with experts beside a block for all tokens, which has a gate of its own."""

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
    """What Qwen's models with a gated block for all tokens have."""

    shared_expert_intermediate_size: Count


class Qwen2MoeFields(SharedFields, frozen=True, kw_only=True):
    """What Qwen2-MoE alone has."""

    qkv_bias: bool = True


def declare(config: ConfigFile) -> ModelSpec:
    """Layers that differ in their window, and in whether they have experts."""
    norm, fields = rms_norm(config), config.family_fields(Qwen2MoeFields)

    def layer(kind: tuple[int | None, FeedForwardSpec]) -> LayerSpec:
        window, feed_forward = kind
        mixer = replace(attention(config, window=window), qkv_bias=fields.qkv_bias)
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    blocks = sparse_by_step(config, fields, gated(config), mixture(config, fields))
    kinds = list(zip(windows(config), blocks, strict=True))
    return model("qwen2-moe", config, layers(kinds, layer), norm)


def mixture(config: ConfigFile, fields: SharedFields) -> MoeSpec:
    """Experts beside a block for all tokens, which counts as much as its gate says."""
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
    """Every layer sees every token, unless the config says by name which do not.

    Raises:
        ModelLoadError: Layers have windows and nobody says which.
    """
    if not config.use_sliding_window:
        return (None,) * config.num_hidden_layers
    if config.layer_types is None:
        raise ModelLoadError(
            "config.json: use_sliding_window: layer_types must say in which layers"
        )
    return config.windows()


QWEN2_MOE = ModelFamily(
    name="qwen2-moe",
    declare=declare,
    features=(
        "biases",
        "window",
        "shared block",
        "shared gate",
        "plain shares",
        "renormalised routing",
    ),
)
