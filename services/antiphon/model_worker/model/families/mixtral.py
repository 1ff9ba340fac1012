"""Mixtral: Mistral with experts in place of each feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.experts import ExpertsSpec, SeparateExperts
from antiphon.layers.moe import MoeSpec
from antiphon.model_worker.model.llama_parts import attention, model, rms_norm
from antiphon.model_worker.model.moe import Count, check_routing
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


class MixtralFields(msgspec.Struct, frozen=True, kw_only=True):
    """Config fields of this family."""

    num_experts: Count
    num_experts_per_tok: Count = 2


def declare(config: ConfigFile) -> ModelSpec:
    """All layers are equal."""
    norm, fields = rms_norm(config), config.family_fields(MixtralFields)
    check_routing(fields.num_experts, fields.num_experts_per_tok)
    layer = LayerSpec(
        mixer=attention(config, window=config.sliding_window),
        feed_forward=MoeSpec(
            routing=RoutingSpec(top_k=fields.num_experts_per_tok, renormalised=True),
            experts=ExpertsSpec(
                count=fields.num_experts,
                width=config.width,
                activation=config.activation,
                names=SeparateExperts(
                    gate="block_sparse_moe.experts.{}.w1",
                    up="block_sparse_moe.experts.{}.w3",
                    down="block_sparse_moe.experts.{}.w2",
                ),
            ),
            router="block_sparse_moe.gate",
        ),
        norm=norm,
    )
    return model("mixtral", config, (layer,) * config.num_hidden_layers, norm)


MIXTRAL = ModelFamily(
    name="mixtral", declare=declare, features=("normalised top-k weights", "window")
)
