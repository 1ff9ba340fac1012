"""What a model is for, which its architecture's name says."""

from __future__ import annotations

from enum import StrEnum

from antiphon.model_card.text_model import VISION_PREFIXES, is_multimodal


class Task(StrEnum):
    """What comes out of a model."""

    GENERATE = "generate"
    """Text, token by token; and any text's vector."""
    EMBED = "embed"
    """A text's vector, and nothing else."""
    SCORE = "score"
    """A text's scores, label by label, or its one reward; and its vector."""


def task_of(architecture: str) -> Task:
    """The task of models of an architecture, by the endings that transformers gives names."""
    if architecture.endswith(("ForSequenceClassification", "ForRewardModel")):
        return Task.SCORE
    if architecture.endswith("ForMaskedLM"):
        return Task.EMBED  # words in gaps are not served; the layers below give vectors
    if architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        return Task.EMBED
    return Task.GENERATE


ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
"""How architectures begin whose attention looks both ways. Their classifiers have a linear that is
as wide as the stream before the last."""


def is_bidirectional(architecture: str) -> bool:
    """Whether a token sees what comes after it: a text is computed in one piece, and not cached."""
    return architecture.startswith(ENCODERS)


_OTHER_HEADS = (
    *("pooler.", "bert.pooler.", "roberta.pooler."),
    *("cls.", "lm_head.", "head.", "decoder."),  # words in gaps: BERT, RoBERTa, ModernBERT
)


def unused_prefixes(architecture: str) -> tuple[str, ...]:
    """How tensors of a checkpoint begin that were trained for another task than this one."""
    if is_multimodal(architecture):
        return (*VISION_PREFIXES, *(f"model.{name}" for name in VISION_PREFIXES))
    if not is_bidirectional(architecture) or task_of(architecture) is not Task.EMBED:
        return ()
    return _OTHER_HEADS


def head_parameters(architecture: str, hidden: int, labels: int) -> int:
    """Of the matrices of a head that scores texts; 0 of any other model."""
    if task_of(architecture) is not Task.SCORE:
        return 0
    if architecture.endswith("ForRewardModel"):
        return hidden * hidden + hidden
    return (hidden * hidden if architecture.startswith(ENCODERS) else 0) + hidden * labels
