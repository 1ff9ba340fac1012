"""Qwen2 and Qwen2.5: Llama's shape with biases on queries, keys and values only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.model_worker.model.llama_parts import attention, gated, layers, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Full attention in every layer, unless the config enables a window for the upper ones."""
    if not config.use_sliding_window or config.sliding_window is None:
        return (None,) * config.num_hidden_layers
    if config.layer_types is not None:
        return config.windows()
    return tuple(
        config.sliding_window if index >= config.max_window_layers else None
        for index in range(config.num_hidden_layers)
    )


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ only in their window."""
    norm = rms_norm(config)

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            mixer=replace(attention(config, window=window), qkv_bias=True),
            feed_forward=gated(config),
            norm=norm,
        )

    return model("qwen2", config, layers(windows(config), layer), norm)


QWEN2 = ModelFamily(name="qwen2", declare=declare, features=("biases", "window"))
