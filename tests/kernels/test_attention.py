from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.kernels.attention import AttentionRows, KvShape
from antiphon.kernels.op import Device
from antiphon.kernels.ops import select

OPS = select(Device("cpu"))
PAGES, PAGE_TOKENS, HEAD_SIZE = 300, 4, 8


def one_by_one(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionRows, scale: float
) -> Tensor:
    """Attention as the textbook has it: one query, one head, one softmax at a time."""
    out = torch.empty_like(q)
    token = 0
    for row in range(len(rows.query_len)):
        for i in range(rows.query_len[row]):
            position = int(rows.kv_len[row] - rows.query_len[row] + i)
            first = 0 if rows.shape.window is None else max(0, position + 1 - rows.shape.window)
            seen = np.arange(first, position + 1)
            pages, offsets = rows.page_table[row, seen // PAGE_TOKENS], seen % PAGE_TOKENS
            for head in range(q.shape[1]):
                kv_head = head // rows.shape.queries_per_head
                k, v = keys[pages, offsets, kv_head], values[pages, offsets, kv_head]
                share = torch.softmax((k.double() @ q[token, head].double()) * scale, dim=0)
                out[token, head] = (share @ v.double()).to(q.dtype)
            token += 1
    return out


class Case:
    def __init__(self, seed: int, query_len: list[int], prefix: list[int], shape: KvShape) -> None:
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        query, kv = np.array(query_len), np.array(query_len) + np.array(prefix)
        needed = -(-kv // PAGE_TOKENS)
        table = np.full((len(query), needed.max()), -1, np.int64)
        free = random.permutation(PAGES)
        for row, count in enumerate(needed):
            table[row, :count], free = free[:count], free[count:]
        self.rows = AttentionRows(shape, table, query, kv)
        cache = (PAGES, PAGE_TOKENS, shape.heads, HEAD_SIZE)
        self.keys = torch.full(cache, torch.nan, dtype=shape.dtype)
        self.values = self.keys.clone()
        self._fill(generator, kv)
        tokens = (int(query.sum()), shape.heads * shape.queries_per_head, HEAD_SIZE)
        self.q = torch.randn(tokens, generator=generator).to(shape.dtype)

    def _fill(self, generator: torch.Generator, kv: np.ndarray) -> None:
        """Write what the rows may read; all else stays NaN, and would show."""
        for row, length in enumerate(kv):
            seen = np.arange(length)
            if self.rows.shape.window is not None:
                first = length - self.rows.query_len[row] - self.rows.shape.window + 1
                seen = seen[max(0, first) :]
            pages, offsets = self.rows.page_table[row, seen // PAGE_TOKENS], seen % PAGE_TOKENS
            size = (len(seen), self.rows.shape.heads, HEAD_SIZE)
            self.keys[pages, offsets] = torch.randn(size, generator=generator).to(self.keys.dtype)
            self.values[pages, offsets] = torch.randn(size, generator=generator).to(self.keys.dtype)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionRows, float]:
        return self.q, self.keys, self.values, self.rows, HEAD_SIZE**-0.5


ROWS = {
    "one decode": ([1], [30]),
    "decodes of one length": ([1, 1, 1], [20, 20, 20]),
    "decodes of many lengths": ([1] * 6, [0, 1, 63, 64, 65, 200]),
    "a prefill": ([9], [0]),
    "a chunk": ([10], [27]),
    "a long chunk": ([530], [6]),
    "verify rows": ([4, 4, 3], [5, 90, 7]),
    "all at once": ([1, 12, 1, 4, 260, 1], [40, 3, 100, 9, 5, 0]),
}


def assert_equals_the_textbook(shape: KvShape, query_len: list[int], prefix: list[int]) -> None:
    case = Case(3, query_len, prefix, shape)
    torch.testing.assert_close(
        OPS.paged_attention(*case.arguments()), one_by_one(*case.arguments())
    )


@pytest.mark.parametrize("window", [None, 1, 6, 50])
@pytest.mark.parametrize(("query_len", "prefix"), ROWS.values(), ids=ROWS.keys())
def test_attention_equals_the_textbook_and_reads_nothing_else(
    query_len: list[int], prefix: list[int], window: int | None
) -> None:
    shape = KvShape(PAGE_TOKENS, 2, 3, HEAD_SIZE, torch.float32, window)
    assert_equals_the_textbook(shape, query_len, prefix)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "queries_per_head"), [(1, 1), (3, 1), (1, 4)])
def test_heads_may_be_grouped_or_not(heads: int, queries_per_head: int, window: int | None) -> None:
    shape = KvShape(PAGE_TOKENS, heads, queries_per_head, HEAD_SIZE, torch.float32, window)
    assert_equals_the_textbook(shape, [1, 12, 1, 4], [40, 3, 100, 9])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_is_close_to_the_textbook(dtype: torch.dtype) -> None:
    shape = KvShape(PAGE_TOKENS, 2, 3, HEAD_SIZE, dtype)
    case = Case(4, *ROWS["decodes of many lengths"], shape)
    torch.testing.assert_close(
        OPS.paged_attention(*case.arguments()),
        one_by_one(*case.arguments()),
        atol=0.02,
        rtol=0.02,
    )


def test_keys_and_values_are_stored_where_their_rows_say() -> None:
    shape = KvShape(PAGE_TOKENS, 2, 3, HEAD_SIZE, torch.float32)
    rows = AttentionRows(
        shape, np.array([[7, 2, -1], [9, 1, 4]]), np.array([2, 3]), np.array([5, 11])
    )
    keys, values = torch.zeros(2, PAGES, PAGE_TOKENS, 2, HEAD_SIZE)
    k = torch.arange(1.0, 6.0)[:, None, None].expand(5, 2, HEAD_SIZE)
    OPS.kv_store(k, -k, keys, values, rows.write_places)
    written = {(7, 3): 1, (2, 0): 2, (4, 0): 3, (4, 1): 4, (4, 2): 5}
    for (page, offset), value in written.items():
        assert (keys[page, offset] == value).all()
        assert (values[page, offset] == -value).all()
    assert int((keys != 0).sum()) == 5 * 2 * HEAD_SIZE


def test_a_token_without_a_page_is_our_bug() -> None:
    shape = KvShape(PAGE_TOKENS, 2, 3, HEAD_SIZE, torch.float32)
    rows = AttentionRows(shape, np.array([[7, -1]]), np.array([1]), np.array([5]))
    with pytest.raises(AssertionError, match="no page"):
        _ = rows.write_places
