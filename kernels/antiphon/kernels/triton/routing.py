"""Top-k routing: one program has all experts of a token, in groups.

Axes: T tokens, E experts, K experts selected for a token.
"""

# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.routing import NOTHING
from antiphon.kernels.triton.launch import launch, power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.routing import RoutingSpec


@triton.jit
def _best_groups(
    ranking,
    group,
    member,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Which groups are kept (groups,): those whose best experts have the highest sums."""
    total = tl.zeros([BLOCK_G], tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(ranking, axis=1)
        total += best
        first = tl.min(tl.where(ranking == best[:, None], member[None, :], BLOCK_E), axis=1)
        ranking = tl.where(member[None, :] == first[:, None], -float("inf"), ranking)
    total = tl.where(group < GROUPS, total, -float("inf"))
    kept = tl.zeros([BLOCK_G], tl.int32)
    for _ in tl.static_range(KEPT):
        best = tl.max(total, axis=0)
        mine = group == tl.min(tl.where(total == best, group, BLOCK_G), axis=0)
        kept = tl.where(mine, 1, kept)
        total = tl.where(mine, -float("inf"), total)
    return kept


@triton.jit
def route_kernel(
    logits,
    correction,
    experts,
    shares,
    factor,
    nothing,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISED: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    expert = group[:, None] * EACH + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < EACH)[None, :]
    place = logits + token * (GROUPS * EACH) + expert
    logit = tl.load(place, mask=inside, other=-float("inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        weight = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        score = weight / tl.sum(tl.sum(weight, axis=1), axis=0)
    # Logits are ordered like their scores, but without ties between scores that round to one.
    ranking = logit
    if CORRECTED:
        ranking = score + tl.load(correction + expert, mask=inside, other=0.0)
    elif GROUPS > 1:
        ranking = score
    ranking = tl.where(inside, ranking, -float("inf"))
    if GROUPS > 1:
        kept = _best_groups(ranking, group, member, GROUPS, KEPT, BEST, BLOCK_G, BLOCK_E)
        ranking = tl.where(kept[:, None] == 1, ranking, -float("inf"))
    lane = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    share = tl.zeros([BLOCK_K], tl.float32)
    for choice in range(TOP_K):
        best = tl.max(tl.max(ranking, axis=1), axis=0)
        equal = tl.where(ranking == best, expert, GROUPS * EACH - 1)
        # Of logits that are not finite, too, an expert that there is.
        first = tl.min(tl.min(equal, axis=1), axis=0)
        mine = expert == first
        found = tl.sum(tl.sum(tl.where(mine, score, 0.0), axis=1), axis=0)
        chosen = tl.where(lane == choice, first, chosen)
        share = tl.where(lane == choice, found, share)
        ranking = tl.where(mine, -float("inf"), ranking)
    if RENORMALISED:
        share = share / (tl.sum(share, axis=0) + nothing)
    at = token * TOP_K + lane
    tl.store(experts + at, chosen.to(tl.int64), mask=lane < TOP_K)
    tl.store(shares + at, share * factor, mask=lane < TOP_K)


def route(logits: Tensor, correction: Tensor | None, routing: RoutingSpec) -> tuple[Tensor, Tensor]:
    """As `antiphon.kernels.routing.route`."""
    logits = logits.contiguous()
    tokens, count = logits.shape
    size = (tokens, routing.top_k)
    experts = torch.empty(size, dtype=torch.int64, device=logits.device)
    shares = torch.empty(size, dtype=torch.float32, device=logits.device)
    each = count // routing.groups
    launch(
        route_kernel,
        (tokens,),
        logits,
        logits if correction is None else correction,
        experts,
        shares,
        float(routing.factor),
        NOTHING,
        GROUPS=routing.groups,
        EACH=each,
        BLOCK_G=power_of_2(routing.groups),
        BLOCK_E=power_of_2(each),
        TOP_K=routing.top_k,
        BLOCK_K=power_of_2(routing.top_k),
        KEPT=routing.groups_kept,
        BEST=routing.group_best,
        SIGMOID=routing.scoring == "sigmoid",
        RENORMALISED=routing.renormalised,
        CORRECTED=correction is not None,
    )
    return experts, shares
