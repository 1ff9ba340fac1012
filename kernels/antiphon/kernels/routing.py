"""Which experts a token goes to, and how much of each it takes.

Axes: T tokens, E experts, K experts that a token goes to.
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
    """How the scores of experts become a choice of them.

    Attributes:
        chosen: K.
        scoring: What a logit counts: its share of a softmax over all experts, or its own sigmoid.
        renormalised: The shares of the chosen add up to one. Of a softmax, that is the softmax over
            the chosen alone, whether a model takes it before it chooses or after.
        factor: What all shares are multiplied by.
        groups: Experts come in so many groups of the same size, neighbours together.
        groups_kept: A token chooses within so many of them.
        group_best: A group counts what so many of its best experts count together.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    factor: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1


_NOTHING = 1e-20
"""Added to the sum of shares that are made to add up to one: all of them may round to zero."""


@kernel("moe.route", invariant=True)
def route(logits: Tensor, correction: Tensor | None, routing: RoutingSpec) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, the best first.

    Args:
        logits: (T, E) float32.
        correction: (E,) float32, what balances the load: it counts in the choice and not in the
            shares. None where a model has none.
        routing: Of the model.

    Returns:
        The experts (T, K) int64, and the share of each (T, K) float32.

    Source: Shazeer et al. 2017, arXiv:1701.06538 (top-k gating); DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.2 (groups) and arXiv:2412.19437, section 2.1.2 (correction).
    """
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else sigmoid(logits)
    # The order of logits is that of their scores, without the ties of scores that are all but one.
    plain = correction is None and routing.groups == 1
    standing = logits if plain else scores if correction is None else scores + correction
    if routing.groups > 1:
        standing = standing.masked_fill(~_kept(standing, routing), -torch.inf)
    experts = standing.topk(routing.top_k, dim=-1).indices
    shares = scores.gather(1, experts)
    if routing.renormalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _NOTHING)
    return experts, shares * routing.factor


def _kept(standing: Tensor, routing: RoutingSpec) -> Tensor:
    """Which experts lie in the groups that a token chooses from, (T, E) bool."""
    grouped = standing.view(len(standing), routing.groups, -1)  # (T, groups, E / groups)
    worth = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)  # (T, groups)
    best = worth.topk(routing.groups_kept, dim=-1).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, value=True)
    return kept.repeat_interleave(grouped.shape[2], dim=1)
