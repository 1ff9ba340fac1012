"""Top-k routing of tokens to experts: selecting them, sorting by expert, and combining results.

Axes: T tokens, E experts, K experts selected for a token, N rows: of T * K pairs of a token and one
of these, those that are sorted; D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from antiphon.kernels.activation import sigmoid
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """How router logits select experts."""

    top_k: int  # K
    # Score of a logit: softmax over all experts, or sigmoid.
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    # The weights of the selected experts are normalised to sum to one. For a softmax that equals
    # the softmax over the selected alone, taken before or after the selection.
    renormalised: bool = False
    factor: float = 1.0  # all weights are multiplied by this
    groups: int = 1  # number of groups of adjacent experts, of equal size
    groups_kept: int = 1  # number of groups from which a token's experts are selected
    group_best: int = 1  # the score of a group is the sum of so many of its best experts


NOTHING = 1e-20
"""Added to the sum that weights are normalised by: all of them may round to zero."""


@kernel("moe.route", triton("routing:route"), invariant=True)
def route(logits: Tensor, correction: Tensor | None, routing: RoutingSpec) -> tuple[Tensor, Tensor]:
    """Select each token's experts, the best first.

    logits (T, E) float32; correction (E,) float32, the load-balancing bias: it affects the
    selection, not the weights  ->  the experts (T, K) int64, and the weight of each, float32

    Source: Shazeer et al. 2017, arXiv:1701.06538 (top-k gating); DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.2 (groups) and arXiv:2412.19437, section 2.1.2 (correction).
    """
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else sigmoid(logits)
    # Logits are ordered like their scores, but without ties between scores that round to one.
    plain = correction is None and routing.groups == 1
    ranking = logits if plain else scores if correction is None else scores + correction
    if routing.groups > 1:
        ranking = ranking.masked_fill(~_in_best_groups(ranking, routing), -torch.inf)
    experts = ranking.topk(routing.top_k, dim=-1).indices
    shares = scores.gather(1, experts)
    if routing.renormalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + NOTHING)
    return experts, shares * routing.factor


def _in_best_groups(ranking: Tensor, routing: RoutingSpec) -> Tensor:
    """Which experts are in the groups selected for a token, (T, E) bool."""
    grouped = ranking.view(len(ranking), routing.groups, -1)  # (T, groups, E / groups)
    group_scores = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)  # (T, groups)
    best = group_scores.topk(routing.groups_kept, dim=-1).indices
    selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, value=True)
    return selected.repeat_interleave(grouped.shape[2], dim=1)


def sort_by_expert(experts: Tensor, numbers: range) -> tuple[Tensor, list[int]]:
    """Sort the (token, expert) pairs of the experts with these numbers: experts (T, K) int64.

    Returns (N,) the pair (token, choice) of each row, token * K + choice, where rows of one expert
    keep the order of their tokens; and the bounds: expert numbers[e] has rows bounds[e] to
    bounds[e + 1]. Pairs of other experts have no row.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    borders = torch.arange(numbers.start, numbers.stop + 1, device=flat.device)
    bounds: NDArray[np.int64] = torch.searchsorted(flat[order], borders).cpu().numpy()
    first, last = int(bounds[0]), int(bounds[-1])
    return order[first:last], (bounds - first).tolist()


@kernel("moe.combine", invariant=True)
def combine(rows: Tensor, pair: Tensor, shares: Tensor) -> Tensor:
    """Sum the outputs of each token's experts, weighted.

    The sum is taken in float32, in the order of a token's choices, so it does not depend on the
    rest of the batch.

    rows (N, D); pair (N,) int64, each once or, if another rank has its expert, never; shares (T, K)
    float32  ->  (T, D), dtype of rows
    """
    tokens, choices = shares.shape
    spread = rows.new_zeros(tokens * choices, rows.shape[1])
    spread = spread.index_copy_(0, pair, rows).view(tokens, choices, -1)
    total = spread[:, 0].float() * shares[:, :1]
    for choice in range(1, choices):
        total += spread[:, choice].float() * shares[:, choice : choice + 1]
    return total.to(rows.dtype)
