"""StarCoder2: layer norms, plain feed-forward blocks, biases everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.mlp import PlainMlpSpec
from antiphon.layers.norm import NormSpec
from antiphon.model_worker.model.llama_parts import attention, model
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class _Starcoder2Fields(msgspec.Struct, frozen=True):
    use_bias: bool = True


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    bias = config.family_fields(_Starcoder2Fields).use_bias
    norm = NormSpec(kind="layer", eps=config.layer_norm_eps, bias=True)
    mixer = attention(config, window=config.sliding_window)
    layer = LayerSpec(
        mixer=replace(mixer, qkv_bias=bias, out_bias=bias),
        feed_forward=PlainMlpSpec(
            width=config.width,
            activation=config.activation,
            bias=bias,
            up="mlp.c_fc",
            down="mlp.c_proj",
        ),
        norm=norm,
    )
    return model("starcoder2", config, (layer,) * config.num_hidden_layers, norm)


STARCODER2 = ModelFamily(
    name="starcoder2", declare=declare, features=("biases", "layer norms", "tanh GELU", "window")
)
