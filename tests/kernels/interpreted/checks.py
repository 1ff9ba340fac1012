"""Each kernel against the reference of its op, as functions of the module that has the kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pytest
import torch
from tests.kernels.test_recurrent_layer import LAYERS, projected, rows_of, states_of

from antiphon.kernels import (
    activation,
    decode_rows,
    latent,
    linear_fp8,
    linear_grouped,
    linear_int8,
    linear_tiled,
    norm,
    rotary,
    sampling,
)
from antiphon.kernels import pages as copies
from antiphon.kernels import routing as routing_ops
from antiphon.kernels.attention import (
    AttentionMetadata,
    KvShape,
    TextRows,
    bidirectional_attention,
    paged_attention,
)
from antiphon.kernels.experts import ExpertSlice, ExpertWeights, PlainMatrix, experts
from antiphon.kernels.kv import (
    UNSCALED,
    KvScales,
    read_keys,
    read_values,
    row_pages_shape,
    store_kv,
)
from antiphon.kernels.norm import NormWeights
from antiphon.kernels.recurrent import LayerStates, recurrence
from antiphon.kernels.rotary import QkNormWeights, RotarySpec, cos_sin
from antiphon.kernels.routing import RoutingSpec
from antiphon.kernels.triton import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from antiphon.kernels.experts import Matrix
    from antiphon.kernels.norm import NormKind

Module = Any
"""A module of `antiphon.kernels.triton`, or a mutant of one."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = KvScales(0.5, 1.75)
"""Of keys and values of 8 bits."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of 16 bits, twice the distance of two neighbours."""


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=False)


def randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rmsnorm(module: Module, rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype, seed=1)
    x[:1] *= 1e-3  # where what is added inside the root matters
    weight = randn(size, dtype=dtype, seed=2)
    close(module.rmsnorm(x, weight, 1e-5), norm.rmsnorm.reference(x, weight, 1e-5))
    pairs = zip(
        module.add_rmsnorm(x, residual, weight, 1e-5),
        norm.add_rmsnorm.reference(x, residual, weight, 1e-5),
        strict=True,
    )
    for got, expected in pairs:
        close(got, expected)
    wide = weight.float()
    close(module.rmsnorm_wide(x, wide, 1e-6), norm.rmsnorm_wide.reference(x, wide, 1e-6))


def check_finite(module: Module, size: int) -> None:
    values = randn(7, size)
    values[1, size - 1], values[3, 0], values[4, size // 2] = torch.nan, torch.inf, -torch.inf
    values[5] = torch.finfo(torch.float32).max
    flags = [True, False, True, False, False, True, True]
    assert module.finite_rows(values).tolist() == flags


def check_silu_mul(module: Module, rows: int, width: int, dtype: torch.dtype) -> None:
    both = randn(rows, 2 * width, dtype=dtype) * 3
    close(module.silu_mul(both), activation.silu_mul.reference(both))


def check_activations(module: Module, rows: int, width: int, dtype: torch.dtype) -> None:
    """Gates of each kind, the same without a gate, and what only some models have."""
    both = randn(rows, 2 * width, dtype=dtype) * 3
    for kind in get_args(activation.ActivationKind):
        close(module.gate(both, kind), activation.gate.reference(both, kind))
        close(module.activate(both, kind), activation.activate.reference(both, kind))
    swish = both, 1.7, 4.0
    close(module.clamped_swish_mul(*swish), activation.clamped_swish_mul.reference(*swish))
    wide = both.float() * 20
    close(module.soft_capped(wide, 30.0), activation.soft_capped.reference(wide, 30.0))
    heads = both.view(rows, 2, width)  # those of a token lie in one piece
    x, opening = heads[:, :1], heads[:, 1:]
    close(module.sigmoid_mul(x, opening), activation.sigmoid_mul.reference(x, opening))


def check_layernorm(module: Module, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*part, dtype=dtype) for part in ((rows, size), (size,), (size,)))
    x[:1] = 1e-3 * x[:1] + 0.5
    for parts in ((weight, bias), (weight, None), (None, None)):
        close(module.layernorm(x, *parts, 1e-5), norm.layernorm.reference(x, *parts, 1e-5))


ROUTINGS = (
    RoutingSpec(top_k=2, renormalised=True),
    RoutingSpec(top_k=3, factor=2.5),
    RoutingSpec(top_k=3, scoring="sigmoid", renormalised=True),
    RoutingSpec(top_k=3, scoring="sigmoid", groups=4, groups_kept=2, group_best=2),
    RoutingSpec(top_k=2, groups=3, groups_kept=1),
)


def check_route(module: Module, tokens: int, count: int, routing: RoutingSpec) -> None:
    logits = randn(tokens, count, seed=count)
    for correction in (None, randn(count, seed=1)):
        got = module.route(logits, correction, routing)
        experts, shares = routing_ops.route.reference(logits, correction, routing)
        assert torch.equal(got[0], experts)
        close(got[1], shares)


def check_route_of_nan(module: Module) -> None:
    """Experts that there are, whatever the logits: more is read by their numbers."""
    with np.errstate(invalid="ignore"):
        experts, _ = module.route(torch.full((2, 5), torch.nan), None, RoutingSpec(top_k=2))
    assert set(experts.flatten().tolist()) <= set(range(5))


Codes = Literal["e4m3", "unsigned", "signed", "e2m1", "bytes", "nvfp4"]


def expert_matrix(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    kept: tuple[Codes, int] | None,
    *,
    bias: bool,
    seed: int,
) -> Matrix:
    """Weights (E, O, I), plain or in codes with groups of so many inputs."""
    experts, outputs, inputs = size
    added = randn(experts, outputs, dtype=dtype, seed=seed + 2) if bias else None
    weights = randn(*size, dtype=dtype, seed=seed)
    if kept is None:
        return PlainMatrix(weights, added)
    codes, group = kept
    if codes != "e4m3":
        return grouped_matrix(size, group, codes, added)
    scales = randn(experts, -(-inputs // group), outputs, seed=5).abs()
    return linear_fp8.Fp8Matrix(weights.to(torch.float8_e4m3fn), scales, group, added)


def of_experts(matrix: Matrix, numbers: range) -> Matrix:
    """The weights of some experts."""
    part = slice(numbers.start, numbers.stop)
    tensors = {name: each[part] for name, each in matrix._asdict().items() if torch.is_tensor(each)}
    return matrix._replace(**tensors)


def grouped_matrix(
    size: tuple[int, ...], group: int, codes: Codes, bias: Tensor | None
) -> linear_grouped.GroupedMatrix:
    """Weights (..., O, I) of all codes of a kind; unsigned ones, and bytes, have minimums.

    Every second output of NVFP4 has scales below the least normal number of e4m3.
    """
    *experts, outputs, inputs = size
    groups = (*experts, -(-inputs // group), outputs)
    drawn = torch.randint(256, size, generator=torch.Generator().manual_seed(1)).byte()
    packed = linear_grouped.packed((drawn & 15).view(-1, inputs)).view(*experts, outputs, -1)
    if codes == "nvfp4":
        small = torch.arange(outputs) % 2 == 0
        bytes_ = torch.randint(64, groups, generator=torch.Generator().manual_seed(2))
        stored = torch.where(small, bytes_ % 8, 32 + bytes_ % 32)
        return linear_grouped.GroupedMatrix(
            packed,
            stored.byte().view(torch.float8_e4m3fn),
            None,
            group,
            bias=bias,
            tensor_scales=torch.where(small, 28, 0.25) * randn(*experts, outputs, seed=6).exp(),
        )
    kind = torch.bfloat16 if codes == "e2m1" else torch.float16
    shifted = codes in ("unsigned", "bytes")
    return linear_grouped.GroupedMatrix(
        drawn.view(torch.int8) if codes == "bytes" else packed,
        (randn(*groups, seed=2).abs() / (8 * inputs**0.5)).to(kind),
        randn(*groups, seed=3).to(kind) / 8 if shifted else None,
        group,
        {"unsigned": 0, "signed": -8}.get(codes),
        bias,
    )


def check_experts(
    module: Module,
    tokens: int,
    sizes: tuple[int, int, int],
    activation: Any = "silu",
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    weighted_inputs: bool = False,
    fixed: bool = False,
    groups: tuple[int, int] | None = None,
    codes: Codes = "e4m3",
    here: range | None = None,
) -> None:
    """Tokens choose among all experts but the second, so that one has no token.

    Weights are codes if they have `groups`: those of inputs of gate and up, and of down. With
    `here`, those of other experts are another rank's.
    """
    count, hidden, width = sizes
    gate_up, down = (
        expert_matrix(
            (count, *size),
            dtype,
            None if groups is None else (codes, groups[place]),
            bias=bias,
            seed=place,
        )
        for place, size in enumerate(((2 * width, hidden), (hidden, width)))
    )
    weights, own = ExpertWeights(gate_up, down), None
    if here is not None:
        weights = ExpertWeights(of_experts(gate_up, here), of_experts(down, here))
        own = ExpertSlice(here.start, count)
    x, shares = randn(tokens, hidden, dtype=dtype) / hidden**0.5, randn(tokens, 2, seed=7).abs()
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, count - 1, generator=generator).argsort(dim=-1)[:, :2]
    chosen += (chosen > 0).long()
    arguments = x, chosen, shares, weights, activation
    call = module.experts_fixed if fixed else module.experts
    got = call(*arguments, own=own, weighted_inputs=weighted_inputs)
    expected = experts.reference(*arguments, own=own, weighted_inputs=weighted_inputs)
    scale = expected.abs().max().clamp(min=torch.finfo(dtype).tiny)
    close(got / scale, expected / scale)


def check_expert_tiles(
    module: Module, tokens: int, sizes: tuple[int, int, int], here: range | None = None
) -> None:
    """Experts whose pairs this module sorts."""
    from antiphon.kernels.triton import experts as expert_kernels  # noqa: PLC0415  # imports triton

    with pytest.MonkeyPatch.context() as patch:
        for name in ("sort_pairs", "tile_of"):
            patch.setattr(expert_kernels, name, getattr(module, name))
        check_experts(expert_kernels, tokens, sizes, here=here)


def check_quantize(
    module: Module,
    tokens: int,
    inputs: int,
    group: int,
    dtype: torch.dtype = torch.float32,
    *,
    skipped: int = 0,
) -> None:
    """Codes of activations are the same, but for the first, which are `skipped`.

    Some tokens are zero or tiny, and some are not finite.
    """
    x = uneven(tokens, inputs, dtype)
    first = torch.tensor([skipped], dtype=torch.int32) if skipped else None
    with np.errstate(invalid="ignore"):
        made = module.quantize(x, group, first)
    finite, rounded = x.isfinite().all(dim=1), linear_fp8.quantize(x, group)
    finite[:skipped] = False
    assert torch.equal(made[0].float()[finite], rounded[0].float()[finite])
    assert torch.equal(made[1][:, finite], rounded[1][:, finite])


def uneven(tokens: int, inputs: int, dtype: torch.dtype) -> Tensor:
    x = randn(tokens, inputs, dtype=dtype)
    x *= torch.linspace(0.1, 30, inputs).to(dtype)  # groups have scales of their own
    if tokens > 5:
        x[1], x[2], x[3, inputs - 1], x[4, 0] = 0.0, 8.8e-43, torch.inf, torch.nan
    return x


def check_linear_fp8(
    module: Module,
    tokens: int,
    sizes: tuple[int, int],
    group: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
) -> None:
    outputs, inputs = sizes
    groups = -(-inputs // group)
    matrix = linear_fp8.Fp8Matrix(
        randn(outputs, inputs, seed=1).to(torch.float8_e4m3fn),
        randn(groups, outputs, seed=2).abs() / inputs**0.5,
        group,
        randn(outputs, dtype=dtype, seed=3) if bias else None,
    )
    x = uneven(tokens, inputs, dtype)
    with np.errstate(invalid="ignore"):
        got = module.linear_fp8(x, matrix)
    finite = x.isfinite().all(dim=1)
    expected = linear_fp8.linear_fp8.reference(x, matrix)
    assert got[~finite].isnan().all()
    assert expected[~finite].isnan().all()
    scale = expected[finite].abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    close(got[finite] / scale, expected[finite] / scale)


def check_linear_grouped(
    module: Module,
    tokens: int,
    sizes: tuple[int, int],
    group: int,
    codes: Codes = "unsigned",
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    fixed: bool = False,
) -> None:
    outputs, inputs = sizes
    added = randn(outputs, dtype=dtype, seed=4) if bias else None
    matrix = grouped_matrix(sizes, group, codes, added)
    x = randn(tokens, inputs, dtype=dtype) / inputs**0.5
    call = module.linear_grouped_fixed if fixed else module.linear_grouped
    weight = matrix.dequantize()
    if codes != "nvfp4":
        weight = weight.to(dtype).float()
    expected = x.float() @ weight.T + (0.0 if added is None else added.float())
    close(call(x, matrix), expected.to(dtype))


def check_linear_int8(
    module: Module,
    tokens: int,
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
) -> None:
    """The first token is zero; in the last one a number is none at the end, or is infinite."""
    outputs, inputs = sizes
    added = randn(outputs, dtype=dtype, seed=4) if bias else None
    drawn = torch.randint(-127, 128, sizes, generator=torch.Generator().manual_seed(1))
    scales = randn(1, outputs, seed=2).abs() / inputs**0.5
    matrix = linear_grouped.GroupedMatrix(drawn.to(torch.int8), scales, None, inputs, bias=added)
    x = randn(tokens, inputs, dtype=dtype) * torch.arange(tokens).to(dtype)[:, None]
    expected = linear_int8.linear_int8.reference(x, matrix)
    largest = expected.abs().max().clamp(min=1.0) if tokens else 1.0
    close(module.linear_int8(x, matrix) / largest, expected / largest)
    for got, rounded in zip(module.quantize(x), linear_int8.quantize(x), strict=True):
        assert torch.equal(got, rounded)
    for wrong in (float("nan"), float("inf")):
        x[-1:, inputs // 2] = wrong
        with np.errstate(invalid="ignore"):
            made = module.linear_int8(x, matrix)
        assert made[:-1].isfinite().all()
        assert not made[-1:].isfinite().any()


def check_linear_tiled(
    module: Module,
    tokens: int,
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
) -> None:
    outputs, inputs = sizes
    x, weight = randn(tokens, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
    x /= inputs**0.5
    added = randn(outputs, dtype=dtype, seed=2) if bias else None
    expected = linear_tiled.linear_tiled.reference(
        x.float(), weight.float(), None if added is None else added.float()
    )
    close(module.linear_tiled(x, weight, added), expected.to(dtype))


def check_linear_heads(
    module: Module,
    tokens: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Inputs of a head have elements of another kind behind them, as latents have positions."""
    heads, outputs, inputs = sizes
    x = randn(tokens, heads, inputs, dtype=dtype) / inputs**0.5
    beside = torch.full((tokens, heads, 8), torch.nan, dtype=dtype)
    x = torch.cat((x, beside), dim=-1)[..., :inputs]
    weight = randn(heads, outputs, inputs, dtype=dtype, seed=1)
    expected = linear_tiled.linear_heads.reference(x.float(), weight.float())
    close(module.linear_heads(x, weight), expected.to(dtype))


def qk_norms(
    kind: NormKind | None,
    over: Literal["head", "token"],
    queries: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
) -> QkNormWeights | None:
    if kind is None:
        return None

    def weights(heads: int, seed: int) -> NormWeights:
        count = size * (heads if over == "token" else 1)
        bias = randn(count, dtype=dtype, seed=5) if kind == "layer" else None
        return NormWeights(randn(count, dtype=dtype, seed=seed), bias)

    return QkNormWeights(weights(queries, 3), weights(kv_heads, 4), 1e-5, kind, over)


def check_heads(
    module: Module,
    tokens: int,
    shape: tuple[int, int, int, int],
    kind: NormKind | None = None,
    over: Literal["head", "token"] = "head",
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> None:
    """With a `cache` of 8 bits, some keys and values are beyond its largest number."""
    queries, kv_heads, size, rotated = shape
    heads = randn(tokens, queries + 2 * kv_heads, size, dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(40 * 6, generator=generator)[:tokens]  # pages out of order
    positions = torch.randint(0, 900, (tokens,), generator=generator)
    cos, sin = cos_sin(RotarySpec(rotated, 1e4).frequencies(), positions, dtype)
    norms = qk_norms(kind, over, queries, kv_heads, size, dtype)
    scales = UNSCALED
    if cache is not None:
        heads[0], heads[0, :, 1], scales = 2e5, torch.nan, SCALES
    results: list[list[Tensor]] = []
    for call in (module.qk_norm_rope_store, rotary.qk_norm_rope_store.reference):
        pages = torch.full(row_pages_shape(40, 5, kv_heads, size), -7.0).to(cache or dtype)
        keys, values = pages, pages.clone()
        out = call(heads, cos, sin, keys, values, slots, norms, scales)
        results.append([out, keys, values])
    for got, expected in zip(*results, strict=True):
        if cache is None:
            close(got, expected)
        else:
            torch.testing.assert_close(got.float(), expected.float(), equal_nan=True)


class Rows:
    """Rows of a cache of which all that none may read is NaN."""

    def __init__(
        self,
        query_len: Sequence[int],
        prefix: Sequence[int],
        shape: KvShape,
        pages: int = 700,
        last: int | None = None,
        cache: torch.dtype | None = None,
    ) -> None:
        random = np.random.default_rng(len(query_len))
        query = np.array(query_len, np.int32)
        kv = query + np.array(prefix, np.int32)
        needed = -(-kv // shape.page_tokens)
        table = np.full((len(query), needed.max()), -1, np.int32)
        free = random.permutation(pages if last is None else 100).astype(np.int32)
        for row, count in enumerate(needed):
            table[row, :count], free = free[:count], free[count:]
        if last is not None:
            table[0, 0] = last
        self.rows = AttentionMetadata(shape, table, query, kv, torch.tensor)
        size = row_pages_shape(pages, shape.page_tokens, shape.heads, shape.head_size)
        self.keys, self.values = (torch.empty(size, dtype=cache or shape.dtype) for _ in range(2))
        self.scales = UNSCALED if cache is None else SCALES
        for row, length in enumerate(kv.tolist()):
            seen = np.arange(length)
            if shape.window is not None:
                seen = seen[max(0, length - int(query[row]) - shape.window + 1) :]
            slots = table[row, seen // shape.page_tokens].astype(np.int64)
            slots = slots * self.keys.shape[2] + seen % shape.page_tokens
            k, v = (
                randn(len(seen), shape.heads, shape.head_size, dtype=shape.dtype, seed=s + row)
                for s in (10, 20)
            )
            store_kv(k, v, self.keys, self.values, torch.as_tensor(slots), self.scales)
        heads = shape.heads * shape.queries_per_head
        self.q = randn(int(query.sum()), heads, shape.head_size, dtype=shape.dtype)
        self.scale = shape.head_size**-0.5


def a_shape(
    heads: int = 2,
    group: int = 3,
    size: int = 24,
    page_tokens: int = 5,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> KvShape:
    return KvShape(page_tokens, heads, group, size, dtype, window)


RAGGED = [1, 1, 5, 70, 1, 2], [0, 130, 3, 40, 63, 64]
"""Queries and keys before them: one token, prefill, decode, verify."""
FAST = [1, 5], [70, 3]
"""A decode row, and one of several queries."""
LONG = [1, 1, 1], [1100, 3, 511]
"""Decode rows whose keys are in three splits, in the first one, and end where it ends."""


def check_attention(
    module: Module,
    shape: KvShape,
    lengths: tuple[Sequence[int], Sequence[int]] = RAGGED,
    softcap: float | None = None,
    *,
    sinks: bool = False,
    programs: int = rows.PROGRAMS,
    cache: torch.dtype | None = None,
    fixed: bool = False,
) -> None:
    """With so few `programs`, rows are decoded in fewer parts; `fixed`, in one."""
    case = Rows(*lengths, shape, cache=cache)
    sink = None if not sinks else randn(case.q.shape[1], dtype=shape.dtype)
    arguments = case.q, case.keys, case.values, case.rows, case.scale, case.scales, softcap, sink
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "PROGRAMS", programs)
        got = (module.paged_attention_fixed if fixed else module.paged_attention)(*arguments)
    close(got, paged_attention.reference(*arguments))


def check_latents(
    module: Module,
    queries_per_head: int,
    size: int,
    lengths: tuple[Sequence[int], Sequence[int]] = RAGGED,
    dtype: torch.dtype = torch.float32,
    *,
    programs: int = rows.PROGRAMS,
    cache: torch.dtype | None = None,
) -> None:
    """Pages that are keys and values, of one head."""
    case = Rows(*lengths, a_shape(1, queries_per_head, size, dtype=dtype), cache=cache)
    scales = KvScales(case.scales.key, 1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "PROGRAMS", programs)
        got, made = torch.empty_like(case.q), case.rows.on_device
        for tiles in (made.decoding, made.extending):
            if tiles is not None:
                scale = case.scale * scales.key
                module.attend(case.q, case.keys, got, case.rows, tiles, scale, scales.value)
    expected = paged_attention.reference(
        case.q, case.keys, case.keys, case.rows, case.scale, scales
    )
    close(got, expected)


def check_planned_latents(
    module: Module,
    heads: int = 2,
    sizes: tuple[int, int] = (16, 6),
    lengths: tuple[Sequence[int], Sequence[int]] = RAGGED,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 5,
) -> None:
    """Of latents of these sizes, with what RoPE rotates beside them, the first part is values."""
    shape = a_shape(1, heads, sum(sizes), page_tokens, dtype=dtype)
    case = Rows(*lengths, replace(shape, latent=sizes[0]))
    got = module.latent_attention(case.q, case.keys, case.rows, case.scale)
    expected = paged_attention.reference(case.q, case.keys, case.keys, case.rows, case.scale)
    close(got, expected[..., : sizes[0]])


def check_latent_scales(module: Module, *, fixed: bool = False) -> None:
    """Of latents of 8 bits, scores and values have scales: prefills, and decodes in splits.

    `fixed`: decodes are in one part.
    """
    attend = module.paged_attention_fixed if fixed else module.paged_attention
    for lengths in (FAST, LONG):
        case = Rows(*lengths, a_shape(1, 4, 20), cache=FP8[0])
        arguments = case.q, case.keys, case.keys, case.rows, case.scale, case.scales
        close(attend(*arguments), paged_attention.reference(*arguments))


def check_latent_store(
    module: Module,
    tokens: int,
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> None:
    """Sizes: elements without a position, and of that; some are beyond the largest of 8 bits.

    The reference rounds more often on the way to a rotated number of 16 bits, which may then be
    on the other side of a border between two codes of 8: such positions are all 0.
    """
    size, rotated = sizes
    exact = cache is None or dtype is torch.float32
    latents = randn(tokens, size + rotated, dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(40 * 6, generator=generator)[:tokens]  # pages out of order
    positions = torch.randint(0, 900 if exact else 1, (tokens,), generator=generator)
    cos, sin = cos_sin(RotarySpec(rotated, 1e4).frequencies(), positions, dtype)
    scale = 1.0
    if cache is not None:
        latents[0], latents[0, 1], scale = 6e4, torch.nan, 0.37
    results: list[Tensor] = []
    for call in (module.store_latents, latent.store_latents.reference):
        pages = torch.full(row_pages_shape(40, 5, 1, size + rotated), -7.0).to(cache or dtype)
        call(latents, cos, sin, pages, slots, scale)
        results.append(pages)
    got, expected = results
    if cache is None:
        close(got, expected)
    else:
        torch.testing.assert_close(got.float(), expected.float(), equal_nan=True)


def check_texts(
    module: Module,
    lengths: Sequence[int],
    shape: tuple[int, int, int],
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Texts whose tokens attend in both directions; shape: query heads, kv heads, their size."""
    heads, kv_heads, size = shape
    q = randn(sum(lengths), heads, size, dtype=dtype)
    k, v = (randn(sum(lengths), kv_heads, size, dtype=dtype, seed=seed) for seed in (1, 2))
    arguments = q, k, v, TextRows(lengths, torch.tensor), size**-0.5, window
    got = module.bidirectional_attention(*arguments)
    close(got, bidirectional_attention.reference(*arguments))


def check_recurrence(module: Module, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """A prompt, a decode, the rest of a prompt, and drafts of which each leaves a state."""
    layer = LAYERS[kind](dtype)
    lengths, reads = [7, 1, 5, 2], [-1, 5, 5, 5]
    x, known = projected(layer, sum(lengths)), states_of(layer)
    known.conv_states[5] = randn(*known.conv_states[5].shape, dtype=dtype, seed=1)
    known.recurrent_states[5] = randn(*known.recurrent_states[5].shape, seed=2)
    rows = rows_of(reads, [[0, -1], [1, -1], [2, -1], [3, 4]], lengths, [7, 40, 30, 12])
    results: list[tuple[Tensor, LayerStates]] = []
    for compute in (module.recurrence, recurrence.reference):
        states = LayerStates(0, known.conv_states.clone(), known.recurrent_states.clone())
        results.append((compute(x, layer, states, rows), states))
        assert states.recurrent_states[6:].isnan().all(), "no other state is written"
    (got, got_states), (expected, expected_states) = results
    assert torch.equal(got_states.conv_states[:6], expected_states.conv_states[:6])
    scale = expected_states.recurrent_states[:6].abs().max()
    close(got_states.recurrent_states[:6] / scale, expected_states.recurrent_states[:6] / scale)
    scale = expected.abs().max()
    close(got / scale, expected / scale)


def check_far_pages(attention: Module, heads: Module) -> None:
    """The last page of a pool of more than 2**31 elements, of which few are ever touched."""
    shape = a_shape(heads=2, group=1, size=64, page_tokens=16, dtype=torch.float16)
    pages = 2**31 // (2 * 16 * 64) + 8
    torch.use_deterministic_algorithms(False)  # which fill memory
    case = Rows([1], [6], shape, pages=pages, last=pages - 1)
    arguments = case.q, case.keys, case.values, case.rows, case.scale
    close(attention.paged_attention(*arguments), paged_attention.reference(*arguments))
    slots = case.rows.slot_mapping
    made = randn(1, 6, 64, dtype=torch.float16)
    cos, sin = cos_sin(RotarySpec(64, 1e4).frequencies(), torch.tensor([0]), torch.float16)
    heads.qk_norm_rope_store(made, cos, sin, case.keys, case.values, slots, None)
    close(read_keys(case.keys, slots), made[:, 2:4])
    close(read_values(case.values, slots), made[:, 4:])


def check_far_latents(module: Module) -> None:
    """The last page of a pool of more than 2**31 latents' numbers."""
    torch.use_deterministic_algorithms(False)  # which fill memory
    latents, rotated = 40, 24
    shape = a_shape(1, 4, latents + rotated, page_tokens=16, dtype=torch.float16)
    pages = 2**31 // (16 * (latents + rotated)) + 8
    case = Rows([1], [6], shape, pages=pages, last=pages - 1)
    slots = case.rows.slot_mapping
    made = randn(1, latents + rotated, dtype=torch.float16)
    cos, sin = cos_sin(RotarySpec(rotated, 1e4).frequencies(), torch.tensor([0]), torch.float16)
    module.store_latents(made, cos, sin, case.keys, slots, 1.0)
    close(read_keys(case.keys, slots), made[:, None])  # the first position turns nothing
    got, tiles = torch.empty_like(case.q), case.rows.on_device.decoding
    assert tiles is not None, "a row of one token"
    module.attend(case.q, case.keys, got, case.rows, tiles, case.scale, 1.0)
    close(got, paged_attention.reference(case.q, case.keys, case.keys, case.rows, case.scale))


def check_far_states(module: Module) -> None:
    """The last states of pools of more than 2**31 numbers."""
    torch.use_deterministic_algorithms(False)  # which fill memory
    layer = LAYERS["gated delta, odd"](torch.float16)
    taps, channels = layer.conv.shape
    sizes = (taps - 1, channels), (layer.heads, layer.rows, layer.columns)
    count = 2**31 // min(map(math.prod, sizes)) + 3
    rows = rows_of([count - 1], [[count - 2]], [3], [9])
    before = [randn(*size, seed=seed) for seed, size in enumerate(sizes)]
    results: list[tuple[Tensor, ...]] = []
    for compute in (module.recurrence, recurrence.reference):
        pools = [
            torch.empty((count, *size), dtype=kind)
            for size, kind in zip(sizes, (torch.float16, torch.float32), strict=True)
        ]
        for pool, state in zip(pools, before, strict=True):
            pool[-1] = state
        made = compute(projected(layer, 3), layer, LayerStates(0, *pools), rows)
        results.append((made, *(pool[-2].clone() for pool in pools)))
    for got, expected in zip(*results, strict=True):
        scale = expected.abs().max()
        close(got / scale, expected / scale)


def check_greedy(module: Module) -> None:
    for vocabulary in (1, 40, 1024, 2500):
        logits = randn(6, vocabulary).round(decimals=1)  # many are equal
        logits[2], logits[3] = -torch.inf, 5.0
        assert torch.equal(module.argmax(logits), sampling.argmax.reference(logits)), vocabulary


def check_draw(module: Module, vocabulary: int) -> None:
    ways = [
        *product((0, 5), (1.0, 0.6), (0.0, 0.1)),
        *((1, 1.0, 0.0), (2000, 0.9, 0.0), (0, 1e-6, 0.0), (3, 1.0, 1.0), (2000, 1.0, 0.0)),
    ]
    rows = len(ways)
    logits = randn(rows, vocabulary, seed=vocabulary) * 4
    logits[::3] = logits[::3].round()  # as likely as each other
    logits[1, : vocabulary // 2] = -torch.inf
    generator = torch.Generator().manual_seed(vocabulary)
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1], uniform[-1] = 0.0, 1 - 2**-52, 0.0
    logits[-1] = logits[-1].sort().values  # of which the first is kept that may be
    k, p, least = (torch.tensor(column) for column in zip(*ways, strict=True))
    temperature = torch.linspace(0.2, 3, rows)
    arguments = logits, uniform, temperature, k, p.float(), least.float()
    got = module.sample(*arguments)
    assert got.tolist() == sampling.sample.reference(*arguments).tolist()
    close(module.logsumexp(logits, temperature), sampling.logsumexp.reference(logits, temperature))


def check_logits(module: Module, vocabulary: int) -> None:
    rows = torch.tensor([0, 0, 2, 3, 3])
    ids = torch.tensor([0, vocabulary - 1, 3, 1, 2])
    factors = [randn(5, seed=seed).abs() + 0.5 for seed in range(4)]
    words = torch.randint(-(2**31), 2**31, (2, -(-vocabulary // 32)), dtype=torch.int32)
    masked = torch.tensor([3, 1])
    values = torch.tensor([1.5, -torch.inf, 2.0, -3.0, 0.0])
    results: list[Tensor] = []
    for penalize, bias, mask in (
        (module.penalize, module.bias, module.mask),
        (sampling.penalize.reference, sampling.bias.reference, sampling.mask.reference),
    ):
        logits = randn(4, vocabulary)
        penalize(logits, rows, ids, *factors)
        bias(logits, rows, ids, values)
        mask(logits, masked, words)
        results.append(logits)
    close(*results)


def check_pages(module: Module, size: int) -> None:
    """Pages in any order; those of a record that nothing wants are left out."""
    generator = torch.Generator().manual_seed(size)
    pool = torch.randint(0, 256, (3, 11, size), generator=generator, dtype=torch.uint8)
    numbers = torch.tensor([7, 0, 10, 4], dtype=torch.int32)
    packed = module.gather(pool, numbers)
    assert torch.equal(packed, copies.gather.reference(pool, numbers))
    numbers = torch.tensor([3, -1, 0, 9], dtype=torch.int32)
    got, expected = pool.clone(), pool.clone()
    module.scatter(got, numbers, packed)
    copies.scatter.reference(expected, numbers, packed)
    assert torch.equal(got, expected)


def check_far_bytes(module: Module) -> None:
    """The last page of a pool of more than 2**31 bytes."""
    torch.use_deterministic_algorithms(False)  # which fill memory
    pool, last = torch.empty((2, 2**15 + 1, 2**15), dtype=torch.uint8), 2**15
    pool[1, last] = torch.arange(2**15).to(torch.uint8)
    numbers = torch.tensor([last], dtype=torch.int32)
    packed = module.gather(pool, numbers)
    assert torch.equal(packed[1, 0], pool[1, last])
    packed[1] += 1
    module.scatter(pool, numbers, packed)
    assert torch.equal(packed[1, 0], pool[1, last])


def check_futures(module: Module) -> None:
    """Slots that are not recorded keep their token, and one without a token has 0."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(-300, 300, (400,), generator=generator, dtype=torch.int32)
    before = torch.randint(0, 99, (300,), generator=generator, dtype=torch.int32)
    assert torch.equal(
        module.resolve(tokens, before), sampling.resolve_futures.reference(tokens, before)
    )
    slots = torch.randperm(300, generator=generator, dtype=torch.int32)[:290]
    slots[::7] = -1
    sampled = torch.randint(-2, 102, (290,), generator=generator)
    finite = torch.rand(290, generator=generator) > 0.1
    results: list[Tensor] = []
    for call in (module.record, sampling.record_futures.reference):
        padded = torch.nn.functional.pad(before, (8, 8), value=7)
        call(padded[8:-8], slots, sampled, finite, 100)
        results.append(padded)
    assert torch.equal(*results)


def check_decode_rows(module: Module) -> None:
    generator = torch.Generator().manual_seed(4)

    def ints(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.int32)

    for page_tokens in (1, 5, 16):
        slots = torch.randperm(300, generator=generator, dtype=torch.int32)[:200]
        columns = slots, ints(-300, 50, 200), ints(1, 9 * page_tokens + 1, 200), ints(-9, 9, 200)
        arguments = torch.stack(columns), ints(0, 50, 300), ints(0, 2**30, 300, 9), page_tokens
        expected = decode_rows.decode_rows.reference(*arguments)
        for got, part in zip(module.decode_rows(*arguments), expected, strict=True):
            assert torch.equal(got, part)
