"""Gemma 2: Gemma with norms around both blocks, soft-capped scores and logits, and local layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.model.families.gemma import one_plus, scaled, tanh_gated
from antiphon.model_worker.model.llama_parts import attention, layers, model
from antiphon.model_worker.model.spec import SANDWICH, HeadSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.layers.attention import AttentionSpec
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class Caps(msgspec.Struct, frozen=True):
    """The scale of scores, and the soft caps of scores and logits."""

    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


def declare(config: ConfigFile) -> ModelSpec:
    """Local and global layers alternate, unless the config sets otherwise."""
    window = config.sliding_window
    alternating = (window, None) * config.num_hidden_layers
    windows = config.windows() if config.layer_types else alternating[: config.num_hidden_layers]
    norm = one_plus(config)

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            mixer=capped(config, attention(config, window=window)),
            feed_forward=tanh_gated(config),
            norm=norm,
            norms=SANDWICH,
        )

    return finished("gemma2", config, layers(windows, layer))


def capped(config: ConfigFile, mixer: AttentionSpec) -> AttentionSpec:
    """Attention with this family's scale and soft cap."""
    caps, bias = config.family_fields(Caps), config.attention_bias
    return replace(
        mixer,
        scale=caps.query_pre_attn_scalar**-0.5,
        softcap=caps.attn_logit_softcapping,
        qkv_bias=bias,
        out_bias=bias,
    )


def finished(family: str, config: ConfigFile, stack: tuple[LayerSpec, ...]) -> ModelSpec:
    """A model of these layers with a soft-capped head."""
    spec = scaled(model(family, config, stack, one_plus(config)))
    cap = config.family_fields(Caps).final_logit_softcapping
    head = HeadSpec(tied=config.tie_word_embeddings, softcap=cap)
    return msgspec.structs.replace(spec, head=head)


GEMMA2 = ModelFamily(
    name="gemma2",
    declare=declare,
    features=(
        *("norms of 1 + weight", "tanh GELU", "scaled embedding", "sandwich norms"),
        *("capped scores", "capped logits", "attention scale", "window"),
    ),
)
