"""The task of a model, by the name of its architecture."""

from __future__ import annotations

from enum import StrEnum

from antiphon.model_card.config_json import VISION_PREFIXES, is_multimodal


class Task(StrEnum):
    GENERATE = "generate"
    """Text, token by token; it can also embed."""
    EMBED = "embed"
    """Embeddings only."""
    SCORE = "score"
    """Scores per label, or a reward; it can also embed."""


def task_of(architecture: str) -> Task:
    if architecture.endswith(("ForSequenceClassification", "ForRewardModel")):
        return Task.SCORE
    if architecture.endswith("ForMaskedLM"):
        return Task.EMBED  # masked tokens are not served; the layers below the head can embed
    if architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        return Task.EMBED
    return Task.GENERATE


ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
"""Prefixes of architectures with bidirectional attention. Their classifiers have a dense layer of
the hidden size before the last one."""


def is_bidirectional(architecture: str) -> bool:
    """Whether attention is bidirectional: a text is then computed in one pass, and not cached."""
    return architecture.startswith(ENCODERS)


_OTHER_HEADS = (
    *("pooler.", "bert.pooler.", "roberta.pooler."),
    *("cls.", "lm_head.", "head.", "decoder."),  # masked tokens: BERT, RoBERTa, ModernBERT
)


def unused_prefixes(architecture: str) -> tuple[str, ...]:
    """Prefixes of tensors in a checkpoint that belong to another task than the architecture's."""
    if is_multimodal(architecture):
        return (*VISION_PREFIXES, *(f"model.{name}" for name in VISION_PREFIXES))
    if not is_bidirectional(architecture) or task_of(architecture) is not Task.EMBED:
        return ()
    return _OTHER_HEADS


def head_parameters(architecture: str, hidden: int, labels: int) -> int:
    """Parameters of a classification head; 0 for other models."""
    if task_of(architecture) is not Task.SCORE:
        return 0
    if architecture.endswith("ForRewardModel"):
        return hidden * hidden + hidden
    return (hidden * hidden if architecture.startswith(ENCODERS) else 0) + hidden * labels
