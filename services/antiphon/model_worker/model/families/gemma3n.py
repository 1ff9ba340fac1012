"""Gemma 3n: the text model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.kernels.rotary import RotarySpec
from antiphon.layers.alternating_updates import AlternatingUpdatesSpec, StreamsSpec
from antiphon.layers.laurel import LaurelSpec
from antiphon.layers.norm import NormSpec
from antiphon.layers.per_layer_embedding import PerLayerEmbeddingSpec, PerLayerInputSpec
from antiphon.model_card.config_json import unused_prefixes
from antiphon.model_card.layer_heads import HeadFields, LayerHeads, Size, unread_keys
from antiphon.model_worker.model.errors import ModelLoadError, UnsupportedVariant
from antiphon.model_worker.model.families.gemma import scaled_embedding
from antiphon.model_worker.model.llama_parts import attention, gated, layers, model
from antiphon.model_worker.model.spec import (
    SANDWICH,
    HeadSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
)

if TYPE_CHECKING:
    from antiphon.layers.attention import AttentionSpec
    from antiphon.model_worker.model.config_file import ConfigFile

SPARSE_LAYERS, SPARSITY = 10, 0.95
"""The first layers are sparse, by this, where there are more of them and a config does not say."""
Positive = Annotated[float, Meta(gt=0)]


class _Gemma3nFields(HeadFields, kw_only=True):
    hidden_size_per_layer_input: Size
    vocab_size_per_layer_input: Size
    laurel_rank: Size
    altup_num_inputs: Size
    altup_active_idx: Annotated[int, Meta(ge=0)] = 0
    altup_correct_scale: bool = True
    activation_sparsity_pattern: tuple[Annotated[float, Meta(ge=0, lt=1)], ...] | None = None
    final_logit_softcapping: Positive | None = None
    rope_local_base_freq: Positive = 10_000.0

    def sparsity(self) -> tuple[float, ...]:
        """The part of the gate's outputs that become zero, in each layer."""
        count = self.num_hidden_layers
        if self.activation_sparsity_pattern is None:
            sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
            return (SPARSITY,) * sparse + (0.0,) * (count - sparse)
        if (given := len(self.activation_sparsity_pattern)) != count:
            raise ModelLoadError(
                f"config.json: activation_sparsity_pattern has {given} values for {count} layers"
            )
        return self.activation_sparsity_pattern


def declare_gemma3n(config: ConfigFile) -> ModelSpec:
    """Gemma 3n (text): several residual streams, of which a layer computes one; sparse gates."""
    fields = config.family_fields(_Gemma3nFields)
    if not fields.altup_correct_scale:
        raise UnsupportedVariant("config.json: altup_correct_scale = false is not supported")
    if fields.altup_active_idx >= fields.altup_num_inputs:
        raise ModelLoadError(
            f"config.json: altup_active_idx = {fields.altup_active_idx}: must be below"
            f" altup_num_inputs = {fields.altup_num_inputs}"
        )
    heads, norm = fields.layers(), NormSpec(kind="rms_wide", eps=config.rms_norm_eps)
    windows = msgspec.structs.replace(config, layer_types=fields.types()).windows()
    updates = _updates(config, fields, norm)

    def layer(kind: tuple[int | None, LayerHeads, int, float]) -> LayerSpec:
        window, of_layer, width, sparsity = kind
        own = msgspec.structs.replace(config, intermediate_size=width)
        return LayerSpec(
            mixer=_attention(config, fields, window, of_layer, norm),
            feed_forward=gated(own, sparsity=sparsity),
            norm=norm,
            norms=SANDWICH,
            laurel=LaurelSpec(rank=fields.laurel_rank, norm=norm),
            updates=updates,
        )

    kinds = zip(windows, heads, config.widths, fields.sparsity(), strict=True)
    return model(
        config,
        layers(tuple(kinds), layer),
        embedding=scaled_embedding(config),
        head=HeadSpec(tied=config.tie_word_embeddings, softcap=fields.final_logit_softcapping),
        passed_over=(*unused_prefixes(config.architectures[0]), *unread_keys(heads)),
        per_layer_embedding=PerLayerEmbeddingSpec(
            size=fields.hidden_size_per_layer_input,
            vocabulary=fields.vocab_size_per_layer_input,
            media_token=0,
            norm=norm,
        ),
        streams=StreamsSpec(count=fields.altup_num_inputs),
    )


def _updates(config: ConfigFile, fields: _Gemma3nFields, norm: NormSpec) -> AlternatingUpdatesSpec:
    return AlternatingUpdatesSpec(
        streams=fields.altup_num_inputs,
        active=fields.altup_active_idx,
        norm=norm,
        per_layer_input=PerLayerInputSpec(
            size=fields.hidden_size_per_layer_input, activation=config.activation, norm=norm
        ),
    )


def _attention(
    config: ConfigFile,
    fields: _Gemma3nFields,
    window: int | None,
    heads: LayerHeads,
    norm: NormSpec,
) -> AttentionSpec:
    """Attention without a scale; its keys and values are maybe those of another layer."""
    shared, rope = heads.kv_layer is not None, config.rope_parameters
    spec = attention(
        config,
        window=window,
        bias=config.attention_bias,
        scale=1.0,
        qk_norm=norm,
        value_norm=None if shared else replace(norm, affine=False),
        kv_layer=heads.kv_layer,
    )
    if window is None or (rope is not None and rope.sliding_attention is not None):
        return spec
    return replace(spec, rotary=RotarySpec(config.head_size, fields.rope_local_base_freq))


GEMMA3N = ModelFamily("gemma3n", declare_gemma3n)
