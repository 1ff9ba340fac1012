"""The short causal convolution before a recurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from antiphon.kernels.states import StateMetadata


@kernel("recurrent.conv")
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateMetadata
) -> Tensor:
    """Convolve each channel with its last K tokens, and apply SiLU.

    Axes: T tokens, C channels, K taps, S states.
    x (T, C); weight (C, K), the last tap is the token itself; bias (C,); states (S, K - 1, C), the
    inputs of the last tokens, mutated  ->  (T, C), dtype of x
    """
    taps = weight.t()  # (K, C)
    out = torch.empty_like(x)
    if (decode_rows := rows.decode_rows) is not None:
        seen = torch.cat(
            (decode_rows.read_states(states).to(x.dtype), decode_rows.gather(x).unsqueeze(1)), dim=1
        )
        decode_rows.write_states(states, seen[:, 1:])
        decode_rows.scatter(out, _activate((seen * taps).sum(dim=1), bias))
    for run in rows.scan_spans:
        own = x[run.begin : run.end]
        seen = torch.cat((run.initial_state(states).to(x.dtype), own))  # (K - 1 + tokens, C)
        states[run.write] = seen[len(own) :].to(states.dtype)
        mixed = seen[: len(own)] * taps[0]
        for tap in range(1, len(taps)):
            mixed.addcmul_(seen[tap : tap + len(own)], taps[tap])
        out[run.begin : run.end] = _activate(mixed, bias)
    return out


def _activate(mixed: Tensor, bias: Tensor | None) -> Tensor:
    return F.silu(mixed if bias is None else mixed + bias)
