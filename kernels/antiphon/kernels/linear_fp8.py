"""A linear of e4m3 weights, whose activations are rounded to e4m3 as it is called.

Source: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3); DeepSeek-AI 2024, arXiv:2412.19437,
section 3.3 (a scale for 128 inputs of a token, sums of a group that are added in float32).

Axes: T tokens, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.kv import FP8_MAX
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from torch import Tensor

E4M3 = torch.float8_e4m3fn
GROUP_UNIT = 32
"""Groups of inputs are a multiple of it, or one group is all inputs."""


class Fp8Matrix(NamedTuple):
    """Weights in e4m3 with a scale for each output and group of inputs."""

    codes: Tensor  # (O, I) float8_e4m3fn
    scales: Tensor  # (G, O) float32
    group: int  # inputs of a group; the last group may have fewer
    bias: Tensor | None = None  # (O,)


def is_multiplied(group: int, inputs: int) -> bool:
    """Whether weights with such groups can be multiplied."""
    return group >= inputs or group % GROUP_UNIT == 0


@kernel("linear.fp8", triton("linear_fp8:linear_fp8", e4m3=True, fixed=None))
def linear_fp8(x: Tensor, weights: Fp8Matrix) -> Tensor:
    """Multiply rounded activations: x (T, I)  ->  (T, O) in its dtype, bias added.

    Products of a group are summed, multiplied by both scales, and added to other groups' in
    float32.
    """
    codes, scales = quantize(x, weights.group)
    total = torch.zeros(len(x), len(weights.codes), dtype=torch.float32, device=x.device)
    for number, scale in enumerate(weights.scales):
        part = slice(number * weights.group, (number + 1) * weights.group)
        made = codes[:, part].float() @ weights.codes[:, part].float().T
        total += made * (scales[number][:, None] * scale)
    if weights.bias is not None:
        total += weights.bias.float()
    return total.to(x.dtype)


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round activations so that the absmax of each token and group becomes the largest number.

    x (T, I)  ->  e4m3 (T, I), scales (G, T) float32
    """
    inputs, most = x.shape[1], FP8_MAX[E4M3]
    group = min(group, inputs)
    apart = F.pad(x.float(), (0, -inputs % group)).view(len(x), -(-inputs // group), group)
    scales = apart.abs().amax(dim=-1) / most
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (apart / scales[..., None]).clamp(-most, most).flatten(1)[:, :inputs]
    return codes.to(E4M3), scales.T.contiguous()
