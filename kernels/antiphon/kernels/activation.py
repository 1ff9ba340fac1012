"""Activations of feed-forward blocks, gated and plain."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.cpu.extension import cpu
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from collections.abc import Callable

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "tanh"]


def _quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FUNCTIONS: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu_squared": _relu_squared,
    "tanh": torch.tanh,
}


@kernel("activation.silu_mul", cpu("silu_mul"), triton("activation:silu_mul"))
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for the two halves of the last dimension.

    gate_up (tokens, 2 * width)  ->  (tokens, width)

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@kernel("activation.gate", cpu("gate"), triton("activation:gate"))
def gate(gate_up: Tensor, activation: ActivationKind) -> Tensor:
    """activation(gate) * up, for the two halves of the last dimension.

    gate_up (tokens, 2 * width)  ->  (tokens, width)

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    first, up = gate_up.chunk(2, dim=-1)
    return _FUNCTIONS[activation](first) * up


@kernel("activation.plain", cpu("activate"), triton("activation:activate"))
def activate(x: Tensor, activation: ActivationKind) -> Tensor:
    """Apply the activation elementwise; shape as x."""
    return _FUNCTIONS[activation](x)


@kernel("activation.sigmoid_mul", cpu("sigmoid_mul"), triton("activation:sigmoid_mul"))
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """X * sigmoid(gate): heads and their gates (T, Q, D) both, of which a token's lie in one piece.

    Source: Qiu et al. 2025, arXiv:2505.06708 (gated attention).
    """
    return x * torch.sigmoid(gate)


@kernel("logits.softcap", cpu("soft_capped"), triton("activation:soft_capped"))
def soft_capped(x: Tensor, softcap: float) -> Tensor:
    """Elementwise softcap * tanh(x / softcap); x float32, shape as x.

    Source: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    return softcap * (x / softcap).tanh()


@kernel("activation.clamped_swish_mul", triton("activation:clamped_swish_mul"), invariant=True)
def clamped_swish_mul(gate_up: Tensor, sharpness: float, limit: float) -> Tensor:
    """Gated SiLU with a clamp: gate * sigmoid(sharpness * gate) * (up + 1).

    Both halves are clamped to a limit, the gate from above only.
    gate_up (tokens, 2 * width)  ->  (tokens, width), computed in float32

    Source: OpenAI 2025, arXiv:2508.10925 (the experts of gpt-oss).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * sigmoid(sharpness * gate) * (up + 1)).to(gate_up.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), bitwise independent of an element's position in the tensor.

    `torch.sigmoid` computes a tail that does not fill a vector in another way: of 1,000 rows of 60
    elements, 700 had other bits alone than in a batch.
    """
    return 1 / (1 + (-x).exp())
