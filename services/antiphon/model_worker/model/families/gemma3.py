"""Gemma 3 (text): Gemma 2 with QK norms in place of soft caps, and separate RoPE for local layers.

EmbeddingGemma is its bidirectional variant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.rotary import RotarySpec
from antiphon.model_card.tasks import Task, task_of
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.families.gemma import one_plus, tanh_gated
from antiphon.model_worker.model.families.gemma2 import capped, finished
from antiphon.model_worker.model.llama_parts import attention, layers
from antiphon.model_worker.model.spec import SANDWICH, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.layers.attention import AttentionSpec
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class _Gemma3Fields(msgspec.Struct, frozen=True):
    sliding_window_pattern: int = 6
    rope_local_base_freq: float = 10_000.0
    use_bidirectional_attention: bool = False


def declare(config: ConfigFile) -> ModelSpec:
    """Five local layers for each global one, unless the config sets otherwise.

    Raises:
        ModelLoadError: A bidirectional model is to generate text.
    """
    every, both_ways = _sight(config)
    if both_ways:
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
    norm = one_plus(config)

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            mixer=replace(
                capped(config, _rotated(config, window)), qk_norm=norm, causal=not both_ways
            ),
            feed_forward=tanh_gated(config),
            norm=norm,
            norms=SANDWICH,
        )

    return finished("gemma3", config, layers(windows, layer))


def _sight(config: ConfigFile) -> tuple[int, bool]:
    """Every which layer is global, and whether attention is bidirectional."""
    fields = config.family_fields(_Gemma3Fields)
    both_ways = fields.use_bidirectional_attention
    if both_ways and task_of(config.architectures[0]) is Task.GENERATE:
        raise ModelLoadError(
            "config.json: use_bidirectional_attention: such a model does not generate text"
        )
    return fields.sliding_window_pattern, both_ways


def _rotated(config: ConfigFile, window: int | None) -> AttentionSpec:
    mixer = attention(config, window=window)
    if window is None or (config.rope_parameters and config.rope_parameters.sliding_attention):
        return mixer
    local = config.family_fields(_Gemma3Fields).rope_local_base_freq
    return replace(mixer, rotary=RotarySpec(config.head_size, local))


GEMMA3 = ModelFamily(
    name="gemma3",
    declare=declare,
    features=(
        *("norms of 1 + weight", "tanh GELU", "scaled embedding", "sandwich norms"),
        *("qk-norm", "attention scale", "window", "local RoPE", "rope scaling"),
    ),
)
