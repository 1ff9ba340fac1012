"""Activations of feed-forward blocks, gated and plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.cpu.backend import cpu
from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from collections.abc import Callable

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "tanh"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FUNCTIONS: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu_squared": _relu_squared,
    "tanh": torch.tanh,
}


@kernel("activation.silu_mul", cpu("antiphon.kernels.cpu.elementwise:silu_mul"))
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of both halves of the last dimension.

    gate_up (tokens, 2 * width)  ->  (tokens, width)

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@kernel("activation.gate")
def gate(gate_up: Tensor, activation: ActivationKind) -> Tensor:
    """activation(gate) * up, of both halves of the last dimension.

    gate_up (tokens, 2 * width)  ->  (tokens, width)

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    first, up = gate_up.chunk(2, dim=-1)
    return _FUNCTIONS[activation](first) * up


@kernel("activation.plain")
def activate(x: Tensor, activation: ActivationKind) -> Tensor:
    """The activation of each number, as x."""
    return _FUNCTIONS[activation](x)


@kernel("activation.clamped_swish_mul", invariant=True)
def clamped_swish_mul(gate_up: Tensor, sharpness: float, limit: float) -> Tensor:
    """A gate times its sigmoid times (up + 1), of halves that are held within a limit.

    The gate is held from above only; its sigmoid is of `sharpness` times the gate.
    gate_up (tokens, 2 * width)  ->  (tokens, width), computed in float32

    Source: OpenAI 2025, arXiv:2508.10925 (the experts of gpt-oss).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * sigmoid(sharpness * gate) * (up + 1)).to(gate_up.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), each element with bits of its own.

    `torch.sigmoid` computes what does not fill a vector at the end of a tensor in another way: of
    1,000 rows of 60 elements, 700 had other bits alone than among the others.
    """
    return 1 / (1 + (-x).exp())
