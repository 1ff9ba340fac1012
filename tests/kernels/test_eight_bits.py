"""Keys and values in eight bits: every code and every rounding, and attention over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, Row, each_row
from tests.kernels.test_attention import (
    BACKENDS,
    ROWS,
    Case,
    a_shape,
    assert_same_bits_in_any_chunk,
    ints,
    pages_of,
    row_by_row,
)
from tests.kernels.test_stack import PASSES, a_world, assert_has_the_bits_of_its_operations
from torch import Tensor

from antiphon.kernels.attention import AttentionMetadata, KvShape, paged_attention
from antiphon.kernels.kv import (
    FP8_MAX,
    KvScales,
    LayerKvCache,
    as_bytes,
    quantize_fp8,
    read_keys,
    read_values,
)
from antiphon.kernels.rotary import qk_norm_rope_store

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = KvScales(0.37, 1.9)

every_format = pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
every_attention = each_row(paged_attention, "attention")
every_store = each_row(qk_norm_rope_store, "store")


def every_code(format_: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(format_)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal, and NaN where a NaN belongs."""
    nan = expected.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(found[~nan], expected[~nan])


def in_eight_bits(case: Case, format_: torch.dtype, scales: KvScales = SCALES) -> Case:
    """A case whose cache is kept so; what no kernel may read is a NaN still."""
    case.keys = quantize_fp8(case.keys, format_, scales.key)
    case.values = quantize_fp8(case.values, format_, scales.value)
    return case


def assert_all_equal_the_textbook(case: Case, format_: torch.dtype) -> None:
    """Attention over what is kept, as numbers of many bits."""
    case, tolerance = in_eight_bits(case, format_), 1e-5 if case.q.dtype is torch.float32 else 0.03
    keys, values = case.keys.float() * SCALES.key, case.values.float() * SCALES.value
    expected = row_by_row(case.q.float(), keys, values, case.rows, case.scale)
    arguments = case.arguments()
    for attention in BACKENDS:
        found = attention(*arguments, SCALES).float()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@every_attention
@every_format
@every_dtype
@pytest.mark.parametrize("size", [2, 6, 16, 40, 64, 250, 256])
def test_every_code_is_read_as_a_value(
    attention: Row, format_: torch.dtype, dtype: torch.dtype, size: int
) -> None:
    """Of one key, attention is its value."""
    codes = every_code(format_).view(torch.uint8).repeat(2).view(format_)
    for first in range(0, 256, size):
        values = codes[first : first + size].view(1, 1, 1, size)
        shape = KvShape(1, 1, 1, size, dtype)
        rows = AttentionMetadata(shape, ints([[0]]), ints([1]), ints([1]))
        q, keys = torch.zeros(1, 1, size, dtype=dtype), torch.zeros_like(values.view(torch.uint8))
        pages = pages_of(keys.view(format_), values, dtype)
        found = attention(q, *pages, rows, 1.0, KvScales())
        expected = values.to(dtype).view(1, 1, size)
        # Zero is zero: attention makes one sign of both.
        assert same(found, expected + 0.0)


@every_attention
@every_format
@every_dtype
def test_every_code_is_read_as_a_key(
    attention: Row, format_: torch.dtype, dtype: torch.dtype
) -> None:
    """A query that sees one number of one of two keys, in the steep part of the softmax."""
    codes = every_code(format_)
    exact = codes.double()
    usual = torch.nan_to_num(exact, nan=1.0, posinf=1.0, neginf=1.0)
    nearest = torch.exp2(-torch.floor(torch.log2(torch.where(usual == 0, 1.0, usual).abs())))
    keys = torch.zeros(2, 1, 1, 256, dtype=torch.uint8)
    keys[1, 0, 0] = codes.view(torch.uint8)
    values = torch.zeros(2, 1, 1, 256, dtype=torch.uint8)
    values[1] = torch.ones(1, dtype=format_).view(torch.uint8)
    rows = AttentionMetadata(
        KvShape(1, 1, 1, 256, dtype), ints([[0, 1]] * 256), ints([1] * 256), ints([2] * 256)
    )
    for special in (False, True):
        chosen = exact.isnan() if special else exact.isfinite()
        q = torch.diag(torch.where(chosen, nearest, 0.0)).to(dtype)[:, None]
        # A query of all zeros times what is not finite is not finite either: those by themselves.
        kept = keys.clone()
        kept[1, 0, 0, ~chosen] = 0
        pages = pages_of(kept.view(format_), values.view(format_), dtype)
        found = attention(q, *pages, rows, 1.0, KvScales())
        wanted = torch.sigmoid(exact * nearest)[chosen]
        tolerance = 1e-6 if dtype is torch.float32 else 4e-3
        if special:
            assert found[chosen].isnan().all()
        else:
            np.testing.assert_allclose(found[chosen][:, 0, 0].double(), wanted, atol=tolerance)


def awkward(dtype: torch.dtype) -> Tensor:
    """Every bfloat16, and of floats those about each border between two codes, too."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if dtype is torch.bfloat16:
        return every
    borders: list[Tensor] = []
    for format_ in FORMATS.values():
        codes = every_code(format_).float()
        steps = codes[codes.isfinite()].sort().values
        middle = (steps[1:] + steps[:-1]) / 2
        inf = torch.tensor(torch.inf)
        borders += [middle, middle.nextafter(inf), middle.nextafter(-inf)]
    found = torch.cat((every.float(), *borders))
    return torch.cat((found, found.new_zeros(-len(found) % 16)))


@every_store
@every_format
@every_dtype
@pytest.mark.parametrize("scales", [KvScales(), SCALES], ids=["", "scaled"])
@pytest.mark.parametrize("size", [16, 40])
def test_every_number_is_kept_as_the_nearest_code(
    store: Row, format_: torch.dtype, dtype: torch.dtype, scales: KvScales, size: int
) -> None:
    numbers = awkward(dtype)
    numbers = torch.cat((numbers, numbers.new_zeros(-len(numbers) % size)))
    tokens = len(numbers) // size
    heads = torch.zeros(tokens, 3, size, dtype=dtype)
    heads[:, 1] = numbers.view(tokens, size)
    heads[:, 2] = numbers.view(tokens, size)
    empty = torch.full((tokens, 1, 1, size), 7, dtype=torch.uint8).view(format_)
    pages = pages_of(empty, empty, dtype)
    places, turns = 2 * torch.arange(tokens), torch.ones(tokens, 1, 0, dtype=dtype)
    store(heads, turns, turns, *pages, places, None, scales)
    cache = read_keys(pages[0], places), read_values(pages[1], places)
    for kept, scale in zip(cache, scales, strict=True):
        most = FP8_MAX[format_]
        # As torch rounds, but for what is too great, which torch makes infinite or NaN.
        divided = (numbers.float() / torch.tensor(scale)).clamp(-most, most)
        assert same(kept.flatten().float(), divided.to(format_).float())
        signs = (as_bytes(kept).flatten() >> 7).bool()
        assert torch.equal(signs[~numbers.isnan()], numbers.signbit()[~numbers.isnan()])


@every_store
@every_format
@every_dtype
def test_keys_are_rotated_before_they_are_rounded(
    store: Row, format_: torch.dtype, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(9, 4, 40, generator=generator).to(dtype)
    turns = torch.rand(2, 9, 1, 24, generator=generator).to(dtype)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for kept_in in (format_, dtype):
        room = quantize_fp8(torch.zeros(3, 4, 1, 40, dtype=dtype), kept_in, 1.0)
        pages, places = pages_of(room, room, dtype), torch.arange(9)
        q = store(heads, *turns, *pages, places, None, SCALES)
        results.append((q, read_keys(pages[0], places), read_values(pages[1], places)))
    (q, keys, values), (plain_q, plain_keys, plain_values) = results
    assert torch.equal(q, plain_q)
    assert torch.equal(as_bytes(keys), as_bytes(quantize_fp8(plain_keys, format_, SCALES.key)))
    rounded = quantize_fp8(plain_values, format_, SCALES.value)
    assert torch.equal(as_bytes(values), as_bytes(rounded))


@every_format
@every_dtype
@pytest.mark.parametrize("window", [None, 6, 70])
@pytest.mark.parametrize(("query_len", "prefix"), ROWS.values(), ids=ROWS.keys())
def test_attention_equals_the_textbook_and_reads_nothing_else(
    format_: torch.dtype,
    dtype: torch.dtype,
    query_len: list[int],
    prefix: list[int],
    window: int | None,
) -> None:
    case = Case(3, query_len, prefix, a_shape(dtype=dtype, window=window))
    assert_all_equal_the_textbook(case, format_)


@every_format
@pytest.mark.parametrize("head_size", [2, 6, 40, 64, 80, 128, 256])
@every_dtype
def test_heads_may_have_any_even_size(
    format_: torch.dtype, head_size: int, dtype: torch.dtype
) -> None:
    case = Case(3, [1, 12, 1, 4], [40, 3, 100, 9], a_shape(2, 3, head_size, dtype))
    assert_all_equal_the_textbook(case, format_)


@every_format
@pytest.mark.parametrize("window", [None, 1, 6, 17, 50])
@pytest.mark.parametrize(
    ("group", "head_size"), [(1, 64), (3, 48), (4, 16), (6, 32), (7, 64), (13, 32)]
)
@pytest.mark.parametrize("page_tokens", [16, 48])
def test_codes_of_whole_pages_may_be_widened_where_they_lie(
    format_: torch.dtype, page_tokens: int, group: int, head_size: int, window: int | None
) -> None:
    """By tiles of any height, up to so many queries; what no query sees is a NaN."""
    shape = a_shape(2, group, head_size, torch.bfloat16, window, page_tokens)
    for lengths in ([1] * 9, [0, 1, 15, 16, 17, 63, 64, 65, 200]), ([3, 2, 12], [14, 61, 70]):
        assert_all_equal_the_textbook(Case(3, *lengths, shape), format_)


@each_row(paged_attention, "attention", invariant=True)
@every_format
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("group", [3, 7, 13])
def test_a_query_has_the_same_bits_where_codes_are_copied_and_where_not(
    attention: Row, format_: torch.dtype, group: int, window: int | None
) -> None:
    """They are copied of short pages, and for many queries."""
    lengths = ROWS["all at once"]
    results: list[Tensor] = []
    for page_tokens in (4, 16):
        shape = a_shape(2, group, 32, torch.bfloat16, window, page_tokens)
        case = in_eight_bits(Case(8, *lengths, shape), format_)
        results.append(attention(*case.arguments(), SCALES))
    assert torch.equal(*results)
    assert_same_bits_in_any_chunk(attention, case, SCALES)


@every_attention
@every_format
def test_caps_and_sinks_work_on_it(attention: Row, format_: torch.dtype) -> None:
    case = in_eight_bits(Case(3, *ROWS["all at once"], a_shape()), format_)
    keys, values = (
        kept.to(torch.float32) * scale
        for kept, scale in zip((case.keys, case.values), SCALES, strict=True)
    )
    sinks = torch.linspace(-1, 1, 6)
    found = attention(*case.arguments(), SCALES, 0.5, sinks)
    expected = row_by_row(case.q, keys, values, case.rows, case.scale, 0.5, sinks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@each_row(paged_attention, "attention", invariant=True)
@every_format
@every_dtype
def test_a_query_has_the_same_bits_alone_in_a_batch_and_in_any_chunk(
    attention: Row, format_: torch.dtype, dtype: torch.dtype
) -> None:
    case = in_eight_bits(Case(5, *ROWS["all at once"], a_shape(2, 3, 16, dtype)), format_)
    assert_same_bits_in_any_chunk(attention, case, SCALES)


@pytest.mark.parametrize("isa", ISAS)
@every_format
@every_dtype
@pytest.mark.parametrize("head_norms", [False, True], ids=["", "normed heads"])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_a_stack_has_the_bits_of_its_operations(
    isa: str,
    format_: torch.dtype,
    dtype: torch.dtype,
    query_len: list[int],
    prefix: list[int],
    head_norms: bool,
) -> None:
    world = a_world(dtype, query_len, prefix, head_norms=head_norms)
    world.caches = [
        LayerKvCache(
            cache.group,
            quantize_fp8(cache.keys, format_, SCALES.key),
            quantize_fp8(cache.values, format_, SCALES.value),
            KvScales(SCALES.key * (index + 1), SCALES.value),
        )
        for index, cache in enumerate(world.caches)
    ]
    assert_has_the_bits_of_its_operations(world, isa)
