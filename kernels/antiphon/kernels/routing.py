"""Top-k routing of tokens to experts, with the weight of each.

Axes: T tokens, E experts, K experts selected for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from antiphon.kernels.activation import sigmoid
from antiphon.kernels.op import kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """How router logits select experts.

    Attributes:
        top_k: K.
        scoring: Score of a logit: softmax over all experts, or sigmoid.
        renormalised: The weights of the selected experts are normalised to sum to one. For a
            softmax that equals the softmax over the selected alone, taken before or after the
            selection.
        factor: All weights are multiplied by this.
        groups: Number of groups of adjacent experts, of equal size.
        groups_kept: Number of groups from which a token's experts are selected.
        group_best: The score of a group is the sum of so many of its best experts.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    factor: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1


_NOTHING = 1e-20
"""Added to the sum that weights are normalised by: all of them may round to zero."""


@kernel("moe.route", invariant=True)
def route(logits: Tensor, correction: Tensor | None, routing: RoutingSpec) -> tuple[Tensor, Tensor]:
    """Select each token's experts, the best first.

    Args:
        logits: (T, E) float32.
        correction: (E,) float32, the load-balancing bias: it affects the selection, not the
            weights. None where a model has none.
        routing: Of the model.

    Returns:
        The experts (T, K) int64, and the weight of each (T, K) float32.

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
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _NOTHING)
    return experts, shares * routing.factor


def _in_best_groups(ranking: Tensor, routing: RoutingSpec) -> Tensor:
    """Which experts are in the groups selected for a token, (T, E) bool."""
    grouped = ranking.view(len(ranking), routing.groups, -1)  # (T, groups, E / groups)
    group_scores = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)  # (T, groups)
    best = group_scores.topk(routing.groups_kept, dim=-1).indices
    selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, value=True)
    return selected.repeat_interleave(grouped.shape[2], dim=1)
