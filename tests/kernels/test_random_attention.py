"""Random passes of attention: against float64, and each query against itself in another pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.test_attention import (
    BACKENDS,
    PAGES,
    Case,
    a_shape,
    assert_all_equal_the_shaped_textbook,
)

from antiphon.kernels.kv import UNSCALED

if TYPE_CHECKING:
    from antiphon.kernels.attention import KvShape

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 193, 255, 257, 511, 513, 700)
"""About the ends of vectors, of steps and blocks of keys, and of segments."""
TOKENS_MAX = 1500
"""Of all rows: float64 takes longest."""
INVARIANT = [attention for attention in BACKENDS if attention.invariant]


def drawn_shape(random: np.random.Generator) -> KvShape:
    return a_shape(
        heads=int(random.choice([1, 1, 2, 3])),
        group=int(random.choice([1, 2, 3, 5, 7, 8, 13, 16, 17, 24])),
        head_size=int(random.choice([16, 32, 48, 64, 72, 80, 96, 112, 128])),
        dtype=torch.bfloat16 if random.random() < 0.8 else torch.float32,
        window=int(random.choice([1, 2, 31, 33, 100, 128, 129, 513]))
        if random.random() < 0.4
        else None,
        page_tokens=int(random.choice([8, 16, 24, 32, 33, 48, 64])),
    )


def drawn_lengths(random: np.random.Generator, page_tokens: int) -> tuple[list[int], list[int]]:
    """Tokens of rows in the pass, decodes often, and tokens before them."""
    query_len: list[int] = []
    prefix: list[int] = []
    left = min(TOKENS_MAX, page_tokens * PAGES // 2)
    for _ in range(random.choice([1, 2, 5, 20])):
        queries = 1 if random.random() < 0.6 else int(random.choice(LENGTHS))
        before = 0 if random.random() < 0.2 else int(random.choice(LENGTHS)) - 1
        if (left := left - queries - before) < 0:
            break
        query_len.append(queries)
        prefix.append(before)
    return (query_len, prefix) if query_len else ([1], [0])


@pytest.mark.parametrize("seed", range(30))
def test_random_pass_equals_the_textbook_and_has_its_bits_in_any_chunk(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = drawn_shape(random)
    case = Case(seed, *drawn_lengths(random, shape.page_tokens), shape)
    softcap = 5.0 if random.random() < 0.2 else None
    sinks = None
    if random.random() < 0.3:
        sinks = torch.linspace(-6, 6, case.q.shape[1]).to(case.q.dtype)
    assert_all_equal_the_shaped_textbook(case, softcap, sinks)
    row = int(random.integers(len(case.rows.query_len)))
    length = int(case.rows.query_len[row])
    first = int(random.integers(length))
    count = int(random.integers(1, length - first + 1))
    (q, where), chunk, pages = (
        case.piece(row, first, count),
        case.chunk(row, first, count),
        case.pages,
    )
    for attention in INVARIANT:
        together = attention(case.q, *pages, case.rows, case.scale, UNSCALED, softcap, sinks)
        apart = attention(q, *pages, chunk, case.scale, UNSCALED, softcap, sinks)
        assert torch.equal(apart, together[where]), (attention.name, row, first, count)
