"""OLMo 2: norms only after both blocks, and QK norms over all heads of a token at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.llama_parts import attention, gated, model
from antiphon.model_worker.model.spec import POST, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    bias, norm = config.attention_bias, NormSpec(kind="rms_wide", eps=config.rms_norm_eps)
    layer = LayerSpec(
        mixer=replace(
            attention(config),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            qk_norm_over="token",
        ),
        feed_forward=gated(config),
        norm=norm,
        norms=POST,
    )
    return model("olmo2", config, (layer,) * config.num_hidden_layers, norm)


OLMO2 = ModelFamily(
    name="olmo2", declare=declare, features=("biases", "qk-norm", "output norms only")
)
