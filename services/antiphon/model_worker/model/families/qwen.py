"""Qwen2, Qwen3 and Qwen3.5, dense and with experts, and Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.moe import MoeSpec, StackedExperts
from antiphon.layers.recurrent import GatedDeltaSpec
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    gated,
    layers,
    model,
    one_plus_norm,
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
    from antiphon.model_worker.model.config_file import ConfigFile


def declare_qwen2(config: ConfigFile) -> ModelSpec:
    """Qwen2 and Qwen2.5: Llama's shape with biases on queries, keys and values only."""
    return _dense(config, qkv_bias=True)


def declare_qwen2_vl(config: ConfigFile) -> ModelSpec:
    """Qwen2-VL and Qwen2.5-VL: Qwen2 whose positions have axes; its images come from outside."""
    return _dense(config, qkv_bias=True, rotary=rotary_with_axes(config))


def declare_qwen3(config: ConfigFile) -> ModelSpec:
    """Qwen3: Qwen2 with QK norms in place of QKV biases."""
    return _dense(config, bias=config.attention_bias, qk_norm=rms_norm(config))


def declare_qwen3_vl(config: ConfigFile) -> ModelSpec:
    """Qwen3-VL: Qwen3 whose positions have axes; its images come from outside."""
    layer = LayerSpec(
        mixer=attention(
            config,
            bias=config.attention_bias,
            qk_norm=rms_norm(config),
            rotary=rotary_with_axes(config, interleaved=True),
        ),
        feed_forward=gated(config),
        norm=rms_norm(config),
    )
    return model(config, layer)


def _dense(config: ConfigFile, *, bias: bool = False, **changes: object) -> ModelSpec:
    norm = rms_norm(config)

    def layer(window: int | None) -> LayerSpec:
        mixer = attention(config, window=window, bias=bias, **changes)
        return LayerSpec(mixer=mixer, feed_forward=gated(config), norm=norm)

    return model(config, layers(_upper_windows(config), layer))


class _QwenMoeFields(ExpertFields, frozen=True, kw_only=True):
    moe_intermediate_size: Count
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] = ()


class _SharedFields(_QwenMoeFields, frozen=True, kw_only=True):
    shared_expert_intermediate_size: Count


class _Qwen2MoeFields(_SharedFields, frozen=True, kw_only=True):
    qkv_bias: bool = True


def declare_qwen2_moe(config: ConfigFile) -> ModelSpec:
    """Qwen2-MoE: Qwen2 with experts and a gated shared expert."""
    norm, fields = rms_norm(config), config.family_fields(_Qwen2MoeFields)

    def layer(kind: tuple[int | None, FeedForwardSpec]) -> LayerSpec:
        window, feed_forward = kind
        mixer = attention(config, window=window, qkv_bias=fields.qkv_bias)
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    blocks = _feed_forwards(config, fields, _with_shared_expert(config, fields))
    kinds = list(zip(_listed_windows(config), blocks, strict=True))
    return model(config, layers(kinds, layer))


def declare_qwen3_moe(config: ConfigFile) -> ModelSpec:
    """Qwen3-MoE: Qwen3 with experts in place of feed-forward blocks."""
    fields = config.family_fields(_QwenMoeFields)
    window = config.sliding_window if config.use_sliding_window else None
    return _sparse(config, fields, _moe(config, fields), window=window)


def declare_qwen3_vl_moe(config: ConfigFile) -> ModelSpec:
    """Qwen3-VL with experts: Qwen3-MoE whose positions have axes; its images come from outside."""
    fields = config.family_fields(_QwenMoeFields)
    experts = fields.experts(config, fields.moe_intermediate_size, names=StackedExperts())
    sparse = MoeSpec(routing=fields.routing(renormalised=True), experts=experts)
    return _sparse(config, fields, sparse, rotary=rotary_with_axes(config, interleaved=True))


def _sparse(
    config: ConfigFile,
    fields: _QwenMoeFields,
    sparse: MoeSpec,
    *,
    window: int | None = None,
    **changes: object,
) -> ModelSpec:
    norm = rms_norm(config)
    mixer = attention(config, window=window, bias=config.attention_bias, qk_norm=norm, **changes)

    def layer(feed_forward: FeedForwardSpec) -> LayerSpec:
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    return model(config, layers(_feed_forwards(config, fields, sparse), layer))


class _Qwen3NextFields(msgspec.Struct, frozen=True, kw_only=True):
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: Count = 4
    num_experts: int = 0

    def delta(self, config: ConfigFile, *, separate: bool) -> GatedDeltaSpec:
        return GatedDeltaSpec(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_size=self.linear_key_head_dim,
            value_size=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            norm_eps=config.rms_norm_eps,
            separate=separate,
        )


def declare_qwen3_next(config: ConfigFile) -> ModelSpec:
    """Qwen3-Next: three gated delta net layers to one of gated attention."""
    blocks: tuple[FeedForwardSpec, ...] = (gated(config),) * config.num_hidden_layers
    if config.family_fields(_Qwen3NextFields).num_experts:
        sparse = config.family_fields(_SharedFields)
        blocks = _feed_forwards(config, sparse, _with_shared_expert(config, sparse))
    return _hybrid(config, blocks)


def declare_qwen3_5(config: ConfigFile) -> ModelSpec:
    """Qwen3.5: Qwen3-Next with dense blocks, and tensors of its own for each projection."""
    return _qwen3_5(config, gated(config))


def declare_qwen3_5_vl(config: ConfigFile) -> ModelSpec:
    """Qwen3.5 whose positions have axes; its images come from outside."""
    return _qwen3_5(config, gated(config), rotary=rotary_with_axes(config, interleaved=True))


def declare_qwen3_5_moe(config: ConfigFile) -> ModelSpec:
    """Qwen3.5 with experts and a gated shared expert in every layer."""
    return _qwen3_5(config, _qwen3_5_experts(config))


def declare_qwen3_5_vl_moe(config: ConfigFile) -> ModelSpec:
    """Qwen3.5 with experts whose positions have axes; its images come from outside."""
    rotary = rotary_with_axes(config, interleaved=True)
    return _qwen3_5(config, _qwen3_5_experts(config), rotary=rotary)


def _qwen3_5(config: ConfigFile, block: FeedForwardSpec, **changes: object) -> ModelSpec:
    return _hybrid(config, (block,) * config.num_hidden_layers, separate=True, **changes)


def _qwen3_5_experts(config: ConfigFile) -> MoeSpec:
    fields = config.family_fields(_SharedFields)
    sparse = _with_shared_expert(config, fields)
    return replace(sparse, routing=fields.routing(renormalised=True))


def _hybrid(
    config: ConfigFile,
    blocks: tuple[FeedForwardSpec, ...],
    *,
    separate: bool = False,
    **changes: object,
) -> ModelSpec:
    """Gated delta net layers beside those of gated attention, to which the changes are made."""
    fields, norm = config.family_fields(_Qwen3NextFields), one_plus_norm(config)
    every = fields.full_attention_interval
    mixers = config.layer_types or tuple(
        "linear_attention" if (index + 1) % every else "full_attention"
        for index in range(config.num_hidden_layers)
    )

    def layer(kind: tuple[str, FeedForwardSpec]) -> LayerSpec:
        mixer, feed_forward = kind
        specs: dict[str, MixerSpec] = {
            "linear_attention": fields.delta(config, separate=separate),
            "full_attention": attention(
                config,
                window=None,
                bias=config.attention_bias,
                gated=True,
                qk_norm=norm,
                **changes,
            ),
        }
        if mixer not in specs:
            raise ModelLoadError(f"config.json: layer_types: {mixer!r} is not supported")
        return LayerSpec(mixer=specs[mixer], feed_forward=feed_forward, norm=norm)

    return model(config, layers(list(zip(mixers, blocks, strict=True)), layer))


def _upper_windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Full attention in every layer, unless the config enables a window for the upper ones."""
    if not config.use_sliding_window or config.sliding_window is None:
        return (None,) * config.num_hidden_layers
    if config.layer_types is not None:
        return config.windows()
    return tuple(
        config.sliding_window if index >= config.max_window_layers else None
        for index in range(config.num_hidden_layers)
    )


def _listed_windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Full attention in every layer, unless `layer_types` lists windows."""
    if not config.use_sliding_window:
        return (None,) * config.num_hidden_layers
    if config.layer_types is None:
        raise ModelLoadError(
            "config.json: use_sliding_window: layer_types must list the layers with windows"
        )
    return config.windows()


def _moe(config: ConfigFile, fields: _QwenMoeFields) -> MoeSpec:
    return MoeSpec(
        routing=fields.routing(renormalised=fields.norm_topk_prob),
        experts=fields.experts(config, fields.moe_intermediate_size),
    )


def _with_shared_expert(config: ConfigFile, fields: _SharedFields) -> MoeSpec:
    """Experts and a shared expert, whose output is scaled by a gate."""
    shared = gated(
        config,
        width=fields.shared_expert_intermediate_size,
        gate="mlp.shared_expert.gate_proj",
        up="mlp.shared_expert.up_proj",
        down="mlp.shared_expert.down_proj",
    )
    return replace(_moe(config, fields), shared=shared, shared_gate="mlp.shared_expert_gate")


def _feed_forwards(
    config: ConfigFile, fields: _QwenMoeFields, sparse: MoeSpec
) -> tuple[FeedForwardSpec, ...]:
    """Experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    dense = gated(config)
    return tuple(
        dense
        if index in fields.mlp_only_layers or (index + 1) % fields.decoder_sparse_step
        else sparse
        for index in range(config.num_hidden_layers)
    )


QWEN2 = ModelFamily("qwen2", declare_qwen2)
QWEN2_VL = ModelFamily("qwen2-vl", declare_qwen2_vl)
QWEN3 = ModelFamily("qwen3", declare_qwen3)
QWEN3_VL = ModelFamily("qwen3-vl", declare_qwen3_vl)
QWEN3_VL_MOE = ModelFamily("qwen3-vl-moe", declare_qwen3_vl_moe)
QWEN2_MOE = ModelFamily("qwen2-moe", declare_qwen2_moe)
QWEN3_MOE = ModelFamily("qwen3-moe", declare_qwen3_moe)
QWEN3_NEXT = ModelFamily("qwen3-next", declare_qwen3_next)
QWEN3_5 = ModelFamily("qwen3.5", declare_qwen3_5)
QWEN3_5_MOE = ModelFamily("qwen3.5-moe", declare_qwen3_5_moe)
QWEN3_5_VL = ModelFamily("qwen3.5-vl", declare_qwen3_5_vl)
QWEN3_5_VL_MOE = ModelFamily("qwen3.5-vl-moe", declare_qwen3_5_vl_moe)
