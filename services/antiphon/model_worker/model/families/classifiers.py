"""Classifiers, reward and embedding models: decoders with another head, or with none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.layers.classification_head import ClassificationHeadSpec, DenseSpec
from antiphon.model_worker.model.families import gemma, gemma2, gemma3, llama, mistral, qwen2, qwen3
from antiphon.model_worker.model.spec import ModelFamily

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import ModelSpec


def classifier(family: ModelFamily) -> ModelFamily:
    """The family's models with a linear head that scores labels from the last token."""

    def declare(config: ConfigFile) -> ModelSpec:
        return _headed(family, config, ClassificationHeadSpec(labels=config.labels))

    return _family_of(family, declare, "last token")


def reward_model(family: ModelFamily) -> ModelFamily:
    """The family's models with two linears that compute a reward from the last token."""

    def declare(config: ConfigFile) -> ModelSpec:
        dense = DenseSpec(name="score.0", activation="relu")
        return _headed(
            family, config, ClassificationHeadSpec(labels=1, name="score.2", bias=True, dense=dense)
        )

    return _family_of(
        family,
        declare,
        *("last token", "dense layer", "activation of the dense layer", "biased head"),
    )


def embedding_model(family: ModelFamily, *features: str) -> ModelFamily:
    """The family's models without a head; some have features that no generative model has."""

    def declare(config: ConfigFile) -> ModelSpec:
        return _headed(family, config, None)

    return _family_of(family, declare, *features)


def _family_of(
    family: ModelFamily, declare: Callable[[ConfigFile], ModelSpec], *features: str
) -> ModelFamily:
    return ModelFamily(name=family.name, declare=declare, features=features, layers_of=family)


def _headed(
    family: ModelFamily, config: ConfigFile, head: ClassificationHeadSpec | None
) -> ModelSpec:
    spec = family.declare(config)
    # Checkpoints of a model saved without a head lack the `model.` prefix.
    pooling = "last" if spec.causal else "mean"
    return msgspec.structs.replace(spec, head=head, pooling=pooling, prefix="model.")


GEMMA = classifier(gemma.GEMMA)
GEMMA2 = classifier(gemma2.GEMMA2)
GEMMA3 = classifier(gemma3.GEMMA3)
LLAMA = classifier(llama.LLAMA)
MISTRAL = classifier(mistral.MISTRAL)
QWEN2 = classifier(qwen2.QWEN2)
QWEN3 = classifier(qwen3.QWEN3)
QWEN2_REWARD = reward_model(qwen2.QWEN2)
QWEN3_REWARD = reward_model(qwen3.QWEN3)
GEMMA2_BASE = embedding_model(gemma2.GEMMA2)
GEMMA3_BASE = embedding_model(gemma3.GEMMA3, "bidirectional attention")
LLAMA_BASE = embedding_model(llama.LLAMA)
MISTRAL_BASE = embedding_model(mistral.MISTRAL)
QWEN2_BASE = embedding_model(qwen2.QWEN2)
QWEN3_BASE = embedding_model(qwen3.QWEN3)
