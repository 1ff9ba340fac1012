"""Routing and what surrounds the experts, against the same written out token by token."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kernels.activation import clamped_swish_mul, sigmoid
from antiphon.kernels.routing import RoutingSpec, combine, route, sort_by_expert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

EXPERTS = 12


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def one_by_one(
    logits: Sequence[float], correction: Sequence[float] | None, routing: RoutingSpec
) -> dict[int, float]:
    """A token's experts and shares, as one would say it."""
    if routing.scoring == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    worth = [s + c for s, c in zip(scores, correction or [0.0] * len(scores), strict=True)]
    size = len(logits) // routing.groups
    groups = [range(g * size, (g + 1) * size) for g in range(routing.groups)]
    groups.sort(key=lambda g: -sum(sorted(worth[e] for e in g)[-routing.group_best :]))
    allowed = [expert for group in groups[: routing.groups_kept] for expert in group]
    chosen = sorted(allowed, key=lambda e: -worth[e])[: routing.top_k]
    total = sum(scores[e] for e in chosen) if routing.renormalised else 1.0
    return {e: scores[e] / total * routing.factor for e in chosen}


ROUTINGS = {
    "softmax": RoutingSpec(top_k=3),
    "softmax, renormalised": RoutingSpec(top_k=3, renormalised=True),
    "softmax within groups": RoutingSpec(top_k=3, groups=4, groups_kept=2, factor=16.0),
    "sigmoid": RoutingSpec(top_k=2, scoring="sigmoid"),
    "one by sigmoid": RoutingSpec(top_k=1, scoring="sigmoid"),
    "sigmoid within groups": RoutingSpec(
        top_k=4,
        scoring="sigmoid",
        renormalised=True,
        factor=2.5,
        groups=4,
        groups_kept=2,
        group_best=2,
    ),
    "as many as there are": RoutingSpec(top_k=EXPERTS, renormalised=True),
}


@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_tokens_go_where_one_would_send_them(routing: RoutingSpec, corrected: bool) -> None:
    logits = 2 * drawn(200, EXPERTS)
    correction = drawn(EXPERTS, seed=1) if corrected else None
    experts, shares = route.reference(logits, correction, routing)
    for token in range(len(logits)):
        want = one_by_one(
            logits[token].tolist(), None if correction is None else correction.tolist(), routing
        )
        got = dict(zip(experts[token].tolist(), shares[token].tolist(), strict=True))
        assert got == pytest.approx(want, rel=1e-5)


def test_a_renormalised_softmax_is_the_softmax_over_the_chosen() -> None:
    logits = 3 * drawn(50, EXPERTS)
    experts, shares = route.reference(logits, None, RoutingSpec(top_k=4, renormalised=True))
    best = logits.topk(4, dim=-1)
    assert torch.equal(experts, best.indices)
    torch.testing.assert_close(shares, best.values.softmax(dim=-1))


def test_the_best_of_experts_that_all_score_one_is_that_of_the_greatest_logit() -> None:
    logits = torch.tensor([[30.0, 50.0, 40.0]])
    experts, shares = route.reference(logits, None, RoutingSpec(top_k=1, scoring="sigmoid"))
    assert experts.tolist() == [[1]]
    assert shares.tolist() == [[1.0]]


@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("count", [4, 8, 60, 128])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_token_is_routed_with_the_bits_that_it_has_alone(
    scoring, count: int, corrected: bool
) -> None:
    routing = RoutingSpec(
        top_k=2, scoring=scoring, renormalised=True, groups=2, groups_kept=1, group_best=2
    )
    logits = 5 * drawn(300, count)
    correction = drawn(count, seed=1) if corrected else None
    experts, shares = route.reference(logits, correction, routing)
    for first, length in ((0, 1), (1, 1), (7, 3), (40, 129)):
        part = slice(first, first + length)
        alone = route.reference(logits[part].clone(), correction, routing)
        assert torch.equal(alone[0], experts[part])
        assert torch.equal(alone[1], shares[part])


@st.composite
def choices(draw: st.DrawFn) -> Tensor:
    tokens, chosen = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    flat = draw(st.lists(st.integers(0, 7), min_size=tokens * chosen, max_size=tokens * chosen))
    return torch.tensor(flat).view(tokens, chosen)


@given(choices(), st.integers(0, 7), st.integers(1, 8))
def test_every_pair_of_some_experts_has_one_row_sorted_by_expert(
    experts: Tensor, first: int, count: int
) -> None:
    numbers = range(first, min(first + count, 8))
    pairs, bounds = sort_by_expert(experts, numbers)
    flat = experts.flatten().tolist()
    want = [[pair for pair, e in enumerate(flat) if e == expert] for expert in numbers]
    rows = pairs.tolist()
    runs = pairwise(bounds)
    assert [rows[begin:end] for begin, end in runs] == want
    assert bounds[-1] == len(rows)


def test_what_experts_made_is_summed_by_share() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [0, 1]])
    shares, made = drawn(3, 2, seed=1), drawn(6, 5, seed=2)
    pairs, _ = sort_by_expert(experts, range(3))
    total = combine.reference(made, pairs, shares)
    for token in range(3):
        want = torch.zeros(5)
        for choice in range(2):
            row = pairs.tolist().index(2 * token + choice)
            want += shares[token, choice] * made[row]
        torch.testing.assert_close(total[token], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_experts_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    shares, made = drawn(100, 6), drawn(600, 37, seed=1).to(dtype)
    pair = torch.arange(600)
    total = combine.reference(made, pair, shares)
    for first, length in ((0, 1), (3, 5), (99, 1)):
        rows = made[6 * first : 6 * (first + length)].clone()
        part = combine.reference(rows, pair[: 6 * length], shares[first : first + length].clone())
        assert torch.equal(part, total[first : first + length])


def test_the_clamped_gate_is_held_from_above_and_up_from_both_sides() -> None:
    gate, up = 6 * drawn(50, 33), 6 * drawn(50, 33, seed=1)
    got = clamped_swish_mul.reference(torch.cat((gate, up), dim=-1), 1.702, 7.0)
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    held = [(min(g, 7.0), max(-7.0, min(u, 7.0))) for g, u in pairs]
    want = [g / (1 + math.exp(-1.702 * g)) * (u + 1) for g, u in held]
    torch.testing.assert_close(got.flatten(), torch.tensor(want))


@pytest.mark.parametrize("width", [1, 7, 60, 64])
def test_a_sigmoid_has_the_bits_that_it_has_alone(width: int) -> None:
    x = 5 * drawn(200, width)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x))
    for row in range(0, 200, 17):
        assert torch.equal(sigmoid(x[row].clone()), sigmoid(x)[row])
    rows = torch.cat((x, x), dim=1)
    gated = clamped_swish_mul.reference(rows, 1.7, 7.0)
    for row in range(0, 200, 17):
        alone = clamped_swish_mul.reference(rows[row : row + 1].clone(), 1.7, 7.0)
        assert torch.equal(alone[0], gated[row])
