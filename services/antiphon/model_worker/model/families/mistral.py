"""Mistral and Mixtral."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.layers.experts import SeparateExperts
from antiphon.layers.moe import MoeSpec
from antiphon.model_worker.model.llama_parts import (
    Count,
    ExpertFields,
    attention,
    classifier,
    embedding_model,
    gated,
    model,
    rms_norm,
)
from antiphon.model_worker.model.spec import LayerSpec, ModelFamily

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec

EXPERTS = SeparateExperts(
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def declare_mistral(config: ConfigFile) -> ModelSpec:
    """Mistral: Llama's shape, with a window in every layer in its first versions."""
    mixer = attention(config, window=config.sliding_window)
    layer = LayerSpec(mixer=mixer, feed_forward=gated(config), norm=rms_norm(config))
    return model(config, layer)


class _MixtralFields(ExpertFields, frozen=True, kw_only=True):
    num_experts_per_tok: Count = 2


def declare_mixtral(config: ConfigFile) -> ModelSpec:
    """Mixtral: Mistral with experts in place of each feed-forward block."""
    fields = config.family_fields(_MixtralFields)
    layer = LayerSpec(
        mixer=attention(config, window=config.sliding_window),
        feed_forward=MoeSpec(
            routing=fields.routing(renormalised=True),
            experts=fields.experts(config, config.width, names=EXPERTS),
            router="block_sparse_moe.gate",
        ),
        norm=rms_norm(config),
    )
    return model(config, layer)


MISTRAL = ModelFamily("mistral", declare_mistral, ("window",))
MIXTRAL = ModelFamily("mixtral", declare_mixtral, ("normalised top-k weights", "window"))
MISTRAL_CLASSIFIER = classifier(MISTRAL)
MISTRAL_BASE = embedding_model(MISTRAL)
