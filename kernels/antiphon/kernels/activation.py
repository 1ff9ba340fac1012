"""Activations of feed-forward blocks, gated and plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.cpu.backend import cpu
from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from collections.abc import Callable

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu_squared": _relu_squared,
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
def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, of both halves of the last dimension.

    gate_up (tokens, 2 * width)  ->  (tokens, width)

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    first, up = gate_up.chunk(2, dim=-1)
    return _FUNCTIONS[activation](first) * up


@kernel("activation.plain")
def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number, as x."""
    return _FUNCTIONS[activation](x)
