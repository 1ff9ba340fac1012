"""Gated activations."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.cpu.backend import cpu
from antiphon.kernels.op import kernel


@kernel("activation.silu_mul", cpu("antiphon.kernels.cpu.elementwise:silu_mul"))
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of both halves of the last dimension.

    gate_up (tokens, 2 * width)  ->  (tokens, width)

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
