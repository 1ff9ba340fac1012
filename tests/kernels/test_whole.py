"""Attention both ways against its definition, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.kernels.bidirectional import QUERIES_MAX, bidirectional_attention

HEADS, SIZE = 2, 8


def defined(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """Each row by one softmax over all of it; what is beyond the window weighs nothing."""
    shared = q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(shared, dim=1) for heads in (k, v))
    rows = []
    for a, b, c in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("nhd,mhd->hnm", a, b) * scale
        if window is not None:
            place = torch.arange(len(a))
            far = (place[:, None] - place).abs() >= window
            scores = scores.masked_fill(far, -torch.inf)
        rows.append(torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), c))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 1, 9, QUERIES_MAX + 40])
@pytest.mark.parametrize("shared", [1, 3])
def test_every_token_sees_its_row_and_no_other(shared: int, window: int | None) -> None:
    lengths = [1, 30, 2 * QUERIES_MAX + 7, 8]
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), shared * HEADS, SIZE)
    k, v = torch.randn(2, sum(lengths), HEADS, SIZE)
    expected = defined(q, k, v, lengths, 0.3, window)
    found = bidirectional_attention.reference(q, k, v, lengths, 0.3, window)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_has_its_bits_whatever_is_beside_it() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 60, HEADS, SIZE)
    together = bidirectional_attention.reference(q, k, v, [20, 40], 0.3, 5)
    alone = bidirectional_attention.reference(q[20:], k[20:], v[20:], [40], 0.3, 5)
    assert torch.equal(together[20:], alone)
