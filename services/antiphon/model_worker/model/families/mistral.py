"""Mistral: Llama's shape, with a window in every layer in its first versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.model.llama_parts import attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    norm = rms_norm(config)
    mixer = attention(config, window=config.sliding_window)
    layer = LayerSpec(mixer=mixer, feed_forward=gated(config), norm=norm)
    return model("mistral", config, (layer,) * config.num_hidden_layers, norm)


MISTRAL = ModelFamily(name="mistral", declare=declare, features=("window",))
