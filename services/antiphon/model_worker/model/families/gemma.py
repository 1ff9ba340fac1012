"""Gemma 1 to 3, and EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.rotary import RotarySpec
from antiphon.model_card.config_json import Task, task_of
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import (
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
    return model(config, layer, embedding=_scaled(config))


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


def _scaled(config: ConfigFile) -> EmbeddingSpec:
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
        embedding=_scaled(config),
        head=HeadSpec(tied=config.tie_word_embeddings, softcap=cap),
    )


GEMMA = ModelFamily("gemma", declare_gemma)
GEMMA2 = ModelFamily("gemma2", declare_gemma2)
GEMMA3 = ModelFamily("gemma3", declare_gemma3)
