"""GLM-4 (0414): norms around both blocks, and interleaved RoPE on half of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.model_worker.model.llama_parts import attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily, Norms

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

GATE_UP = "mlp.gate_up_proj"
NORMS = Norms(
    before_mixer="input_layernorm",
    after_mixer="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    norm = rms_norm(config)
    layer = LayerSpec(
        mixer=replace(attention(config), qkv_bias=config.attention_bias, interleaved_rope=True),
        feed_forward=replace(gated(config), gate=GATE_UP, up=GATE_UP),
        norm=norm,
        norms=NORMS,
    )
    return model("glm4", config, (layer,) * config.num_hidden_layers, norm)


GLM4 = ModelFamily(
    name="glm4",
    declare=declare,
    features=("biases", "interleaved RoPE", "partial RoPE", "sandwich norms"),
)
