"""What changes single logits before tokens are drawn: penalties, masks and biases.

Axes: V vocabulary.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from antiphon.kernels.triton.launch import ceil_div, launch

if TYPE_CHECKING:
    from torch import Tensor

PASS = 1024
"""Entries, or logits of a row, of a program."""


@triton.jit(do_not_specialize=["entries"])
def penalize_kernel(
    logits,
    rows,
    token_ids,
    counts,
    frequency,
    presence,
    repetition,
    entries,
    vocabulary: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    place = tl.load(rows + entry, mask=inside, other=0) * vocabulary
    place += tl.load(token_ids + entry, mask=inside, other=0)
    seen = tl.load(logits + place, mask=inside, other=0.0)
    seen -= tl.load(counts + entry, mask=inside, other=0.0) * tl.load(
        frequency + entry, mask=inside, other=0.0
    )
    seen -= tl.load(presence + entry, mask=inside, other=0.0)
    factor = tl.load(repetition + entry, mask=inside, other=1.0)
    tl.store(logits + place, tl.where(seen > 0, seen / factor, seen * factor), mask=inside)


@triton.jit(do_not_specialize=["entries"])
def bias_kernel(
    logits, rows, token_ids, values, entries, vocabulary: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    place = tl.load(rows + entry, mask=inside, other=0) * vocabulary
    place += tl.load(token_ids + entry, mask=inside, other=0)
    before = tl.load(logits + place, mask=inside, other=0.0)
    tl.store(logits + place, before + tl.load(values + entry, mask=inside, other=0.0), mask=inside)


@triton.jit
def mask_kernel(
    logits, rows, words, vocabulary: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr
):
    line = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    word = tl.load(words + line.to(tl.int64) * width + token // 32, mask=inside, other=0)
    blocked = ((word >> (token % 32)) & 1) == 0
    place = tl.load(rows + line) * vocabulary + token
    tl.store(logits + place, tl.full([BLOCK], -float("inf"), tl.float32), mask=inside & blocked)


def penalize(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """As `antiphon.kernels.sampling.penalize`."""
    assert logits.is_contiguous(), "they are changed in place"
    entries = len(rows)
    launch(
        penalize_kernel,
        (ceil_div(entries, PASS),),
        logits,
        rows,
        token_ids,
        counts,
        frequency,
        presence,
        repetition,
        entries,
        vocabulary=logits.shape[1],
        BLOCK=PASS,
    )


def bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """As `antiphon.kernels.sampling.bias`."""
    assert logits.is_contiguous(), "they are changed in place"
    entries = len(rows)
    grid = (ceil_div(entries, PASS),)
    launch(
        bias_kernel,
        grid,
        logits,
        rows,
        token_ids,
        values,
        entries,
        vocabulary=logits.shape[1],
        BLOCK=PASS,
    )


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """As `antiphon.kernels.sampling.mask`."""
    assert logits.is_contiguous(), "they are changed in place"
    vocabulary, width = logits.shape[1], words.shape[1]
    grid = (len(rows), ceil_div(vocabulary, PASS))
    launch(
        mask_kernel,
        grid,
        logits,
        rows,
        words.contiguous(),
        vocabulary=vocabulary,
        width=width,
        BLOCK=PASS,
    )
