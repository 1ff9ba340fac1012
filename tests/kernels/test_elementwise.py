"""The small ops against float64, entry by entry."""

from __future__ import annotations

import math

import pytest
import torch

from antiphon.kernels.op import Device
from antiphon.kernels.ops import select
from antiphon.kernels.rotary import LinearScaling, Llama3Scaling, Rotary, angles

OPS = select(Device("cpu"))
GENERATOR = torch.Generator().manual_seed(0)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=GENERATOR)


def test_rmsnorm_scales_rows_to_unit_size() -> None:
    x, weight, eps = random(3, 8), random(8), 0.1
    got = OPS.rmsnorm(x, weight, eps)
    for row in range(3):
        size = math.sqrt(sum(value**2 for value in x[row].tolist()) / 8 + eps)
        torch.testing.assert_close(got[row], x[row] * weight / size)


def test_add_rmsnorm_returns_the_new_residual() -> None:
    x, residual, weight = random(3, 8), random(3, 8), random(8)
    normed, total = OPS.add_rmsnorm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OPS.rmsnorm(total, weight, 1e-3))


def test_silu_mul_gates_the_second_half() -> None:
    gate, up = random(3, 5), random(3, 5)
    want = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(OPS.silu_mul(torch.cat((gate, up), dim=-1)), want)


def test_rotary_turns_pairs_by_position_times_frequency() -> None:
    rotary = Rotary(head_size=6, base=50.0)
    positions = torch.tensor([0, 3, 41])
    x = random(3, 2, 6)
    cos, sin = angles(rotary.frequencies(), positions, torch.float32)
    turned = OPS.rotary(x, cos, sin)
    for token, position in enumerate(positions.tolist()):
        for pair in range(3):
            turn = position * 50.0 ** (-2 * pair / 6)
            a, b = x[token, :, pair], x[token, :, pair + 3]
            torch.testing.assert_close(
                turned[token, :, pair], a * math.cos(turn) - b * math.sin(turn)
            )
            torch.testing.assert_close(
                turned[token, :, pair + 3], b * math.cos(turn) + a * math.sin(turn)
            )


def test_linear_scaling_slows_every_frequency() -> None:
    plain, scaled = Rotary(8, 100.0), Rotary(8, 100.0, LinearScaling(4.0))
    torch.testing.assert_close(scaled.frequencies(), plain.frequencies() / 4)


@pytest.mark.parametrize("trained", [64, 8192])
def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones(trained: int) -> None:
    plain = Rotary(64, 500_000.0)
    scaled = Rotary(64, 500_000.0, Llama3Scaling(8.0, 1.0, 4.0, trained))
    turns = trained * plain.frequencies() / (2 * math.pi)
    ratio = plain.frequencies() / scaled.frequencies()
    torch.testing.assert_close(ratio[turns > 4], torch.ones(int((turns > 4).sum())))
    torch.testing.assert_close(ratio[turns < 1], torch.full((int((turns < 1).sum()),), 8.0))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1) & (between < 8)).all()
