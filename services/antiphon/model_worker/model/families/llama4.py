"""Llama 4 (text): RoPE layers with chunked attention, NoPE layers with full attention, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.attention import Temperature
from antiphon.layers.experts import ExpertsSpec, StackedExperts
from antiphon.layers.mlp import GatedMlpSpec
from antiphon.layers.moe import MoeSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import attention, layers, model, rms_norm
from antiphon.model_worker.model.moe import Count, check_routing
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.layers.attention import AttentionSpec
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

CHUNKED, FULL = "chunked_attention", "full_attention"


class Llama4Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Config fields of this family.

    Attributes:
        no_rope_layers: Despite the name, 1 marks a layer with RoPE.
        attn_temperature_tuning: Published configs have 4, which means enabled.
    """

    intermediate_size_mlp: Count
    num_experts: Count
    num_experts_per_tok: Count
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: Count = 1
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None = None
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True
    floor_scale: Count = 8192
    attn_scale: float = 0.1


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ in RoPE, in their attention, and in whether they have experts.

    Raises:
        ModelLoadError: The attention of a layer is not supported, or the lists of layers do not
            match.
    """
    fields, norm = config.family_fields(Llama4Fields), rms_norm(config)
    check_routing(fields.num_experts, fields.num_experts_per_tok)
    dense, experts = _dense(config, fields.intermediate_size_mlp), _experts(config, fields)

    def layer(kind: tuple[bool, str, bool]) -> LayerSpec:
        rotated, sight, sparse = kind
        return LayerSpec(
            mixer=_mixer(config, fields, sight, rotated=rotated),
            feed_forward=experts if sparse else dense,
            norm=norm,
        )

    return model("llama4", config, layers(_kinds(config, fields), layer), norm)


def _kinds(config: ConfigFile, fields: Llama4Fields) -> list[tuple[bool, str, bool]]:
    """For each layer: whether it has RoPE, its kind of attention, whether it has experts."""
    count, step = config.num_hidden_layers, fields.interleave_moe_layer_step
    rotated = [bool(flag) for flag in fields.no_rope_layers or ()] or [
        (index + 1) % fields.no_rope_layer_interval != 0 for index in range(count)
    ]
    if len(rotated) != count:
        raise ModelLoadError(f"config.json: no_rope_layers names {len(rotated)} of {count} layers")
    sights = config.layer_types or tuple(CHUNKED if has_rope else FULL for has_rope in rotated)
    if unknown := sorted(set(sights) - {CHUNKED, FULL}):
        raise ModelLoadError(f"config.json: layer_types: {unknown[0]!r} is not supported")
    sparse = fields.moe_layers
    if sparse is None:
        sparse = tuple(range(step - 1, count, step))
    return [
        (has_rope, sight, index in sparse)
        for index, (has_rope, sight) in enumerate(zip(rotated, sights, strict=True))
    ]


def _mixer(config: ConfigFile, fields: Llama4Fields, sight: str, *, rotated: bool) -> AttentionSpec:
    bias, norm = config.attention_bias, None
    if rotated and fields.use_qk_norm:
        # After RoPE, as in training: for norms without weights the order makes no difference.
        norm = NormSpec(eps=config.rms_norm_eps, affine=False)
    temperature = None
    if fields.attn_temperature_tuning and not rotated:
        temperature = Temperature(floor=fields.floor_scale, scale=fields.attn_scale)
    mixer = attention(config)
    return replace(
        mixer,
        rotary=mixer.rotary if rotated else None,
        interleaved_rope=True,
        window=fields.attention_chunk_size if sight == CHUNKED else None,
        chunked=sight == CHUNKED,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        temperature=temperature,
    )


def _dense(config: ConfigFile, width: int, within: str = "feed_forward") -> GatedMlpSpec:
    return GatedMlpSpec(
        width=width,
        activation=config.activation,
        gate=f"{within}.gate_proj",
        up=f"{within}.up_proj",
        down=f"{within}.down_proj",
    )


def _experts(config: ConfigFile, fields: Llama4Fields) -> MoeSpec:
    return MoeSpec(
        routing=RoutingSpec(top_k=fields.num_experts_per_tok, scoring="sigmoid"),
        experts=ExpertsSpec(
            count=fields.num_experts,
            width=config.width,
            activation=config.activation,
            apply_router_weight_on_input=True,
            names=StackedExperts(
                gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
            ),
        ),
        router="feed_forward.router",
        shared=_dense(config, config.width, "feed_forward.shared_expert"),
    )


LLAMA4 = ModelFamily(
    name="llama4",
    declare=declare,
    features=(
        *("NoPE layers", "chunked attention", "temperature", "qk-norm", "interleaved RoPE"),
        *(
            "biases",
            "rope scaling",
            "sigmoid scores",
            "router weight on the input",
            "shared expert",
        ),
        "unnormalised top-k weights",
    ),
)
