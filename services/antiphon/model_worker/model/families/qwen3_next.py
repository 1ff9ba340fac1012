"""Qwen3-Next: three gated delta net layers to one of gated attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.gated_delta import GatedDeltaSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.families.qwen2_moe import SharedFields, mixture
from antiphon.model_worker.model.llama_parts import attention, gated, layers, model
from antiphon.model_worker.model.moe import sparse_by_step
from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import MixerSpec, ModelSpec


class Qwen3NextFields(msgspec.Struct, frozen=True, kw_only=True):
    """Config fields of this family."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int = 4
    num_experts: int = 0


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ in their mixer, and in whether they have experts."""
    fields = config.family_fields(Qwen3NextFields)
    norm = NormSpec(kind="rms_one_plus", eps=config.rms_norm_eps)

    def layer(kind: tuple[str, FeedForwardSpec]) -> LayerSpec:
        mixer, feed_forward = kind
        return LayerSpec(mixer=_mixer(mixer, config, fields), feed_forward=feed_forward, norm=norm)

    kinds = list(zip(_kinds(config, fields), _feed_forwards(config, fields), strict=True))
    return model("qwen3-next", config, layers(kinds, layer), norm)


def _feed_forwards(config: ConfigFile, fields: Qwen3NextFields) -> tuple[FeedForwardSpec, ...]:
    dense = gated(config)
    if fields.num_experts == 0:
        return (dense,) * config.num_hidden_layers
    sparse = config.family_fields(SharedFields)
    return sparse_by_step(config, sparse, dense, mixture(config, sparse))


def _kinds(config: ConfigFile, fields: Qwen3NextFields) -> tuple[str, ...]:
    if config.layer_types is not None:
        return config.layer_types
    every = fields.full_attention_interval
    return tuple(
        "linear_attention" if (index + 1) % every else "full_attention"
        for index in range(config.num_hidden_layers)
    )


def _mixer(kind: str, config: ConfigFile, fields: Qwen3NextFields) -> MixerSpec:
    match kind:
        case "linear_attention":
            return GatedDeltaSpec(
                key_heads=fields.linear_num_key_heads,
                value_heads=fields.linear_num_value_heads,
                key_size=fields.linear_key_head_dim,
                value_size=fields.linear_value_head_dim,
                taps=fields.linear_conv_kernel_dim,
                norm_eps=config.rms_norm_eps,
            )
        case "full_attention":
            return replace(
                attention(config),
                gated=True,
                qk_norm=NormSpec(kind="rms_one_plus", eps=config.rms_norm_eps),
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
            )
        case _:
            raise ModelLoadError(f"config.json: layer_types: {kind!r} is not supported")


QWEN3_NEXT = ModelFamily(
    name="qwen3-next",
    declare=declare,
    features=(
        *("gated norm", "gated attention", "partial RoPE", "qk-norm", "biases"),
        *("norms of 1 + weight", "shared expert", "shared gate", "normalised top-k weights"),
    ),
)
