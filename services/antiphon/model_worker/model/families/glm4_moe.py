"""GLM-4.5 and later with experts: RoPE on half of each head, routing as in DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.model.llama_parts import attention, gated, layers, model, rms_norm
from antiphon.model_worker.model.moe import DeepseekMoeFields, feed_forwards, sigmoid_moe
from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class Glm4MoeFields(DeepseekMoeFields, frozen=True, kw_only=True):
    """Config fields of this family."""

    use_qk_norm: bool = False


def declare(config: ConfigFile) -> ModelSpec:
    """Dense blocks in the first layers, experts in the others."""
    norm, fields = rms_norm(config), config.family_fields(Glm4MoeFields)
    mixer = replace(
        attention(config),
        qkv_bias=config.attention_bias,
        qk_norm=norm if fields.use_qk_norm else None,
    )

    def layer(feed_forward: FeedForwardSpec) -> LayerSpec:
        return LayerSpec(mixer=mixer, feed_forward=feed_forward, norm=norm)

    blocks = feed_forwards(config, fields, gated(config), sigmoid_moe(config, fields))
    spec = model("glm4-moe", config, layers(blocks, layer), norm)
    return msgspec.structs.replace(spec, further_layers=fields.num_nextn_predict_layers)


GLM4_MOE = ModelFamily(
    name="glm4-moe",
    declare=declare,
    features=(
        *("biases", "qk-norm", "partial RoPE", "shared expert", "scaling", "groups"),
        *("sigmoid scores", "correction", "groups by their two best", "normalised top-k weights"),
    ),
)
