"""Building blocks of mixture-of-experts families.

A family maps the field names of its config to these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.experts import ExpertsSpec
from antiphon.layers.mlp import GatedMlpSpec
from antiphon.layers.moe import MoeSpec
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import FeedForwardSpec

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class DeepseekMoeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The config fields of DeepSeek's models and of families that adopted them.

    The fields that decide routing have no default: the defaults differ between classes of
        transformers.
    """

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    n_shared_experts: int | None = None
    first_k_dense_replace: int
    moe_layer_freq: int = 1
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int = 0


class QwenMoeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The config fields of Qwen's models."""

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] = ()

    def routing(self) -> RoutingSpec:
        """Routing by a softmax over all experts.

        Raises:
            ModelLoadError: There are fewer experts than each token selects.
        """
        check_routing(self.num_experts, self.num_experts_per_tok)
        return RoutingSpec(top_k=self.num_experts_per_tok, renormalised=self.norm_topk_prob)

    def experts(self, config: ConfigFile) -> ExpertsSpec:
        """Gated experts without biases."""
        return ExpertsSpec(
            count=self.num_experts,
            width=self.moe_intermediate_size,
            activation=config.activation,
        )


def check_routing(experts: int, chosen: int, groups: int = 1, groups_kept: int = 1) -> None:
    """Refuse impossible routing.

    Raises:
        ModelLoadError: Names the numbers.
    """
    if (
        experts % groups
        or not 0 < groups_kept <= groups
        or not 0 < chosen <= experts // groups * groups_kept
    ):
        raise ModelLoadError(
            f"config.json: no {chosen} of {experts} experts can be chosen"
            f" within {groups_kept} of {groups} groups"
        )


def sigmoid_moe(config: ConfigFile, fields: DeepseekMoeFields) -> MoeSpec:
    """Sigmoid scores with a balancing correction, expert groups, and a shared expert."""
    groups, groups_kept = fields.n_group or 1, fields.topk_group or 1
    check_routing(fields.num_experts, fields.num_experts_per_tok, groups, groups_kept)
    return MoeSpec(
        routing=RoutingSpec(
            top_k=fields.num_experts_per_tok,
            scoring="sigmoid",
            renormalised=fields.norm_topk_prob,
            factor=fields.routed_scaling_factor,
            groups=groups,
            groups_kept=groups_kept,
            group_best=2,
        ),
        experts=experts(config, fields),
        correction="mlp.gate.e_score_correction_bias",
        shared=shared(config, fields),
    )


def experts(config: ConfigFile, fields: DeepseekMoeFields) -> ExpertsSpec:
    """Gated experts without biases."""
    return ExpertsSpec(
        count=fields.num_experts,
        width=fields.moe_intermediate_size,
        activation=config.activation,
    )


def shared(config: ConfigFile, fields: DeepseekMoeFields) -> GatedMlpSpec | None:
    """The shared expert that processes all tokens: as wide as several routed experts."""
    if not fields.n_shared_experts:
        return None
    return GatedMlpSpec(
        width=fields.n_shared_experts * fields.moe_intermediate_size,
        activation=config.activation,
        gate="mlp.shared_experts.gate_proj",
        up="mlp.shared_experts.up_proj",
        down="mlp.shared_experts.down_proj",
    )


def feed_forwards(
    config: ConfigFile, fields: DeepseekMoeFields, dense: GatedMlpSpec, sparse: MoeSpec
) -> tuple[FeedForwardSpec, ...]:
    """Dense blocks in the first layers, experts in the others.

    Raises:
        ModelLoadError: The config asks for another pattern of layers.
    """
    if fields.moe_layer_freq != 1:
        raise ModelLoadError(
            f"config.json: moe_layer_freq {fields.moe_layer_freq} is not supported: use 1"
        )
    return tuple(
        dense if index < fields.first_k_dense_replace else sparse
        for index in range(config.num_hidden_layers)
    )


def sparse_by_step(
    config: ConfigFile, fields: QwenMoeFields, dense: GatedMlpSpec, sparse: MoeSpec
) -> tuple[FeedForwardSpec, ...]:
    """Experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    return tuple(
        dense
        if index in fields.mlp_only_layers or (index + 1) % fields.decoder_sparse_step
        else sparse
        for index in range(config.num_hidden_layers)
    )
