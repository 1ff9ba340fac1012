"""Gemma 1 to 4, and EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.kernels.rotary import RotarySpec
from antiphon.layers.attention import AttentionNames
from antiphon.layers.moe import MoeSpec, SeparateExperts
from antiphon.layers.norm import NormSpec
from antiphon.layers.per_layer_embedding import PerLayerEmbeddingSpec, PerLayerInputSpec
from antiphon.model_card.config_json import Task, task_of, unused_prefixes
from antiphon.model_card.layer_heads import HeadFields, LayerHeads, unread_keys
from antiphon.model_worker.model.config_file import RopeField
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import (
    ExpertFields,
    attention,
    gated,
    layers,
    model,
    one_plus_norm,
)
from antiphon.model_worker.model.spec import (
    SANDWICH,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.layers.attention import AttentionSpec
    from antiphon.layers.mlp import GatedMlpSpec
    from antiphon.model_worker.model.config_file import ConfigFile


def declare_gemma(config: ConfigFile) -> ModelSpec:
    """Gemma: norms with 1 + weight, a GELU (tanh) gate, a scaled embedding."""
    layer = LayerSpec(
        mixer=attention(config, bias=config.attention_bias),
        feed_forward=_tanh_gated(config),
        norm=one_plus_norm(config),
    )
    return model(config, layer, embedding=scaled_embedding(config))


class _Gemma2Fields(msgspec.Struct, frozen=True):
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


def declare_gemma2(config: ConfigFile) -> ModelSpec:
    """Gemma 2: Gemma with sandwich norms, soft-capped scores and logits, and local layers."""
    alternating = (config.sliding_window, None) * config.num_hidden_layers
    windows = config.windows() if config.layer_types else alternating[: config.num_hidden_layers]
    return _sandwiched(config, windows, lambda window: _attention(config, window))


class _Gemma3Fields(msgspec.Struct, frozen=True):
    sliding_window_pattern: int = 6
    rope_local_base_freq: float = 10_000.0
    use_bidirectional_attention: bool = False


def declare_gemma3(config: ConfigFile) -> ModelSpec:
    """Gemma 3 (text): Gemma 2 with QK norms for soft caps, and separate RoPE in local layers.

    EmbeddingGemma is its bidirectional variant.
    """
    fields, norm = config.family_fields(_Gemma3Fields), one_plus_norm(config)
    both_ways, every = fields.use_bidirectional_attention, fields.sliding_window_pattern
    if both_ways:
        if task_of(config.architectures[0]) is Task.GENERATE:
            raise ModelLoadError(
                "config.json: use_bidirectional_attention: such a model does not generate text"
            )
        # Half of the window on each side, and the token itself.
        window = None if config.sliding_window is None else config.sliding_window // 2 + 1
        config = msgspec.structs.replace(config, sliding_window=window)
    windows = (
        config.windows()
        if config.layer_types
        else tuple(
            config.sliding_window if (index + 1) % every else None
            for index in range(config.num_hidden_layers)
        )
    )

    def mixer(window: int | None) -> AttentionSpec:
        plain = _attention(config, window, qk_norm=norm, causal=not both_ways)
        if window is None or (config.rope_parameters and config.rope_parameters.sliding_attention):
            return plain
        return replace(plain, rotary=RotarySpec(config.head_size, fields.rope_local_base_freq))

    return _sandwiched(config, windows, mixer)


_GEMMA4_ROPE = RopeField(
    full_attention=RopeField(
        rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0
    ),
    sliding_attention=RopeField(rope_theta=10_000.0),
)
_HEAD_FIELDS = {"head_dim", "num_key_value_heads"}
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _Gemma4Fields(HeadFields, kw_only=True):
    use_bidirectional_attention: str | None = None
    hidden_size_per_layer_input: Count = 0
    vocab_size_per_layer_input: Count = 0
    pad_token_id: int = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False


class _Gemma4ExpertFields(ExpertFields, frozen=True, kw_only=True):
    moe_intermediate_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]


_EXPERTS = SeparateExperts(
    gate="experts.{}.gate_proj", up="experts.{}.up_proj", down="experts.{}.down_proj"
)
_WITH_EXPERTS = msgspec.structs.replace(
    SANDWICH,
    after_first="post_feedforward_layernorm_1",
    after_second="post_feedforward_layernorm_2",
)
"""Norms around a dense block and experts, and of the sum of what both make."""


class _LayerFields(msgspec.Struct, frozen=True):
    per_layer_config: dict[str, dict[str, object]] = {}


def declare_gemma4(config: ConfigFile) -> ModelSpec:
    """Gemma 4 (text): Gemma 3 with larger heads in global layers, and inputs for each layer."""
    fields = config.family_fields(_Gemma4Fields)
    _check_gemma4(config, fields)
    heads, norm = fields.layers(), NormSpec(kind="rms_wide", eps=config.rms_norm_eps)
    windows = msgspec.structs.replace(config, layer_types=fields.types()).windows()
    own, inputs = fields.hidden_size_per_layer_input, None
    if own:
        inputs = PerLayerInputSpec(size=own, activation=config.activation, norm=norm)
    experts = _gemma4_experts(config, norm) if fields.enable_moe_block else None

    def layer(kind: tuple[int | None, LayerHeads]) -> LayerSpec:
        window, of_layer = kind
        wide = fields.use_double_wide_mlp and of_layer.kv_layer is not None
        return LayerSpec(
            mixer=_gemma4_attention(config, window, of_layer, norm),
            feed_forward=gated(config, width=config.width * (2 if wide else 1)),
            second=experts,
            norm=norm,
            norms=SANDWICH if experts is None else _WITH_EXPERTS,
            per_layer_input=inputs,
            scalar="layer_scalar",
        )

    cap = config.family_fields(_Gemma2Fields).final_logit_softcapping
    return model(
        config,
        layers(tuple(zip(windows, heads, strict=True)), layer),
        embedding=scaled_embedding(config),
        head=HeadSpec(tied=config.tie_word_embeddings, softcap=cap),
        passed_over=(*unused_prefixes(config.architectures[0]), *unread_keys(heads)),
        per_layer_embedding=None if inputs is None else _per_layer_embedding(fields, norm),
    )


def _check_gemma4(config: ConfigFile, fields: _Gemma4Fields) -> None:
    if (both_ways := fields.use_bidirectional_attention) not in (None, "vision"):
        raise ModelLoadError(
            f"config.json: use_bidirectional_attention = {both_ways!r} is not supported: texts are"
            " read from left to right"
        )
    for layer, said in config.family_fields(_LayerFields).per_layer_config.items():
        if others := sorted(said.keys() - _HEAD_FIELDS):
            raise ModelLoadError(
                f"config.json: per_layer_config: {layer}: {', '.join(others)}: not supported"
            )
    if not fields.hidden_size_per_layer_input:
        return
    rows = fields.vocab_size_per_layer_input
    if rows < config.vocab_size or not 0 <= fields.pad_token_id < rows:
        raise ModelLoadError(
            f"config.json: vocab_size_per_layer_input = {rows}: must be at least vocab_size ="
            f" {config.vocab_size}, and above pad_token_id = {fields.pad_token_id}"
        )


def _gemma4_attention(
    config: ConfigFile, window: int | None, heads: LayerHeads, norm: NormSpec
) -> AttentionSpec:
    """Attention without a scale; its keys and values are maybe those of another layer."""
    own = msgspec.structs.replace(
        config,
        head_dim=heads.head_size,
        num_key_value_heads=heads.kv_heads,
        rope_parameters=config.rope_parameters or _GEMMA4_ROPE,
    )
    own.check()
    names, shared = AttentionNames(), heads.kv_layer is not None
    return attention(
        own,
        window=window,
        bias=config.attention_bias,
        scale=1.0,
        qk_norm=norm,
        value_norm=None if shared else replace(norm, affine=False),
        kv_layer=heads.kv_layer,
        image_ahead=window is not None,
        names=replace(names, value=names.key) if heads.values_are_keys else names,
    )


def _gemma4_experts(config: ConfigFile, norm: NormSpec) -> MoeSpec:
    """Experts beside the dense block, whose router normalises what it reads by itself."""
    fields = config.family_fields(_Gemma4ExpertFields)
    return MoeSpec(
        routing=fields.routing(renormalised=True),
        experts=fields.experts(config, fields.moe_intermediate_size, names=_EXPERTS),
        router="router.proj",
        router_norm=replace(norm, affine=False),
        router_scale="router.scale",
        router_factor=config.hidden_size**-0.5,
        expert_scale="router.per_expert_scale",
        experts_norm=norm,
        experts_norm_name="pre_feedforward_layernorm_2",
    )


def _per_layer_embedding(fields: _Gemma4Fields, norm: NormSpec) -> PerLayerEmbeddingSpec:
    return PerLayerEmbeddingSpec(
        size=fields.hidden_size_per_layer_input,
        vocabulary=fields.vocab_size_per_layer_input,
        media_token=fields.pad_token_id,
        norm=norm,
    )


def _attention(config: ConfigFile, window: int | None, **changes: object) -> AttentionSpec:
    """Attention with the scale and the soft cap of Gemma 2 and later."""
    caps = config.family_fields(_Gemma2Fields)
    return attention(
        config,
        window=window,
        bias=config.attention_bias,
        scale=caps.query_pre_attn_scalar**-0.5,
        softcap=caps.attn_logit_softcapping,
        **changes,
    )


def _tanh_gated(config: ConfigFile) -> GatedMlpSpec:
    # `gelu` in the first configs meant the tanh approximation.
    activation = "gelu_tanh" if config.activation == "gelu" else config.activation
    return gated(config, activation=activation)


def scaled_embedding(config: ConfigFile) -> EmbeddingSpec:
    return EmbeddingSpec(scale=config.hidden_size**0.5)


def _sandwiched(
    config: ConfigFile,
    windows: tuple[int | None, ...],
    mixer: Callable[[int | None], AttentionSpec],
) -> ModelSpec:
    """Layers with norms around both blocks, and a soft-capped head."""
    feed_forward, norm = _tanh_gated(config), one_plus_norm(config)

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(mixer=mixer(window), feed_forward=feed_forward, norm=norm, norms=SANDWICH)

    cap = config.family_fields(_Gemma2Fields).final_logit_softcapping
    return model(
        config,
        layers(windows, layer),
        embedding=scaled_embedding(config),
        head=HeadSpec(tied=config.tie_word_embeddings, softcap=cap),
    )


GEMMA = ModelFamily("gemma", declare_gemma)
GEMMA2 = ModelFamily("gemma2", declare_gemma2)
GEMMA3 = ModelFamily("gemma3", declare_gemma3)
GEMMA4 = ModelFamily("gemma4", declare_gemma4)
