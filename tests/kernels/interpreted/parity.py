from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
import torch
from tests.kernels.interpreted import checks
from tests.kernels.interpreted.checks import FAST, LONG, RAGGED, Rows, a_shape
from tests.kernels.interpreted.sanitizer import sanitized

from antiphon.kernels.triton import (
    activation,
    attention,
    decode_rows,
    experts,
    futures,
    heads,
    latent,
    linear_fp8,
    linear_grouped,
    linear_int8,
    linear_tiled,
    logits,
    norm,
    pages,
    recurrent,
    rounding,
    routing,
    sampling,
    whole,
)
from antiphon.kernels.triton.interpreter import interpreted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.kernels.norm import NormKind
    from antiphon.kernels.routing import RoutingSpec


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    with sanitized() if interpreted() else nullcontext():
        yield


dtypes = pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
in_codes = pytest.mark.parametrize(
    ("codes", "dtype"),
    [
        *(("e2m1", dtype) for dtype in checks.DTYPES),
        *(("unsigned", torch.bfloat16), ("signed", torch.float16), ("bytes", torch.float32)),
    ],
    ids=str,
)


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 1), (5, 192), (33, 1000), (3, 5000)])
def test_norms_equal_their_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    checks.check_rmsnorm(norm, rows, size, dtype)


def test_norms_read_rows_with_a_stride() -> None:
    wide = checks.randn(4, 300)
    weight = checks.randn(100)
    got = norm.rmsnorm(wide[:, 100:200], weight, 1e-5)
    checks.close(got, norm.rmsnorm(wide[:, 100:200].contiguous(), weight, 1e-5))


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_rows_that_are_not_finite_are_found(size: int) -> None:
    checks.check_finite(norm, size)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (7, 500), (3, 1024)])
def test_the_gated_activation_equals_its_reference(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    checks.check_silu_mul(activation, rows, width, dtype)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (5, 300)])
def test_activations_equal_their_references(rows: int, width: int, dtype: torch.dtype) -> None:
    checks.check_activations(activation, rows, width, dtype)


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (5, 192), (3, 5000)])
def test_layer_norms_equal_their_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    checks.check_layernorm(norm, rows, size, dtype)


@pytest.mark.parametrize("spec", checks.ROUTINGS, ids=str)
@pytest.mark.parametrize(("tokens", "count"), [(7, 12), (3, 60)])
def test_routing_equals_its_reference(tokens: int, count: int, spec: RoutingSpec) -> None:
    checks.check_route(routing, tokens, count, spec)


def test_routing_of_a_nan_names_an_expert() -> None:
    checks.check_route_of_nan(routing)


@dtypes
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, (4, 80, 24)), (9, (5, 40, 72)), (90, (3, 64, 64))]
)
def test_experts_equal_their_reference(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    checks.check_experts(experts, tokens, sizes, dtype=dtype)


@pytest.mark.parametrize("activation", ["gelu", (1.7, 0.5)])
@pytest.mark.parametrize("weighted_inputs", [False, True])
def test_experts_have_biases_and_activations(
    activation: str | tuple[float, float], *, weighted_inputs: bool
) -> None:
    checks.check_experts(
        experts, 5, (4, 40, 24), activation, bias=True, weighted_inputs=weighted_inputs
    )


@dtypes
def test_experts_of_8_bits_equal_their_reference(dtype: torch.dtype) -> None:
    checks.check_experts(experts, 9, (5, 300, 72), dtype=dtype, bias=True, groups=(128, 32))


@pytest.mark.parametrize("weighted_inputs", [False, True])
@pytest.mark.parametrize(
    ("tokens", "sizes", "groups"),
    [(1, (4, 80, 24), (80, 24)), (9, (5, 100, 72), (32, 72)), (33, (3, 64, 64), (64, 32))],
)
def test_experts_of_8_bits_have_any_size(
    tokens: int, sizes: tuple[int, int, int], groups: tuple[int, int], *, weighted_inputs: bool
) -> None:
    checks.check_experts(
        experts, tokens, sizes, (1.7, 0.5), weighted_inputs=weighted_inputs, groups=groups
    )


def test_experts_in_tiles_of_one_size_equal_their_reference() -> None:
    checks.check_experts(experts, 90, (3, 64, 64), bias=True, fixed=True)


@in_codes
def test_experts_in_groups_equal_their_reference(codes: checks.Codes, dtype: torch.dtype) -> None:
    checks.check_experts(
        experts, 9, (5, 160, 96), (1.7, 0.5), dtype, bias=True, groups=(64, 32), codes=codes
    )


@pytest.mark.parametrize(
    ("tokens", "sizes", "groups", "weighted_inputs"),
    [(1, (4, 96, 32), (96, 32), False), (40, (3, 64, 32), (32, 32), True)],
)
def test_experts_in_groups_have_any_size(
    tokens: int, sizes: tuple[int, int, int], groups: tuple[int, int], *, weighted_inputs: bool
) -> None:
    checks.check_experts(
        experts, tokens, sizes, weighted_inputs=weighted_inputs, groups=groups, codes="e2m1"
    )


@pytest.mark.parametrize("here", [range(1, 4), range(3, 5)], ids=str)
def test_experts_of_a_rank_equal_their_reference(here: range) -> None:
    checks.check_experts(experts, 9, (5, 40, 72), bias=True, here=here)


@pytest.mark.parametrize(("here", "fixed"), [(range(1, 3), False), (range(1, 2), True)], ids=str)
def test_experts_of_a_rank_may_have_many_pairs_or_none(here: range, *, fixed: bool) -> None:
    """Of three experts the second has no token, and the others have all."""
    checks.check_experts(experts, 90, (3, 32, 32), here=here, fixed=fixed)


@pytest.mark.parametrize(("codes", "weighted_inputs"), [("e4m3", False), ("e2m1", True)])
def test_experts_of_a_rank_may_be_quantized(codes: checks.Codes, *, weighted_inputs: bool) -> None:
    checks.check_experts(
        experts,
        5,
        (5, 64, 32),
        weighted_inputs=weighted_inputs,
        groups=(32, 32),
        codes=codes,
        here=range(2, 4),
    )


def test_tokens_that_are_skipped_are_not_rounded() -> None:
    checks.check_quantize(rounding, 9, 300, 128, skipped=5)


def test_experts_in_groups_and_tiles_of_one_size_equal_their_reference() -> None:
    checks.check_experts(experts, 40, (3, 64, 32), groups=(64, 16), codes="bytes", fixed=True)


@dtypes
def test_linears_of_8_bits_equal_their_reference(dtype: torch.dtype) -> None:
    checks.check_linear_fp8(linear_fp8, 9, (72, 300), 128, dtype, bias=True)
    checks.check_quantize(rounding, 9, 300, 128, dtype)


@pytest.mark.parametrize(
    ("tokens", "sizes", "group"),
    [
        *((0, (8, 64), 64), (1, (40, 100), 100), (2, (8, 2100), 2100)),
        *((20, (40, 96), 32), (40, (40, 100), 100), (70, (130, 96), 32)),
    ],
)
def test_linears_of_8_bits_have_any_size(tokens: int, sizes: tuple[int, int], group: int) -> None:
    checks.check_linear_fp8(linear_fp8, tokens, sizes, group)
    checks.check_quantize(rounding, tokens, sizes[1], group)


@in_codes
def test_linears_in_groups_equal_their_reference(codes: checks.Codes, dtype: torch.dtype) -> None:
    checks.check_linear_grouped(linear_grouped, 9, (72, 160), 64, codes, dtype, bias=True)


@pytest.mark.parametrize(
    ("tokens", "sizes", "group", "fixed"),
    [
        *((0, (8, 64), 64, False), (1, (40, 96), 96, False), (20, (40, 288), 96, False)),
        *((70, (130, 64), 32, False), (3, (70, 256), 128, True)),
    ],
)
def test_linears_in_groups_have_any_size(
    tokens: int, sizes: tuple[int, int], group: int, *, fixed: bool
) -> None:
    checks.check_linear_grouped(linear_grouped, tokens, sizes, group, fixed=fixed)


def test_bytes_have_groups_of_half_as_many_inputs() -> None:
    checks.check_linear_grouped(linear_grouped, 3, (40, 96), 16, "bytes")


@dtypes
def test_linears_in_nvfp4_equal_their_reference(dtype: torch.dtype) -> None:
    checks.check_linear_grouped(linear_grouped, 9, (72, 160), 16, "nvfp4", dtype, bias=True)


@pytest.mark.parametrize(
    ("tokens", "sizes", "codes", "fixed"),
    [
        *((0, (8, 64), "nvfp4", False), (1, (41, 32), "nvfp4", False)),
        *((70, (130, 96), "nvfp4", True), (3, (40, 96), "unsigned", False)),
    ],
)
def test_codes_of_4_bits_have_groups_of_16_inputs(
    tokens: int, sizes: tuple[int, int], codes: checks.Codes, *, fixed: bool
) -> None:
    checks.check_linear_grouped(linear_grouped, tokens, sizes, 16, codes, fixed=fixed)


@dtypes
def test_experts_in_nvfp4_equal_their_reference(dtype: torch.dtype) -> None:
    checks.check_experts(
        experts, 9, (5, 160, 96), dtype=dtype, bias=True, groups=(16, 16), codes="nvfp4"
    )


@dtypes
def test_linears_of_int8_equal_their_reference(dtype: torch.dtype) -> None:
    checks.check_linear_int8(linear_int8, 9, (72, 160), dtype, bias=True)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(0, (8, 64)), (1, (40, 96)), (2, (8, 2112)), (40, (40, 32)), (129, (33, 32))],
)
def test_linears_of_int8_have_any_size(tokens: int, sizes: tuple[int, int]) -> None:
    checks.check_linear_int8(linear_int8, tokens, sizes)


@dtypes
@pytest.mark.parametrize(
    ("tokens", "sizes", "bias"),
    [(0, (8, 64), False), (1, (40, 100), True), (3, (8200, 24), False), (65, (33, 200), True)],
)
def test_linears_in_tiles_equal_their_reference(
    tokens: int, sizes: tuple[int, int], dtype: torch.dtype, *, bias: bool
) -> None:
    checks.check_linear_tiled(linear_tiled, tokens, sizes, dtype, bias=bias)


@dtypes
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(0, (2, 8, 64)), (1, (5, 40, 100)), (70, (2, 8, 64))]
)
def test_linears_of_heads_equal_their_reference(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    checks.check_linear_heads(linear_tiled, tokens, sizes, dtype)


@pytest.mark.parametrize("over", ["head", "token"])
@pytest.mark.parametrize("kind", ["rms", "rms_wide", "layer"])
def test_heads_are_normalised_rotated_and_stored(
    kind: NormKind, over: Literal["head", "token"]
) -> None:
    checks.check_heads(heads, 9, (6, 2, 24, 24), kind, over)


@dtypes
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("shape", [(6, 2, 32, 32), (3, 3, 20, 8), (4, 1, 16, 0)])
def test_heads_are_rotated_and_stored(
    tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    checks.check_heads(heads, tokens, shape, dtype=dtype)


def test_half_precision_heads_are_normalised() -> None:
    checks.check_heads(heads, 5, (6, 2, 32, 32), "rms", dtype=torch.float16)


@dtypes
@pytest.mark.parametrize("window", [None, 7, 70])
def test_attention_equals_its_reference(window: int | None, dtype: torch.dtype) -> None:
    checks.check_attention(attention, a_shape(window=window, dtype=dtype))


@pytest.mark.parametrize("cache", checks.FP8, ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["ragged", "long"])
def test_attention_reads_a_cache_of_8_bits(
    lengths: tuple[list[int], list[int]], cache: torch.dtype
) -> None:
    checks.check_attention(attention, a_shape(), lengths, cache=cache)


@pytest.mark.parametrize("cache", checks.FP8, ids=str)
def test_heads_are_stored_in_8_bits(cache: torch.dtype) -> None:
    checks.check_heads(heads, 9, (6, 2, 32, 32), "rms", cache=cache)


@pytest.mark.parametrize("group", [1, 4, 20])
@pytest.mark.parametrize(("size", "page_tokens"), [(32, 16), (136, 1), (8, 128)])
def test_attention_packs_groups_of_any_size(group: int, size: int, page_tokens: int) -> None:
    shape = a_shape(1, group, size, page_tokens)
    checks.check_attention(attention, shape, ([1, 30], [17, 2]))


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["ragged", "long"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_has_soft_caps_and_sinks(
    lengths: tuple[list[int], list[int]], softcap: float | None, *, sinks: bool
) -> None:
    checks.check_attention(attention, a_shape(), lengths, softcap, sinks=sinks)


@pytest.mark.parametrize("window", [600, 40])
def test_splits_before_the_window_are_left_out(window: int) -> None:
    checks.check_attention(attention, a_shape(window=window), LONG)


@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["ragged", "long"])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_in_one_part_equals_its_reference(
    lengths: tuple[list[int], list[int]], window: int | None
) -> None:
    checks.check_attention(attention, a_shape(window=window), lengths, sinks=True, fixed=True)


def test_parts_of_a_row_are_as_long_as_few_splits_need() -> None:
    checks.check_attention(attention, a_shape(), LONG, sinks=True, programs=12)


def test_attention_of_a_row_does_not_depend_on_other_rows() -> None:
    alone, beside = Rows([1], [600], a_shape()), Rows([1, 1, 7], [600, 1200, 0], a_shape())
    beside.q[:1] = alone.q
    got = [
        attention.paged_attention(case.q, case.keys, case.values, case.rows, case.scale)[:1]
        for case in (alone, beside)
    ]
    checks.close(*got)


def test_a_row_without_a_page_is_refused() -> None:
    case = Rows([1, 3], [8, 0], a_shape())
    case.rows.page_table[1, 0] = -1
    with pytest.raises(RuntimeError, match="no page"):
        attention.paged_attention(case.q, case.keys, case.values, case.rows, case.scale)


def test_pages_beyond_2_to_the_31_elements_are_reached() -> None:
    checks.check_far_pages(attention, heads)


def test_latents_beyond_2_to_the_31_numbers_are_reached() -> None:
    checks.check_far_latents(latent)


def test_states_beyond_2_to_the_31_numbers_are_reached() -> None:
    checks.check_far_states(recurrent)


def test_greedy_takes_the_first_of_the_highest() -> None:
    checks.check_greedy(sampling)


@pytest.mark.parametrize("vocabulary", [1, 100, 2500])
def test_draws_equal_those_of_the_reference(vocabulary: int) -> None:
    checks.check_draw(sampling, vocabulary)


@pytest.mark.parametrize("vocabulary", [33, 1024, 2500])
def test_logits_are_penalised_biased_and_masked(vocabulary: int) -> None:
    checks.check_logits(logits, vocabulary)


@pytest.mark.parametrize("size", [40, 9000])
def test_pages_are_copied(size: int) -> None:
    checks.check_pages(pages, size)


def test_bytes_beyond_2_to_the_31_are_copied() -> None:
    checks.check_far_bytes(pages)


def test_futures_are_resolved_and_recorded() -> None:
    checks.check_futures(futures)


@dtypes
def test_attention_over_latents_equals_its_reference(dtype: torch.dtype) -> None:
    checks.check_latents(latent, 16, 20, FAST, dtype)


@pytest.mark.parametrize(("heads", "size"), [(20, 72), (3, 16)])
def test_attention_over_latents_takes_any_number_of_heads(heads: int, size: int) -> None:
    checks.check_latents(latent, heads, size)


@pytest.mark.parametrize("programs", [4096, 12])
def test_rows_of_many_latents_are_split(programs: int) -> None:
    checks.check_latents(latent, 20, 40, LONG, programs=programs)


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(torch.float32, checks.FP8[1]), *((dtype, checks.FP8[0]) for dtype in checks.DTYPES)],
    ids=str,
)
def test_attention_over_latents_of_8_bits_equals_its_reference(
    dtype: torch.dtype, cache: torch.dtype
) -> None:
    checks.check_latents(latent, 16, 20, FAST, dtype, cache=cache)


@pytest.mark.parametrize("fixed", [False, True])
def test_latents_of_8_bits_have_a_scale_as_keys_and_as_values(*, fixed: bool) -> None:
    checks.check_latent_scales(attention, fixed=fixed)


@dtypes
@pytest.mark.parametrize(("tokens", "sizes"), [(1, (64, 16)), (70, (72, 24))])
def test_latents_are_rotated_and_stored(
    tokens: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    checks.check_latent_store(latent, tokens, sizes, dtype)


@pytest.mark.parametrize("cache", checks.FP8, ids=str)
@dtypes
def test_latents_are_stored_in_8_bits(dtype: torch.dtype, cache: torch.dtype) -> None:
    checks.check_latent_store(latent, 70, (24, 8), dtype, cache)


@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float32), (20, torch.float16), (20, torch.bfloat16)], ids=str
)
def test_whole_texts_attend_in_both_directions(window: int | None, dtype: torch.dtype) -> None:
    checks.check_texts(whole, (70, 1, 130), (4, 2, 24), window, dtype)


RECURRENCES = ("ssd, a vector and a number", "ssd, without a norm", "gated delta, three vectors")


@dtypes
@pytest.mark.parametrize("kind", RECURRENCES)
def test_recurrences_equal_their_reference(kind: str, dtype: torch.dtype) -> None:
    checks.check_recurrence(recurrent, kind, dtype)


@pytest.mark.parametrize("kind", ["ssd, gated behind the norm", "gated delta, odd"])
def test_other_recurrences_equal_their_reference(kind: str) -> None:
    checks.check_recurrence(recurrent, kind)


def test_decode_rows_are_made_by_slot() -> None:
    checks.check_decode_rows(decode_rows)


F32 = torch.float32
norms = partial(checks.check_rmsnorm, rows=2, size=100, dtype=F32)
gated = partial(checks.check_silu_mul, rows=3, width=500, dtype=F32)
activations = partial(checks.check_activations, rows=3, width=100, dtype=F32)
layer_norms = partial(checks.check_layernorm, rows=2, size=100, dtype=F32)
groups = partial(checks.check_route, tokens=5, count=12, routing=checks.ROUTINGS[3])
routes = partial(checks.check_route, tokens=5, count=12, routing=checks.ROUTINGS[0])
few_experts = partial(checks.check_experts, tokens=9, sizes=(5, 40, 72), bias=True)
fp8_experts = partial(few_experts, sizes=(5, 160, 72), groups=(64, 32))
fp8_outputs = partial(few_experts, groups=(40, 72))
fp8_rows = partial(checks.check_linear_fp8, tokens=9, sizes=(40, 100), group=100, bias=True)
rounded_rows = partial(checks.check_quantize, tokens=9, inputs=100, group=100)
rounded_groups = partial(checks.check_quantize, tokens=9, inputs=300, group=64)
rounded_last = partial(rounded_rows, skipped=5)
tiled = partial(checks.check_linear_tiled, tokens=70, sizes=(40, 100), bias=True)
tiled_heads = partial(checks.check_linear_heads, tokens=70, sizes=(3, 40, 100))
in_groups = partial(checks.check_linear_grouped, tokens=9, sizes=(72, 160), group=64, bias=True)
in_int8 = partial(checks.check_linear_int8, tokens=9, sizes=(40, 160), bias=True)
in_nvfp4 = partial(in_groups, group=16, codes="nvfp4")
in_large_groups = partial(in_groups, sizes=(40, 256), group=128)
grouped_experts = partial(
    checks.check_experts, tokens=9, sizes=(5, 160, 96), bias=True, groups=(64, 32), codes="unsigned"
)
nvfp4_experts = partial(grouped_experts, groups=(16, 16), codes="nvfp4")
few_tiles = partial(checks.check_expert_tiles, tokens=9, sizes=(5, 40, 72))
many_tiles = partial(checks.check_expert_tiles, tokens=90, sizes=(3, 16, 16))
some_experts = partial(few_experts, here=range(2, 4))
some_tiles = partial(few_tiles, here=range(2, 4))
fp8_groups = partial(checks.check_linear_fp8, tokens=9, sizes=(72, 300), group=64)
few_heads = partial(checks.check_heads, tokens=3, shape=(6, 2, 24, 16))
many_heads = partial(checks.check_heads, tokens=30, shape=(6, 2, 24, 24))
normed_heads = partial(many_heads, tokens=3, kind="rms", over="token")
stored = partial(checks.check_heads, tokens=3, shape=(6, 2, 24, 16), cache=checks.FP8[1])
short = partial(checks.check_attention, shape=a_shape(), lengths=FAST)
eight_bits = partial(short, cache=checks.FP8[0])
windowed = partial(short, shape=a_shape(window=3))
long = partial(short, lengths=LONG)
few_splits = partial(long, programs=12)
ssd = partial(checks.check_recurrence, kind="ssd, odd")
delta = partial(checks.check_recurrence, kind="gated delta, odd")
latents = partial(checks.check_latents, queries_per_head=20, size=40, lengths=FAST)
many_latents = partial(latents, lengths=LONG)
narrow_latents = partial(latents, cache=checks.FP8[0])
latent_store = partial(checks.check_latent_store, tokens=70, sizes=(72, 24))
narrow_store = partial(latent_store, cache=checks.FP8[1])
latent_scales = checks.check_latent_scales
texts = partial(checks.check_texts, lengths=(70, 1, 130), shape=(4, 2, 24))
windowed_texts = partial(texts, window=20)
copied = partial(checks.check_pages, size=40)
draws = partial(checks.check_draw, vocabulary=300)
changes = partial(checks.check_logits, vocabulary=300)
MUTANTS: list[tuple[str, str, str, Callable[..., None]]] = [
    ("norm", "/ SIZE", "/ BLOCK", norms),
    ("norm", "+ eps", "", norms),
    ("norm", "normed, mask=inside", "normed", norms),
    (
        "norm",
        "place < size, other",
        "place < size - 1, other",
        partial(checks.check_finite, size=9),
    ),
    ("activation", "place % WIDTH", "place % BLOCK", gated),
    # What is read too much is not used, and only the sanitizer sees it.
    ("activation", "gate_up + first, mask=inside, other=0.0", "gate_up + first", gated),
    ("activation", "0.7071067811865476", "0.7", activations),
    ("activation", "0.044715 *", "0.05 *", activations),
    ("activation", "wide > limit, limit", "wide > 2 * limit, limit", activations),
    (
        "activation",
        "limit, tl.where(rest < -limit, -limit",
        "limit, tl.where(rest < -limit, 0",
        activations,
    ),
    ("activation", "(rest + 1.0)", "rest", activations),
    ("activation", "token * GATE_STRIDE", "token * WIDTH", activations),
    ("norm", "tl.where(inside, wide - mean[:, None], 0.0)", "wide - mean[:, None]", layer_norms),
    ("norm", "added.to(tl.float32)", "0 * added.to(tl.float32)", layer_norms),
    ("routing", "mine = expert == first", "mine = (expert == first) & (choice > 0)", routes),
    ("routing", "share / (tl.sum(share, axis=0) + nothing)", "share", routes),
    ("routing", "tl.static_range(BEST)", "tl.static_range(1)", groups),
    ("routing", "tl.where(mine, 1, kept)", "tl.where(mine, 1, 0)", groups),
    ("routing", "expert, GROUPS * EACH - 1)", "expert, GROUPS * EACH)", checks.check_route_of_nan),
    ("expert_tiles", "(number < expert)", "(number <= expert)", few_tiles),
    ("expert_tiles", "mask=mine == 1", "mask=mine >= 0", few_tiles),
    (
        "expert_tiles",
        "next_place += tl.sum(mine, axis=0)",
        "next_place += 0",
        partial(many_tiles, tokens=700),
    ),
    ("expert_tiles", "axis=0) <= tile)", "axis=0) < tile)", few_tiles),
    ("expert_tiles", "(tile - before) * BLOCK_M", "0", many_tiles),
    ("expert_tiles", "// size + min(pairs, experts)", "// size + 1", few_tiles),
    ("expert_tiles", "number - first, -1)", "number, -1)", some_tiles),
    ("expert_tiles", "number - first, -1)", "number - first, number)", some_tiles),
    ("expert_tiles", "tl.where(pair < pairs, number, EXPERTS)", "number", some_tiles),
    ("experts_grouped", "place // 2 + place % 2 * WIDTH", "place // 2", grouped_experts),
    ("experts_grouped", "place < 2 * WIDTH", "place >= 0", grouped_experts),
    ("experts_grouped", "(pair // TOP_K)", "pair", grouped_experts),
    ("experts_grouped", "(2 * WIDTH * HIDDEN * BITS", "(WIDTH * HIDDEN * BITS", grouped_experts),
    ("experts_grouped", "codes + which * (HIDDEN", "codes + 0 * (HIDDEN", grouped_experts),
    ("experts_grouped", "// GROUP * 2 * WIDTH", "// GROUP * WIDTH", grouped_experts),
    ("experts_grouped", "// GROUP * HIDDEN", "// GROUP * 0", grouped_experts),
    ("experts_grouped", "beside = which * (2 * WIDTH)", "beside = 0 * own", nvfp4_experts),
    ("experts_grouped", "beside = which * HIDDEN", "beside = own", nvfp4_experts),
    ("experts_grouped", "biases + which * (2 * WIDTH)", "biases", grouped_experts),
    ("experts_grouped", "biases + which * HIDDEN", "biases", grouped_experts),
    ("experts_grouped", "gate, up = tl.split", "up, gate = tl.split", grouped_experts),
    (
        "experts_grouped",
        "pair.to(tl.int64)[:, None] * HIDDEN",
        "row[:, None] * HIDDEN",
        grouped_experts,
    ),
    ("experts_grouped", "ceil_div(hidden, constants", "(hidden // constants", grouped_experts),
    ("experts", "place + WIDTH * HIDDEN", "place", few_experts),
    ("experts", "bias + WIDTH", "bias", few_experts),
    (
        "experts",
        "total += made if SHARED else made * tl.load(shares + pair)",
        "total += made",
        few_experts,
    ),
    ("experts", "pair = token * TOP_K + choice", "pair = token * TOP_K", few_experts),
    ("experts", "tl.load(chosen + pair) - first", "tl.load(chosen + pair)", some_experts),
    ("experts", "(place >= 0)", "(place >= -2)", some_experts),
    ("experts", "(place < EXPERTS)", "(place <= EXPERTS)", some_experts),
    ("experts", "factors + group * tokens", "factors", fp8_experts),
    ("experts", "own + group * (2 * WIDTH)", "own", fp8_experts),
    ("experts", "scale += WIDTH", "scale += 0", fp8_experts),
    ("experts", "factors + group * pairs", "factors", fp8_experts),
    ("experts", "(GROUPS * HIDDEN)", "HIDDEN", fp8_experts),
    ("experts", "min(DEPTH_BYTES, group & -group)", "DEPTH_BYTES", fp8_experts),
    ("experts", "own + WIDTH, asked", "own, asked", fp8_outputs),
    ("experts", "(GROUPS * 2 * WIDTH)", "WIDTH", fp8_outputs),
    (
        "experts",
        "each, weighted = 1, False",
        "weighted = False",
        partial(fp8_outputs, weighted_inputs=True),
    ),
    ("rounding", "scale > 0, scale, 1.0", "scale >= 0, scale, 1.0", rounded_rows),
    ("rounding", "(first + member < INPUTS)", "(first + member < INPUTS - 1)", rounded_groups),
    ("rounding", "mask=group < GROUPS", "mask=group <= GROUPS", rounded_groups),
    ("rounding", "token >= start_token", "token > start_token", rounded_last),
    ("whole", "low, high = 0, length", "low, high = 0, length - 1", texts),
    ("whole", "head // (HEADS // KV_HEADS)", "head % KV_HEADS", texts),
    ("whole", "mixed * shrink[:, None]", "mixed", texts),
    ("whole", "mass * shrink", "mass", texts),
    ("whole", "distance < WINDOW", "distance <= WINDOW", windowed_texts),
    ("whole", "distance > -WINDOW", "distance > -WINDOW - 1", windowed_texts),
    ("whole", "BLOCK_M + WINDOW - 1, length", "BLOCK_M + WINDOW - 2, length", windowed_texts),
    ("latent", "<= position[:, None]", "< position[:, None]", latents),
    ("latent", "part * PART + packed % PART", "packed % PART", latents),
    ("latent", "(turned).to(x.dtype), scores", "(turned).to(x.dtype), 0 * scores", latents),
    ("latent", "beside * shrink[:, None]", "beside", latents),
    ("latent", "mixed * shrink[:, None]", "mixed", latents),
    ("latent", "rest < SIZE", "rest <= SIZE", latents),
    ("latent", "found / value_scale", "found", latents),
    ("latent", "low = split * part_keys", "low = 0", many_latents),
    ("latent", "made * tl.exp2(one - peak)", "made", many_latents),
    ("latent", "head // PART) * splits", "0) * splits", many_latents),
    ("latent", "total * value_scale", "total", many_latents),
    ("latent", "tl.trans(k).to(x.dtype)", "tl.trans(k)", narrow_latents),
    ("latent", "weights, turned.to(x.dtype)", "weights, turned", narrow_latents),
    ("attention", "float(scale * scales.key), float", "float(scale), float", latent_scales),
    ("attention", "float(scales.value))\n        return", "1.0)\n        return", latent_scales),
    ("latent", "column + half, column - half", "column - half, column + half", latent_store),
    ("latent", "token * ROTATED", "token", latent_store),
    ("latent", "slot * (LATENT", "token * (LATENT", latent_store),
    ("latent", "known[:, None] & (column < LATENT)", "(column < LATENT)", latent_store),
    ("latent", "(column < LATENT)", "(column < LATENT - 1)", latent_store),
    ("latent", "(column < ROTATED)", "(column < ROTATED + 1)", latent_store),
    ("latent", "ceil_div(tokens, each)", "tokens // each", latent_store),
    ("latent", "as_cached(plain, scale,", "as_cached(plain, 1.0,", narrow_store),
    ("latent", "as_cached(turned, scale,", "as_cached(turned, 1.0,", narrow_store),
    ("latent", "FP8_MAX.get(pages.dtype, 0.0)", "0.0", narrow_store),
    ("latent", "page.to(tl.int64) * SLOTS", "page * SLOTS", checks.check_far_latents),
    ("recurrent", "(read.to(tl.int64) * (TAPS", "(read * (TAPS", checks.check_far_states),
    (
        "recurrent",
        "states + read.to(tl.int64) * size",
        "states + read * size",
        checks.check_far_states,
    ),
    ("recurrent", "+ at >= 0", "+ at > 0", delta),
    ("recurrent", "TAPS - 1 + at)", "TAPS - 2 + at)", delta),
    ("recurrent", "number + 1, length", "length, length", delta),
    ("recurrent", "end - (TAPS - 1) + back", "end - TAPS + back", delta),
    ("recurrent", "kept = inside & (i * 0 + read >= 0)[:, None]", "kept = inside", delta),
    ("recurrent", "tl.exp(-rate * forgetting)", "tl.exp(-forgetting)", delta),
    ("recurrent", "(value - tl.sum(key", "(value - 0 * tl.sum(key", delta),
    ("recurrent", "* query_scale", "", delta),
    ("recurrent", "own + HEADS", "own", delta),
    (
        "recurrent",
        "(3 + number) * row_count + row)\n            target",
        "3 * row_count + row)\n            target",
        delta,
    ),
    ("recurrent", "if second < 0:", "if second < -1:", delta),
    ("recurrent", "tl.minimum(tl.maximum(step, least_step), most_step)", "step", ssd),
    ("recurrent", "+ value * tl.load(skip + head)", "", ssd),
    ("recurrent", "HEADS * COLUMNS + key_head * ROWS", "HEADS * COLUMNS", ssd),
    ("recurrent", "place = column if WHOLE", "place = within if WHOLE", ssd),
    ("recurrent", "if GATE_FIRST:\n            value", "if BLOCK < 0:\n            value", ssd),
    ("recurrent", "bias + channel", "bias", ssd),
    ("linear_fp8", "group = begin // GROUP", "group = 0", fp8_groups),
    (
        "linear_fp8",
        "(factor[:, None] * scale[None, :])\n        else",
        "scale[None, :]\n        else",
        fp8_groups,
    ),
    (
        "linear_fp8",
        "total * (factor[:, None] * scale[None, :])",
        "total * scale[None, :]",
        fp8_rows,
    ),
    ("linear_fp8", "(depth < INPUTS)", "(depth < INPUTS + 1)", fp8_rows),
    ("linear_fp8", "+= made *", "= made *", fp8_groups),
    ("linear_fp8", "ceil_div(outputs, block_n))", "outputs // block_n)", fp8_rows),
    ("linear_fp8", "asked[:, None] & used[None, :]", "used[None, :]", fp8_rows),
    ("linear_grouped", "code & 15, FIRST", "code & 7, FIRST", in_groups),
    ("linear_grouped", "code >> 4, FIRST", "code & 15, FIRST", in_groups),
    ("linear_grouped", "depth[None, :] + 16,", "depth[None, :] + 15,", in_groups),
    ("linear_grouped", "begin // GROUP * OUTPUTS", "0 * OUTPUTS", in_large_groups),
    ("linear_grouped", "group = begin // GROUP +", "group =", in_groups),
    ("linear_grouped", "(group * GROUP < INPUTS)", "(group >= 0)", in_groups),
    ("linear_grouped", "minimums, begin, column", "scales, begin, column", in_groups),
    ("linear_grouped", "(byte < INPUTS // 2)", "(byte < INPUTS // 2 + 1)", in_groups),
    ("linear_grouped", "bias + column", "bias", in_groups),
    ("linear_grouped", "ceil_div(outputs, constants", "(outputs // constants", in_groups),
    ("linear_grouped", "asked[:, None] & used[None, :]", "used[None, :]", in_groups),
    ("linear_grouped", "TURNS * tl.arange(0, each) + TURN", "tl.arange(0, each)", in_nvfp4),
    ("linear_grouped", "total *= tl.load(minimums", "tl.load(minimums", in_nvfp4),
    ("linear_grouped", "bits < 8, bits", "bits < 0, bits", in_nvfp4),
    ("linear_grouped", "+ FIRST", "", partial(in_groups, codes="signed")),
    ("linear_grouped", "code > 7, -0.5", "code > 7, 0.5", partial(in_groups, codes="e2m1")),
    ("linear_grouped", "((size & 1) | 2)", "2", partial(in_groups, codes="e2m1")),
    (
        "linear_grouped",
        "(depth < INPUTS)",
        "(depth < INPUTS + 1)",
        partial(in_groups, codes="bytes"),
    ),
    ("linear_int8", 'float("inf")', "0.0", in_int8),
    ("linear_int8", "scale > 0, scale, 1.0", "scale >= 0, scale, 1.0", in_int8),
    ("linear_int8", "(value + 12582912.0) - 12582912.0", "value", in_int8),
    ("linear_int8", "mask=member < INPUTS", "mask=member <= INPUTS", in_int8),
    ("linear_int8", "(depth < INPUTS)", "(depth < INPUTS + 1)", in_int8),
    ("linear_int8", "factor[:, None] * scale[None, :]", "scale[None, :]", in_int8),
    ("linear_int8", "bias + column", "bias", in_int8),
    ("linear_int8", "ceil_div(outputs, block_n)", "outputs // block_n", in_int8),
    ("linear_int8", "asked[:, None] & used[None, :]", "used[None, :]", in_int8),
    ("linear_tiled", "(depth < INPUTS)", "(depth < INPUTS + 1)", tiled),
    ("linear_tiled", "tl.trans(part), total,", "tl.trans(part),", tiled),
    ("linear_tiled", "ceil_div(outputs, block_n)", "outputs // block_n", tiled),
    ("linear_tiled", "asked[:, None] & used[None, :]", "used[None, :]", tiled),
    ("linear_tiled", "bias + column", "bias", tiled),
    ("linear_tiled", "head * HEAD", "head * INPUTS", tiled_heads),
    ("linear_tiled", "(head * OUTPUTS + column)", "column.to(tl.int64)", tiled_heads),
    ("linear_tiled", "* HEADS + head)", "* HEADS)", tiled_heads),
    ("linear_tiled", "[:, None] * ROW", "[:, None] * (HEADS * INPUTS)", tiled_heads),
    ("linear_tiled", "ceil_div(outputs, NARROW)", "outputs // NARROW", tiled_heads),
    ("heads", "column + half, column - half", "column - half, column + half", few_heads),
    ("heads", "slot % SLOTS", "slot % (SLOTS - 1)", many_heads),
    ("heads", "head - QUERIES, column", "head, column", normed_heads),
    ("heads", "divided > MAX, MAX", "divided > MAX, divided", stored),
    ("heads", "tl.full(values.shape, scale, tl.float32)", "1.0", stored),
    ("heads", "as_cached(x, value_scale,", "as_cached(x, key_scale,", stored),
    ("attention", "float(scale * scales.key)", "float(scale)", eight_bits),
    ("attention", "* value_scale\n        tl.store", "\n        tl.store", eight_bits),
    ("attention", "/ total * value_scale", "/ total", partial(eight_bits, lengths=LONG)),
    ("attention", "key[None, :] <= position", "key[None, :] < position", short),
    ("attention", "key < high)", "key <= high)", short),
    ("attention", "[:, None] - WINDOW)", "[:, None] - WINDOW - 1)", windowed),
    ("attention", " * scale\n", "\n", short),
    ("attention", "mixed * shrink[:, None]", "mixed", long),
    (
        "attention",
        "        mass += tl.exp2(sink - peak)",
        "        mass += 0",
        partial(short, sinks=True),
    ),
    ("attention", "    total += tl.exp2(sink - peak)", "    total += 0", partial(long, sinks=True)),
    ("attention", "(split + 1) * part_keys)", "(split + 1) * part_keys - 1)", long),
    ("attention", "tl.cdiv(tl.cdiv(length, splits), SPLIT) * SPLIT", "SPLIT", few_splits),
    # Parts are merged before the last one was written.
    ("attention", "(count, heads, splits),", "(count, heads, splits - 1),", long),
    ("attention", "entry = own.to", "entry = tile.to", partial(short, lengths=RAGGED)),
    ("decode_rows", "position // PAGE_TOKENS", "length // PAGE_TOKENS", checks.check_decode_rows),
    ("decode_rows", "position + offset", "position", checks.check_decode_rows),
    ("decode_rows", "page * SLOTS", "page * PAGE_TOKENS", checks.check_decode_rows),
    ("attention", "page.to(tl.int64)", "page", partial(checks.check_far_pages, heads=heads)),
    ("sampling", "count >= rank_max", "count > rank_max", draws),
    ("sampling", "mass > mass_max", "mass > 2 * mass_max", draws),
    ("sampling", "best >= bound)", "best > bound)", draws),
    ("sampling", "weight >= bound\n", "weight > bound\n", draws),
    ("sampling", "(BLOCK - 1) * pivot", "0 * pivot", partial(draws, vocabulary=2500)),
    ("sampling", "if found <= CANDIDATES", "if found >= 0", partial(draws, vocabulary=2500)),
    ("sampling", "best < floor", "best <= floor", draws),
    ("sampling", "weight < floor", "weight <= floor", draws),
    ("sampling", "target - before", "target", draws),
    ("sampling", "value > best)", "value >= best)", checks.check_greedy),
    ("futures", "last - 1 - token", "last - token", checks.check_futures),
    ("futures", "(token < vocabulary)", "(token <= vocabulary)", checks.check_futures),
    ("futures", "mask=slot >= 0", "mask=slot >= -1", checks.check_futures),
    ("logits", "token % 32", "token % 31", changes),
    ("pages", "if page >= 0", "if page >= -1", copied),
    ("pages", "(layer * count + number) * SIZE + place, copied", "number, copied", copied),
    ("pages", "(layer * total + page) * SIZE + place, copied", "page, copied", copied),
    ("pages", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)", checks.check_far_bytes),
    ("pages", "ceil_div(size, PASS)", "size // PASS", partial(checks.check_pages, size=9000)),
    ("logits", "seen > 0", "seen < 0", changes),
    ("logits", "before + tl.load(values", "tl.load(values", changes),
    ("sampling", "base[:, None]) / tl.load(temperature + row)", "base[:, None])", draws),
    ("sampling", "highest / temperature + total", "highest + total", draws),
]


@pytest.mark.parametrize(
    ("name", "old", "new", "check"), MUTANTS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_checks_find_mutants(
    name: str, old: str, new: str, check: Callable[..., None], tmp_path: Path
) -> None:
    source = Path(f"{norm.__file__}").with_name(f"{name}.py").read_text()
    assert old in source, "the mutant no longer applies"
    place = tmp_path / f"{name}.py"
    place.write_text(source.replace(old, new))
    spec = spec_from_file_location(f"mutant_{name}", place)
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    spec.loader.exec_module(mutant)
    # In a process of its own: a wrong address may be one that is not there.
    pid = os.fork()
    if pid == 0:
        try:
            with np.errstate(all="ignore"):
                check(mutant)
        except BaseException:  # noqa: BLE001  # whatever finds it
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status != 0, f"{old!r} -> {new!r} is not found"
