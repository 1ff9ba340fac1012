"""Decoders that judge a whole text, or stand for it by its last token: no logits, another head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.score import DenseSpec, ScoreSpec
from antiphon.model_worker.model.families import gemma, gemma2, gemma3, llama, mistral, qwen2, qwen3
from antiphon.model_worker.model.spec import Family

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def classifying(family: Family) -> Family:
    """The family's models under a linear that scores labels by the last token."""

    def declare(config: ConfigFile) -> ModelSpec:
        return _headed(family, config, ScoreSpec(labels=config.labels))

    return _made(family, declare, "last token")


def rewarding(family: Family) -> Family:
    """The family's models under two linears that give the last token one reward."""

    def declare(config: ConfigFile) -> ModelSpec:
        dense = DenseSpec(name="score.0", activation="relu")
        return _headed(family, config, ScoreSpec(labels=1, name="score.2", bias=True, dense=dense))

    return _made(
        family,
        declare,
        *("last token", "dense layer", "activation of the dense layer", "biased head"),
    )


def embedding(family: Family, *features: str) -> Family:
    """The family's models without a head; some of them have features that no other has."""

    def declare(config: ConfigFile) -> ModelSpec:
        return _headed(family, config, None)

    return _made(family, declare, *features)


def _made(family: Family, declare: Callable[[ConfigFile], ModelSpec], *features: str) -> Family:
    return Family(name=family.name, declare=declare, features=features, layers_of=family)


def _headed(family: Family, config: ConfigFile, head: ScoreSpec | None) -> ModelSpec:
    spec = family.declare(config)
    # A model that was saved without a head names its tensors from its layers on.
    pooling = "last" if spec.causal else "mean"
    return msgspec.structs.replace(spec, head=head, pooling=pooling, prefix="model.")


GEMMA = classifying(gemma.GEMMA)
GEMMA2 = classifying(gemma2.GEMMA2)
GEMMA3 = classifying(gemma3.GEMMA3)
LLAMA = classifying(llama.LLAMA)
MISTRAL = classifying(mistral.MISTRAL)
QWEN2 = classifying(qwen2.QWEN2)
QWEN3 = classifying(qwen3.QWEN3)
QWEN2_REWARD = rewarding(qwen2.QWEN2)
QWEN3_REWARD = rewarding(qwen3.QWEN3)
GEMMA2_BASE = embedding(gemma2.GEMMA2)
GEMMA3_BASE = embedding(gemma3.GEMMA3, "attention both ways")
LLAMA_BASE = embedding(llama.LLAMA)
MISTRAL_BASE = embedding(mistral.MISTRAL)
QWEN2_BASE = embedding(qwen2.QWEN2)
QWEN3_BASE = embedding(qwen3.QWEN3)
