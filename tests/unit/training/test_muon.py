"""Muon: directions that all weigh the same, as torch's own has them in bfloat16."""

from __future__ import annotations

import pytest
import torch
from tests.training.muon import Muon, orthogonal
from torch.nn import Parameter

SHAPES = ((8, 8), (24, 8), (8, 24), (24, 8))


def drawn(seed: int) -> list[Parameter]:
    torch.manual_seed(seed)
    return [Parameter(torch.randn(shape)) for shape in SHAPES]


def test_singular_values_come_near_one_and_directions_stay() -> None:
    matrices = {weight: weight.detach().clone() for weight in drawn(0)}
    for weight, made in orthogonal(matrices).items():
        assert made.shape == weight.shape
        assert (torch.linalg.svdvals(made) - 1).abs().max() < 0.5
        left, _, right = torch.linalg.svd(weight.detach(), full_matrices=False)
        torch.testing.assert_close(left @ (left.T @ made @ right.T) @ right, made)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(weight_decay: float) -> None:
    ours, theirs = drawn(1), drawn(1)
    optimizers = (
        Muon(ours, lr=0.2, weight_decay=weight_decay),
        torch.optim.Muon(theirs, lr=0.2, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(5):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            for weight, gradient in zip(weights, drawn(10 + step), strict=True):
                weight.grad = gradient.detach().clone()
            optimizer.step()
    for start, one, other in zip(drawn(1), ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=0.04, rtol=0)  # theirs is bfloat16
        assert (one - start).abs().max() > 0.2


def test_what_has_no_gradient_stays() -> None:
    (weight, *_) = drawn(2)
    before = weight.detach().clone()
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(weight, before)
