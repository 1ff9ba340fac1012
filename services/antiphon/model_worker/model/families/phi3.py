"""Phi 3, 3.5 and 4: Llama's shape with fused linears and LongRoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.layers.attention import AttentionNames
from antiphon.model_worker.model.llama_parts import attention, gated, model, rms_norm
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    norm = rms_norm(config)
    layer = LayerSpec(
        mixer=replace(
            attention(config, window=config.sliding_window),
            names=AttentionNames(query=QKV, key=QKV, value=QKV),
        ),
        feed_forward=replace(gated(config), gate=GATE_UP, up=GATE_UP),
        norm=norm,
    )
    return model("phi3", config, (layer,) * config.num_hidden_layers, norm)


PHI3 = ModelFamily(
    name="phi3", declare=declare, features=("partial RoPE", "rope scaling", "window")
)
