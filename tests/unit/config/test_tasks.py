"""What an architecture's name says of a model's task."""

from __future__ import annotations

import pytest

from antiphon.model_card.tasks import (
    Task,
    head_parameters,
    is_bidirectional,
    task_of,
    unused_prefixes,
)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", Task.GENERATE),
        ("GPT2LMHeadModel", Task.GENERATE),
        ("MistralModel", Task.EMBED),
        ("XLMRobertaModel", Task.EMBED),
        ("Qwen2ForRewardModel", Task.SCORE),
        ("BertForSequenceClassification", Task.SCORE),
    ],
)
def test_a_name_ends_in_its_task(architecture: str, task: Task) -> None:
    assert task_of(architecture) is task


def test_a_name_begins_with_how_tokens_see() -> None:
    encoders = ("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel")
    assert all(map(is_bidirectional, encoders))
    assert not is_bidirectional("LlamaForSequenceClassification")


def test_what_another_task_trained_is_not_read() -> None:
    assert "pooler." in unused_prefixes("BertModel")
    assert unused_prefixes("BertForSequenceClassification") == ()
    assert unused_prefixes("LlamaModel") == ()


def test_matrices_of_heads() -> None:
    assert head_parameters("LlamaForCausalLM", 8, 2) == 0
    assert head_parameters("LlamaForSequenceClassification", 8, 3) == 24
    assert head_parameters("BertForSequenceClassification", 8, 3) == 64 + 24
    assert head_parameters("Qwen2ForRewardModel", 8, 1) == 64 + 8
