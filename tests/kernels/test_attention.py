from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, Row, each_row, rows_of, threads
from torch import Tensor

from antiphon.kernels.attention import (
    QUERIES_MAX,
    AttentionMetadata,
    ImageRows,
    KvShape,
    TextRows,
    bidirectional_attention,
    paged_attention,
)
from antiphon.kernels.kv import (
    UNSCALED,
    as_bytes,
    key_pages_shape,
    page_slots,
    store_kv,
    value_pages_shape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.kernels.kv import KvScales

PAGES, PAGE_TOKENS = 300, 4
BACKENDS = rows_of(paged_attention)
"""Where hundreds of cases are compared, a test compares one with all of them."""
every_backend = each_row(paged_attention, "attention")
every_invariant_backend = each_row(paged_attention, "attention", invariant=True)


def ints(values: Sequence[object] | np.ndarray) -> np.ndarray:
    return np.array(values, np.int32)


def a_shape(
    heads: int = 2,
    group: int = 3,
    head_size: int = 8,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    page_tokens: int = PAGE_TOKENS,
) -> KvShape:
    return KvShape(page_tokens, heads, group, head_size, dtype, window)


def row_by_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as the textbook has it: one row at a time, and of each query one softmax."""
    shape, out = rows.shape, list[Tensor]()
    kv_heads = np.arange(q.shape[1]) // shape.queries_per_head
    sink = torch.full(q.shape[1:2], -torch.inf) if sinks is None else sinks
    for row, queries in enumerate(q.double().split(rows.query_len.tolist())):
        end = int(rows.kv_len[row])
        query, key = np.arange(end - len(queries), end)[:, None], np.arange(end)
        window = shape.window or end
        seen = (key > query - window) & (key < query + (window if shape.bidirectional else 1))
        if shape.chunk is not None:
            seen &= key >= query // shape.chunk * shape.chunk
        key = key[seen.any(axis=0)]  # no other is there
        unseen = torch.as_tensor(~seen[:, key])
        pages, offsets = rows.page_table[row, key // shape.page_tokens], key % shape.page_tokens
        k, v = (cached[pages, offsets][:, kv_heads].double() for cached in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(unseen, -torch.inf)
        of_sink = sink.double()[:, None, None].expand(-1, len(queries), 1)
        shares = torch.cat((scores, of_sink), dim=-1).softmax(dim=-1)[..., :-1]
        out.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(out).to(q.dtype)


def pages_of(keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (P, S, H, D) as the pages of a model that computes in `dtype`.

    What no token has is a NaN, or the last code of eight bits, which is one.
    """
    pages, page_tokens, heads, size = keys.shape
    page = (pages, page_tokens, heads, size, dtype)
    stored: list[Tensor] = []
    for shape in (key_pages_shape(*page), value_pages_shape(*page)):
        fresh = torch.empty(shape, dtype=keys.dtype)
        as_bytes(fresh).fill_(255 if keys.element_size() == 1 else torch.nan)
        stored.append(fresh)
    slots = page_slots(page_tokens) * torch.arange(pages)[:, None] + torch.arange(page_tokens)
    k, v = (as_bytes(kept).flatten(0, 1) for kept in (keys, values))
    store_kv(k, v, as_bytes(stored[0]), as_bytes(stored[1]), slots.flatten())
    return stored[0], stored[1]


class Case:
    def __init__(self, seed: int, query_len: list[int], prefix: list[int], shape: KvShape) -> None:
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        query, kv = ints(query_len), ints(query_len) + ints(prefix)
        needed = -(-kv // shape.page_tokens)
        table = np.full((len(query), needed.max()), -1, np.int32)
        free = random.permutation(PAGES).astype(np.int32)
        for row, count in enumerate(needed):
            table[row, :count], free = free[:count], free[count:]
        self.rows = AttentionMetadata(shape, table, query, kv)
        cache = (PAGES, shape.page_tokens, shape.heads, shape.head_size)
        self.keys = torch.full(cache, torch.nan, dtype=shape.dtype)
        self.values = self.keys.clone()
        self._fill(generator, kv)
        tokens = (int(query.sum()), shape.heads * shape.queries_per_head, shape.head_size)
        self.q = torch.randn(tokens, generator=generator).to(shape.dtype)
        self.scale = shape.head_size**-0.5

    def _fill(self, generator: torch.Generator, kv: np.ndarray) -> None:
        """Write what the rows may read; all else stays NaN, and would show."""
        shape = self.rows.shape
        for row, length in enumerate(kv):
            seen = np.arange(length)
            if shape.window is not None:
                first = length - self.rows.query_len[row] - shape.window + 1
                seen = seen[max(0, first) :]
            table = self.rows.page_table[row]
            pages, offsets = table[seen // shape.page_tokens], seen % shape.page_tokens
            size = (len(seen), shape.heads, shape.head_size)
            self.keys[pages, offsets] = torch.randn(size, generator=generator).to(self.keys.dtype)
            self.values[pages, offsets] = torch.randn(size, generator=generator).to(self.keys.dtype)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, float]:
        return self.q, *self.pages, self.rows, self.scale

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values as attention reads them."""
        return pages_of(self.keys, self.values, self.q.dtype)

    def piece(self, row: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """The queries of a part of a row, and where they are among all."""
        start = int(self.rows.query_len[:row].sum()) + first
        return self.q[start : start + count], torch.arange(start, start + count)

    def chunk(self, row: int, first: int, count: int) -> AttentionMetadata:
        """A part of a row as the only row of a pass."""
        left = int(self.rows.query_len[row]) - first - count
        return AttentionMetadata(
            self.rows.shape,
            self.rows.page_table[row : row + 1],
            ints([count]),
            self.rows.kv_len[row : row + 1] - np.int32(left),
        )


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


@lru_cache(maxsize=2)  # every backend is asked in turn
def textbook(shape: KvShape, lengths: tuple[tuple[int, ...], ...], scale: float | None) -> Tensor:
    """What is right of the case of these lengths, query and prefix, and this scale."""
    query_len, prefix = lengths
    case = Case(3, list(query_len), list(prefix), shape)
    return row_by_row(case.q, case.keys, case.values, case.rows, scale or case.scale)


def assert_equals_the_textbook(
    attention: Row,
    shape: KvShape,
    query_len: list[int],
    prefix: list[int],
    *,
    tolerance: float = 1e-5,
    scale: float | None = None,
) -> None:
    case = Case(3, query_len, prefix, shape)
    found = attention(case.q, *case.pages, case.rows, scale or case.scale)
    want = textbook(shape, (tuple(query_len), tuple(prefix)), scale)
    torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)


@every_backend
@pytest.mark.parametrize("window", [None, 1, 6, 50, 70])
@pytest.mark.parametrize(("query_len", "prefix"), ROWS.values(), ids=ROWS.keys())
def test_attention_equals_the_textbook_and_reads_nothing_else(
    attention: Row, query_len: list[int], prefix: list[int], window: int | None
) -> None:
    assert_equals_the_textbook(attention, a_shape(window=window), query_len, prefix)


@every_backend
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 1), (1, 4), (2, 7), (1, 13)])
def test_heads_may_be_grouped_or_not(
    attention: Row, heads: int, group: int, window: int | None
) -> None:
    shape = a_shape(heads, group, window=window)
    assert_equals_the_textbook(attention, shape, [1, 12, 1, 4], [40, 3, 100, 9])


@every_backend
@pytest.mark.parametrize("head_size", [2, 6, 16, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_may_have_any_even_size(attention: Row, head_size: int, dtype: torch.dtype) -> None:
    shape = a_shape(2, 3, head_size, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    assert_equals_the_textbook(
        attention, shape, [1, 12, 1, 4], [40, 3, 100, 9], tolerance=tolerance
    )


LENGTHS = {**ROWS, "many decodes": ([1] * 40, [0, 1, 15, 16, 17, 63, 127, 128, 129, 200] * 4)}


@pytest.mark.parametrize("window", [None, 1, 50, 70])
@pytest.mark.parametrize(("query_len", "prefix"), LENGTHS.values(), ids=LENGTHS.keys())
def test_pages_may_be_longer(query_len: list[int], prefix: list[int], window: int | None) -> None:
    """Keys of whole pages may be read where they lie, sixteen at a time, and no others."""
    for page_tokens, head_size in product((16, 32, 48), (32, 40, 64)):
        shape = a_shape(2, 3, head_size, torch.bfloat16, window, page_tokens)
        assert_all_equal_the_shaped_textbook(Case(3, query_len, prefix, shape))


@every_invariant_backend
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_size", [40, 64])
def test_the_length_of_a_page_changes_nothing(
    attention: Row, head_size: int, window: int | None
) -> None:
    lengths = ROWS["decodes of many lengths"]
    cases = [
        Case(8, *lengths, a_shape(3, 3, head_size, torch.bfloat16, window, tokens))
        for tokens in (4, 16, 64)
    ]
    results = [attention(*case.arguments()) for case in cases]
    assert all(torch.equal(result, results[0]) for result in results)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_is_close_to_the_textbook(
    attention: Row, dtype: torch.dtype
) -> None:
    if attention.isa and dtype is torch.float16:
        with pytest.raises(RuntimeError, match="no kernel for Half"):
            assert_equals_the_textbook(attention, a_shape(dtype=dtype), [1], [4])
        return
    shape = a_shape(dtype=dtype)
    assert_equals_the_textbook(attention, shape, *ROWS["decodes of many lengths"], tolerance=0.02)


@every_backend
def test_scores_far_apart_leave_one_key(attention: Row) -> None:
    """Weights that underflow, and maxima that come late."""
    lengths = ROWS["all at once"]
    assert_equals_the_textbook(attention, a_shape(), *lengths, tolerance=1e-4, scale=300.0)


CAPS = [0.3, 5.0]
"""Of scores that are about one: in the bend of the tangent, and where it is nearly straight."""
SINKS = {
    "of all sizes": lambda count: torch.linspace(-6, 6, count),
    "all or nothing": lambda count: torch.linspace(-300, 300, count),
    "one of no weight": lambda count: torch.tensor([-torch.inf] + [0.0] * (count - 1)),
}
every_sink = pytest.mark.parametrize("sinks_of", SINKS.values(), ids=SINKS.keys())


def assert_all_equal_the_shaped_textbook(
    case: Case, softcap: float | None = None, sinks: Tensor | None = None
) -> None:
    tolerance = 1e-5 if case.q.dtype is torch.float32 else 0.02
    want = row_by_row(case.q, case.keys, case.values, case.rows, case.scale, softcap, sinks)
    arguments = case.arguments()
    for attention in BACKENDS:
        found = attention(*arguments, UNSCALED, softcap, sinks)
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("query_len", "prefix"), ROWS.values(), ids=ROWS.keys())
def test_scores_are_capped(
    query_len: list[int],
    prefix: list[int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
) -> None:
    case = Case(3, query_len, prefix, a_shape(dtype=dtype, window=window))
    assert_all_equal_the_shaped_textbook(case, softcap, None)


@every_sink
@pytest.mark.parametrize("softcap", [None, CAPS[0]])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("query_len", "prefix"), ROWS.values(), ids=ROWS.keys())
def test_a_sink_takes_its_part_of_each_head(
    query_len: list[int],
    prefix: list[int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sinks_of: Callable[[int], Tensor],
) -> None:
    case = Case(3, query_len, prefix, a_shape(dtype=dtype, window=window))
    assert_all_equal_the_shaped_textbook(case, softcap, sinks_of(6).to(dtype))


@pytest.mark.parametrize("prefix", [511, 512, 1100])
def test_a_sink_takes_its_part_once_of_a_row_that_is_shared_out(prefix: int) -> None:
    case = Case(3, [1], [prefix], a_shape(1, 3, page_tokens=16))
    sinks = torch.tensor([2.0, 7.0, -1.0])
    assert_all_equal_the_shaped_textbook(case, 3.0, sinks)


@every_invariant_backend
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capped_query_with_a_sink_has_the_same_bits_in_any_chunk(
    attention: Row, dtype: torch.dtype, window: int | None
) -> None:
    case = Case(5, *ROWS["all at once"], a_shape(2, 3, 32, dtype, window, 16))
    sinks = torch.linspace(-1, 3, 6, dtype=dtype)
    assert_same_bits_in_any_chunk(attention, case, UNSCALED, 0.7, sinks)


@every_invariant_backend
def test_a_cap_and_sinks_that_do_not_fit_are_refused(attention: Row) -> None:
    case = Case(1, [1], [4], a_shape())
    with pytest.raises(RuntimeError, match="a cap is positive"):
        attention(*case.arguments(), UNSCALED, 0.0)
    for sinks in (torch.zeros(5), torch.zeros(6, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="expected 6 of Float"):
            attention(*case.arguments(), UNSCALED, None, sinks)


@every_invariant_backend
@pytest.mark.parametrize("window", [None, 1, 50, 70])
@pytest.mark.parametrize("page_tokens", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bits_alone_in_a_batch_and_in_any_chunk(
    attention: Row, dtype: torch.dtype, page_tokens: int, window: int | None
) -> None:
    case = Case(5, *ROWS["all at once"], a_shape(2, 3, 32, dtype, window, page_tokens))
    assert_same_bits_in_any_chunk(attention, case)


def assert_same_bits_in_any_chunk(
    attention: Row, case: Case, *more: KvScales | float | Tensor
) -> None:
    """With scales, and then a cap and sinks, if any."""
    together, pages = attention(*case.arguments(), *more), case.pages
    for row, length in enumerate(case.rows.query_len):
        for size in (1, 5, 64, 200):
            for first in range(0, int(length), size):
                count = min(size, int(length) - first)
                q, where = case.piece(row, first, count)
                chunk = case.chunk(row, first, count)
                apart = attention(q, *pages, chunk, case.scale, *more)
                assert torch.equal(apart, together[where]), (row, first, count)


@every_invariant_backend
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_a_decode_row_has_the_same_bits_in_a_batch_of_64(attention: Row, page_tokens: int) -> None:
    shape = a_shape(dtype=torch.bfloat16, head_size=64, page_tokens=page_tokens)
    case = Case(6, [1] * 64, [3, 15, 16, 17] * 16, shape)
    together, pages = attention(*case.arguments()), case.pages
    for row in range(64):
        q, where = case.piece(row, 0, 1)
        apart = attention(q, *pages, case.chunk(row, 0, 1), case.scale)
        assert torch.equal(apart, together[where])


SEGMENTS = [510, 511, 512, 513, 1022, 1023, 1024, 1100]
"""Earlier tokens of decodes about the ends of segments, in which long rows are shared out."""


@every_backend
@pytest.mark.parametrize("window", [None, 50, 600])
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_long_rows_equal_the_textbook_and_read_nothing_else(
    attention: Row, page_tokens: int, window: int | None
) -> None:
    shape = a_shape(1, 3, 8, window=window, page_tokens=page_tokens)
    for prefix in SEGMENTS:
        assert_equals_the_textbook(attention, shape, [1], [prefix])
        assert_equals_the_textbook(attention, shape, [3], [prefix])


@every_invariant_backend
@pytest.mark.parametrize("window", [None, 50, 600])
@pytest.mark.parametrize("head_size", [32, 40, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_row_has_the_bits_of_one_that_is_not_shared_out(
    attention: Row, dtype: torch.dtype, head_size: int, window: int | None
) -> None:
    """As the last query of a chunk it is computed by one thread."""
    for prefix in SEGMENTS:
        case = Case(9, [3], [prefix - 2], a_shape(1, 2, head_size, dtype, window, 16))
        together, pages = attention(*case.arguments()), case.pages
        for number in (1, 3):
            with threads(number):
                q, where = case.piece(0, 2, 1)
                apart = attention(q, *pages, case.chunk(0, 2, 1), case.scale)
            assert torch.equal(apart, together[where]), prefix


@pytest.mark.parametrize("window", [None, 1, 17, 33])
@pytest.mark.parametrize("page_tokens", [1, 2, 3, 5, 16, 24, 32, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_may_have_any_number_of_tokens(
    dtype: torch.dtype, page_tokens: int, window: int | None
) -> None:
    lengths = [1, 1, 1, 1, 3, 2], [0, 15, 16, 63, 64, 70]
    shape = a_shape(1, 2, 48, dtype, window, page_tokens)
    assert_all_equal_the_shaped_textbook(Case(3, *lengths, shape))


@every_invariant_backend
def test_the_number_of_threads_changes_nothing(attention: Row) -> None:
    results: list[Tensor] = []
    for number in (1, 2, 3):
        with threads(number):
            case = Case(7, *ROWS["all at once"], a_shape())
            results.append(attention(*case.arguments()))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_token_without_a_page_is_our_bug() -> None:
    rows = AttentionMetadata(a_shape(), ints([[7, -1]]), ints([1]), ints([5]))
    with pytest.raises(AssertionError, match="no page"):
        _ = rows.slot_mapping
    if ISAS:
        with pytest.raises(RuntimeError, match="no page"):
            _ = rows.compiled


@every_invariant_backend
def test_a_page_that_the_cache_does_not_have_is_refused(attention: Row) -> None:
    case = Case(1, [1], [4], a_shape())
    case.rows.page_table[0, 1] = PAGES
    with pytest.raises(RuntimeError, match="page 300 of 300"):
        attention(*case.arguments())


@every_backend
@pytest.mark.parametrize("chunk", [4, 20, 1000])
def test_a_query_sees_no_other_run_than_its_own(attention: Row, chunk: int) -> None:
    case = Case(0, [1, 50, 1, 7, 21], [0, 13, 39, 20, 0], a_shape())
    whole = replace(case.rows, shape=replace(case.rows.shape, chunk=chunk))
    rows = AttentionMetadata.of(whole.shape, whole.page_table, whole.query_len, whole.kv_len)
    assert torch.equal(rows.slot_mapping, case.rows.slot_mapping)
    expected = row_by_row(case.q, case.keys, case.values, whole, case.scale)
    found = attention(case.q, *case.pages, rows, case.scale)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("window", [None, 300])
def test_rows_that_see_both_ways_see_what_is_cached_before_them(window: int | None) -> None:
    """As images do: rows of a pass whose tokens before them are cached."""
    shape = replace(a_shape(window=window), bidirectional=True)
    case = Case(7, [5, 1, 16, QUERIES_MAX + 5], [50, 3, 0, 90], shape)
    expected = row_by_row(case.q, case.keys, case.values, case.rows, case.scale)
    found = paged_attention.reference(*case.arguments())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_image_rows_are_the_parts_of_images_in_a_pass() -> None:
    """A decode row, an image resumed in its midst, a text, and two images that adjoin."""
    table = np.arange(32, dtype=np.int32).reshape(4, 8)
    rows = AttentionMetadata(a_shape(), table, ints([1, 5, 2, 7]), ints([9, 8, 6, 11]))
    ahead = ints([0, *(2, 1, 0, 0, 0), *(0, 0), *(0, 2, 1, 0, 1, 0, 0)])
    images = ImageRows(rows, ahead)
    assert images.tokens.tolist() == [1, 2, 3, 9, 10, 11, 12, 13]
    assert images.rows.query_len.tolist() == [3, 3, 2]
    assert images.rows.kv_len.tolist() == [6, 8, 10]
    assert images.rows.page_table[:, 0].tolist() == [8, 24, 24]
    assert images.rows.shape.bidirectional


@each_row(bidirectional_attention)
@pytest.mark.parametrize("window", [None, 1, 9, QUERIES_MAX + 40])
@pytest.mark.parametrize("shared", [1, 3])
def test_every_token_sees_its_row_and_no_other(row: Row, shared: int, window: int | None) -> None:
    lengths = [1, 30, 2 * QUERIES_MAX + 7, 8]
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), shared * HEADS, SIZE)
    k, v = torch.randn(2, sum(lengths), HEADS, SIZE)
    expected = defined(q, k, v, lengths, 0.3, window)
    found = row(q, k, v, TextRows(lengths), 0.3, window)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@each_row(bidirectional_attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_its_bits_whatever_is_beside_it(row: Row, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 60, HEADS, SIZE).to(dtype)
    together = row(q, k, v, TextRows([20, 40]), 0.3, 5)
    alone = row(q[20:], k[20:], v[20:], TextRows([40]), 0.3, 5)
    assert torch.equal(together[20:], alone)


@each_row(bidirectional_attention)
@pytest.mark.parametrize("size", [6, 32, 64, 256])
def test_rows_that_see_both_ways_agree_with_float64_in_bfloat16(row: Row, size: int) -> None:
    lengths = [1, 5, 63, 64, 65, 130, 530]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), HEADS, size).bfloat16()
    for window in (None, 20):
        expected = defined(q, k, v, lengths, size**-0.5, window)
        found = row(q, k, v, TextRows(lengths), size**-0.5, window)
        torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0.02)
