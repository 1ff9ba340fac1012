"""Qwen3: Qwen2 with QK norms in place of QKV biases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.model_worker.model.families.qwen2 import windows
from antiphon.model_worker.model.llama_parts import attention, gated, layers, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def declare(config: ConfigFile) -> ModelSpec:
    """Layers differ only in their window."""
    norm, bias = rms_norm(config), config.attention_bias

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            mixer=replace(
                attention(config, window=window), qkv_bias=bias, out_bias=bias, qk_norm=norm
            ),
            feed_forward=gated(config),
            norm=norm,
        )

    return model("qwen3", config, layers(windows(config), layer), norm)


QWEN3 = ModelFamily(name="qwen3", declare=declare, features=("qk-norm", "biases", "window"))
