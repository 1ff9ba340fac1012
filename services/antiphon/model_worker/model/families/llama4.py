"""Llama 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.layers.attention import AttentionSpec, Temperature
from antiphon.layers.moe import MoeSpec, StackedExperts
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    gated,
    layers,
    model,
    rms_norm,
)
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily, ModelSpec

if TYPE_CHECKING:
    from antiphon.layers.mlp import GatedMlpSpec
    from antiphon.model_worker.model.config_file import ConfigFile

CHUNKED, FULL = "chunked_attention", "full_attention"


class _Llama4Fields(ExpertFields, frozen=True, kw_only=True):
    intermediate_size_mlp: Count
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: Count = 1
    no_rope_layers: tuple[int, ...] | None = None
    """Despite the name, 1 marks a layer with RoPE."""
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None = None
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True
    """Published configs have 4, which means enabled."""
    floor_scale: Count = 8192
    attn_scale: float = 0.1


def declare(config: ConfigFile) -> ModelSpec:
    """Llama 4 (text): chunked attention in layers with RoPE, full attention without, experts."""
    fields, norm = config.family_fields(_Llama4Fields), rms_norm(config)
    experts = _experts(config, fields)
    dense = _dense(config, fields.intermediate_size_mlp, "feed_forward")

    def layer(kind: tuple[bool, str, bool]) -> LayerSpec:
        rotated, sight, sparse = kind
        return LayerSpec(
            mixer=_mixer(config, fields, sight, rotated=rotated),
            feed_forward=experts if sparse else dense,
            norm=norm,
        )

    return model(config, layers(_kinds(config, fields), layer))


def _kinds(config: ConfigFile, fields: _Llama4Fields) -> list[tuple[bool, str, bool]]:
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
    sparse = range(step - 1, count, step) if fields.moe_layers is None else fields.moe_layers
    return [
        (has_rope, sight, index in sparse)
        for index, (has_rope, sight) in enumerate(zip(rotated, sights, strict=True))
    ]


def _mixer(
    config: ConfigFile, fields: _Llama4Fields, sight: str, *, rotated: bool
) -> AttentionSpec:
    norm = temperature = None
    if rotated and fields.use_qk_norm:
        # After RoPE, as in training: for norms without weights the order makes no difference.
        norm = NormSpec(eps=config.rms_norm_eps, affine=False)
    if fields.attn_temperature_tuning and not rotated:
        temperature = Temperature(floor=fields.floor_scale, scale=fields.attn_scale)
    return attention(
        config,
        bias=config.attention_bias,
        interleaved_rope=True,
        rotary=config.rotary() if rotated else None,
        window=fields.attention_chunk_size if sight == CHUNKED else None,
        chunked=sight == CHUNKED,
        qk_norm=norm,
        temperature=temperature,
    )


def _dense(config: ConfigFile, width: int, within: str) -> GatedMlpSpec:
    return gated(
        config,
        width=width,
        gate=f"{within}.gate_proj",
        up=f"{within}.up_proj",
        down=f"{within}.down_proj",
    )


def _experts(config: ConfigFile, fields: _Llama4Fields) -> MoeSpec:
    names = StackedExperts(
        gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
    )
    return MoeSpec(
        routing=fields.routing(scoring="sigmoid"),
        experts=fields.experts(
            config, config.width, apply_router_weight_on_input=True, names=names
        ),
        router="feed_forward.router",
        shared=_dense(config, config.width, "feed_forward.shared_expert"),
    )


LLAMA4 = ModelFamily("llama4", declare)
