"""The shapes of the benchmarks: their numbers are those of the models that are made."""

from __future__ import annotations

import pytest
import torch
from tests.bench.models import EXPERTS, SHAPES, Shape
from transformers import AutoModelForCausalLM

SMALL = ("norm", "bias", "conv", "A_log", ".D", "embed_tokens")
"""Not multiplied with a token as a matrix is; the embedding is counted as the head."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_weights_of_a_token_are_counted(shape: Shape) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    matrices = {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if not any(part in name for part in SMALL)
    }
    head = shape.vocabulary * shape.hidden
    whole = sum(matrices.values()) + (0 if any("lm_head" in name for name in matrices) else head)
    assert shape.read_count(10_000) == pytest.approx(whole, rel=1e-3)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    assert EXPERTS.read_count(1) == EXPERTS.weights_count
    assert EXPERTS.weights_count < EXPERTS.read_count(4) < EXPERTS.read_count(64)
