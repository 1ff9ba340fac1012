"""The small ops against float64, entry by entry, and each row of them against its reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from tests.kernels.rows import Row, each_row

from antiphon.kernels.activation import ActivationKind, activate, gate, silu_mul, soft_capped
from antiphon.kernels.kv import (
    key_pages_shape,
    page_slots,
    read_keys,
    read_values,
    store_kv,
    value_pages_shape,
)
from antiphon.kernels.norm import (
    NormKind,
    NormWeights,
    add_rmsnorm,
    layernorm,
    rmsnorm,
    rmsnorm_wide,
)
from antiphon.kernels.rotary import (
    CosSinCache,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    QkNormWeights,
    RotarySpec,
    apply_rotary,
    cos_sin,
    qk_norm_rope_store,
)

GENERATOR = torch.Generator().manual_seed(0)
DTYPES = (torch.float32, torch.bfloat16)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=GENERATOR)


@each_row(rmsnorm)
def test_rmsnorm_scales_rows_to_unit_size(row: Row) -> None:
    x, weight, eps = random(3, 8), random(8), 0.1
    got = row(x, weight, eps)
    for i in range(3):
        size = math.sqrt(sum(value**2 for value in x[i].tolist()) / 8 + eps)
        torch.testing.assert_close(got[i], x[i] * weight / size)


@each_row(add_rmsnorm)
def test_add_rmsnorm_returns_the_new_residual(row: Row) -> None:
    x, residual, weight = random(3, 8), random(3, 8), random(8)
    normed, total = row(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, rmsnorm.reference(total, weight, 1e-3))


@each_row(layernorm)
@pytest.mark.parametrize("size", [1, 8, 31, 384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm_gives_rows_zero_mean_and_unit_variance(
    row: Row, dtype: torch.dtype, size: int
) -> None:
    # A mean far from zero: what is left of a number without it has few digits.
    x = (random(2, 3, size) + 50).to(dtype)
    weight, bias = random(size).to(dtype), random(size).to(dtype)
    for parameters in ((weight, bias), (weight, None), (None, None)):
        want = x.double() - x.double().mean(dim=-1, keepdim=True)
        want /= (want.square().mean(dim=-1, keepdim=True) + 0.1).sqrt()
        for factor, operation in zip(parameters, (torch.mul, torch.add), strict=True):
            want = want if factor is None else operation(want, factor.double())
        bits = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            row(x, *parameters, 0.1).double(), want, rtol=bits, atol=4 * bits
        )


ACTIVATIONS: tuple[ActivationKind, ...] = get_args(ActivationKind)


@each_row(activate)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_agree_with_float64(row: Row, dtype: torch.dtype, kind: ActivationKind) -> None:
    x = torch.cat((random(3000) * 3, torch.linspace(-30, 30, 1111), random(100) * 1e-3)).to(dtype)
    want = activate.reference(x.double(), kind)
    bits = 2**-8 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(row(x, kind).double(), want, rtol=bits, atol=1e-6)


@each_row(activate, invariant=True)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_has_its_bits_wherever_a_number_lies(row: Row, kind: ActivationKind) -> None:
    x = random(5000)
    assert torch.equal(row(x, kind)[4999:], row(x[4999:], kind))
    assert row(torch.tensor([torch.nan]), kind).isnan().all()


@each_row(layernorm, invariant=True)
def test_a_layernorm_shows_what_is_not_finite_in_its_own_row_only(row: Row) -> None:
    x, weight, bias = random(4, 20), random(20), random(20)
    alone = row(x, weight, bias, 1e-5)
    x[2, 7] = torch.inf
    spoiled = row(x, weight, bias, 1e-5)
    assert not spoiled[2].isfinite().any()
    assert torch.equal(spoiled[[0, 1, 3]], alone[[0, 1, 3]])


@each_row(silu_mul)
def test_silu_mul_gates_the_second_half(row: Row) -> None:
    gate, up = random(3, 5), random(3, 5)
    want = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(row(torch.cat((gate, up), dim=-1)), want)


def test_rotary_turns_pairs_by_position_times_frequency() -> None:
    waves = RotarySpec(size=6, base=50.0)
    positions = torch.tensor([0, 3, 41])
    x = random(3, 2, 6)
    cos, sin = cos_sin(waves.frequencies(), positions, torch.float32)
    turned = apply_rotary(x, cos, sin)
    for token, position in enumerate(positions.tolist()):
        for pair in range(3):
            turn = position * 50.0 ** (-2 * pair / 6)
            a, b = x[token, :, pair], x[token, :, pair + 3]
            torch.testing.assert_close(
                turned[token, :, pair], a * math.cos(turn) - b * math.sin(turn)
            )
            torch.testing.assert_close(
                turned[token, :, pair + 3], b * math.cos(turn) + a * math.sin(turn)
            )


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_stored_at_their_places(dtype: torch.dtype, page_tokens: int) -> None:
    page = (12, page_tokens, 2, 8, dtype)
    keys, values = (torch.zeros(of(*page), dtype=dtype) for of in PAGES_SHAPES)
    slots = page_slots(page_tokens) * torch.tensor([7, 2, 4, 4, 5])
    slots += torch.tensor([page_tokens - 1, 0, 0, min(1, page_tokens), 0])
    k = random(5, 2, 8).to(dtype)
    store_kv(k, -k, keys, values, slots)
    assert torch.equal(read_keys(keys, slots), k)
    assert torch.equal(read_values(values, slots), -k)
    assert int((keys != 0).sum()) == int((values != 0).sum()) == 5 * 2 * 8


def test_pages_have_lanes_of_tokens_and_of_dimensions() -> None:
    """The layout that kernels read, written out."""
    page = (3, 6, 2, 8, torch.bfloat16)
    keys, values = (torch.zeros(of(*page), dtype=torch.bfloat16) for of in PAGES_SHAPES)
    k = torch.arange(1.0, 17.0).view(1, 2, 8).bfloat16()
    store_kv(k, -k, keys, values, torch.tensor([6 + 3]))
    for head in range(2):
        for d in range(8):
            assert keys[1, head, d // 2, 3, d % 2] == k[0, head, d]
            assert values[1, head, 3 // 2, d, 3 % 2] == -k[0, head, d]


PAGES_SHAPES = (key_pages_shape, value_pages_shape)


def _norms_of(kind: NormKind, over: Literal["head", "token"] = "head") -> MakeNorms:
    def made(size: int, dtype: torch.dtype) -> QkNormWeights:
        of = torch.float32 if kind == "rms_wide" else dtype

        def weights(heads: int) -> NormWeights:
            wide = size * (heads if over == "token" else 1)
            bias = random(wide).to(dtype) if kind == "layer" else None
            return NormWeights(random(wide).to(of), bias)

        return QkNormWeights(weights(6), weights(2), 1e-3, kind, over)

    return made


MakeNorms = Callable[[int, torch.dtype], QkNormWeights | None]
NORMS: dict[str, MakeNorms] = {
    "": lambda *_: None,
    "rms": _norms_of("rms"),
    "rms of a token": _norms_of("rms", "token"),
    "wide": _norms_of("rms_wide"),
    "wide of a token": _norms_of("rms_wide", "token"),
    "layer": _norms_of("layer"),
}


class HeadsCase:
    """Heads of some tokens, and a cache to keep them in: anywhere, or one behind the other."""

    def __init__(
        self,
        tokens: int,
        size: int,
        dtype: torch.dtype,
        *,
        norms: str = "",
        rotated: int | None = None,
        page_tokens: int = 4,
        begin: int | None = None,
    ) -> None:
        waves = RotarySpec(size if rotated is None else rotated, 50.0).frequencies()
        self.heads = random(tokens, 6 + 2 + 2, size).to(dtype)
        self.cos, self.sin = cos_sin(waves, torch.arange(3, 3 + tokens), dtype)
        page = (192 // page_tokens, page_tokens, 2, size, dtype)
        self.cache = [torch.full(of(*page), 7.0, dtype=dtype) for of in PAGES_SHAPES]
        self.places = torch.randperm(192, generator=GENERATOR)[:tokens]
        if begin is not None:
            self.places = torch.arange(begin, begin + tokens)
        self.norms = NORMS[norms](size, dtype)

    def run(self, row: Row, first: int = 0, last: int | None = None) -> torch.Tensor:
        part = slice(first, last)
        cos, sin, places = self.cos[part], self.sin[part], self.places[part]
        keys, values = self.cache
        return row(self.heads[part], cos, sin, keys, values, places, self.norms)


WHOLE = [(size, size) for size in (6, 16, 32, 40, 64, 256)]
PARTS = [(40, rotated) for rotated in (0, 2, 16, 34)]


@each_row(qk_norm_rope_store)
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_rotated_and_kept_and_what_is_not_rotated_stays(
    row: Row, dtype: torch.dtype, norms: str
) -> None:
    for size, rotated in WHOLE + PARTS:
        assert_heads_are_turned(row, dtype, size, rotated, norms)


def assert_heads_are_turned(
    row: Row, dtype: torch.dtype, size: int, rotated: int, norms: str
) -> None:
    case = HeadsCase(5, size, dtype, norms=norms, rotated=rotated)
    q, k, v = case.heads.split((6, 2, 2), dim=1)
    if case.norms:
        q = case.norms.reference(q, case.norms.query)
        k = case.norms.reference(k, case.norms.key)
    kept = [pages.clone() for pages in case.cache]
    k = torch.cat((apply_rotary(k[..., :rotated], case.cos, case.sin), k[..., rotated:]), dim=-1)
    store_kv(k, v, kept[0], kept[1], case.places)
    step = 0.02 if dtype is torch.bfloat16 else 1e-5
    turned = case.run(row)
    torch.testing.assert_close(turned[..., rotated:], q[..., rotated:], atol=step, rtol=step)
    expected = apply_rotary(q[..., :rotated], case.cos, case.sin)
    torch.testing.assert_close(turned[..., :rotated], expected, atol=step, rtol=step)
    torch.testing.assert_close(case.cache, kept, atol=step, rtol=step)


@each_row(qk_norm_rope_store)
def test_a_rotation_of_more_than_a_head_is_refused(row: Row) -> None:
    case = HeadsCase(2, 16, torch.float32, rotated=18)
    with pytest.raises(RuntimeError, match="16"):
        case.run(row)


@each_row(qk_norm_rope_store)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_has_the_roundings_of_its_reference(row: Row, dtype: torch.dtype) -> None:
    case, again = HeadsCase(9, 64, dtype), HeadsCase(9, 64, dtype)
    again.heads, again.places = case.heads, case.places
    reference = Row("torch", qk_norm_rope_store.reference, None, invariant=False)
    assert torch.equal(case.run(row), again.run(reference))
    assert all(map(torch.equal, case.cache, again.cache))


@each_row(qk_norm_rope_store, invariant=True)
def test_a_place_outside_the_cache_is_refused(row: Row) -> None:
    case = HeadsCase(2, 16, torch.float32)
    case.places[1] = 192
    with pytest.raises(IndexError, match="no place 192"):
        case.run(row)


@each_row(add_rmsnorm)
@pytest.mark.parametrize("size", [1, 8, 31, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_agree_with_their_reference_to_one_rounding(
    row: Row, dtype: torch.dtype, size: int
) -> None:
    x, residual, weight = (random(n, size).to(dtype) for n in (7, 7, 1))
    normed, total = row(x, residual, weight[0], 1e-5)
    want, want_total = add_rmsnorm.reference(x, residual, weight[0], 1e-5)
    assert torch.equal(total, want_total)
    step = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(normed, want, atol=0, rtol=step)
    close = (normed == want).float().mean()
    assert dtype is torch.float32 or close > 0.98, f"only {close:.1%} are equal"


@each_row(silu_mul)
@pytest.mark.parametrize("width", [1, 16, 40, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_agree_with_their_reference_to_one_rounding(
    row: Row, dtype: torch.dtype, width: int
) -> None:
    gate_up = (4 * random(7, 2 * width)).to(dtype)
    step = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    want = silu_mul.reference(gate_up)
    torch.testing.assert_close(row(gate_up), want, atol=1e-30, rtol=step)


@each_row(silu_mul)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates_are_open_or_shut(row: Row, dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -200.0, -0.0, 200.0, 3e38, torch.inf, torch.nan])
    up = torch.full_like(gate, 0.5)
    got = row(torch.cat((gate, up)).to(dtype)[None])[0].float()
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(got[3:6], gate[3:6] / 2, rtol=0.01, atol=0)
    assert got[6].isnan()


@each_row(rmsnorm_wide)
@pytest.mark.parametrize("size", [1, 8, 31, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_norms_round_once(row: Row, dtype: torch.dtype, size: int) -> None:
    x, weight = random(3, 7, size).to(dtype), random(size)
    want = rmsnorm_wide.reference(x, weight, 1e-5)
    step = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    got = row(x, weight, 1e-5)
    torch.testing.assert_close(got, want, atol=0, rtol=step)
    assert dtype is torch.float32 or (got == want).float().mean() > 0.98


@each_row(gate)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_every_activation_agree_with_their_reference(
    row: Row, dtype: torch.dtype, kind: ActivationKind
) -> None:
    step = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
    for width in (1, 16, 40, 1536):
        gate_up = (4 * random(7, 2 * width)).to(dtype)
        want = gate.reference(gate_up, kind)
        torch.testing.assert_close(row(gate_up, kind), want, atol=max(step / 10, 3e-5), rtol=step)


@each_row(soft_capped)
@pytest.mark.parametrize("size", [1, 31, 9000])
def test_soft_caps_bend_what_is_large(row: Row, size: int) -> None:
    x = 100 * random(3, size)
    x[0, 0] = torch.inf
    want = 30.0 * (x / 30.0).tanh()
    torch.testing.assert_close(row(x, 30.0), want, atol=1e-5, rtol=1e-6)


@each_row(rmsnorm)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_norm_shows_what_is_not_finite_in_its_own_row_only(row: Row, bad: float) -> None:
    x = random(3, 40)
    x[1, 17] = bad
    shown = ~row(x, torch.ones(40), 1e-3).isfinite().all(dim=1)
    assert shown.tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@each_row(add_rmsnorm, invariant=True)
def test_a_row_has_the_same_bits_alone_and_among_others(row: Row, dtype: torch.dtype) -> None:
    x, residual, weight = random(64, 577).to(dtype), random(64, 577).to(dtype), random(577)
    together = torch.stack(row(x, residual, weight.to(dtype), 1e-5))
    for i in range(64):
        alone = row(x[i : i + 1], residual[i : i + 1], weight.to(dtype), 1e-5)
        assert torch.equal(torch.stack(alone)[:, 0], together[:, i])


PLACES = ((4, None), (32, None), (16, 11), (64, 16), (12, 5))
"""Tokens of a page, and where tokens that lie one behind the other begin."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", NORMS)
@each_row(qk_norm_rope_store, invariant=True)
def test_a_token_is_kept_with_the_same_bits_alone_and_among_others(
    row: Row, dtype: torch.dtype, norms: str
) -> None:
    for (page_tokens, begin), size in itertools.product(PLACES, (6, 64)):
        case = HeadsCase(70, size, dtype, norms=norms, page_tokens=page_tokens, begin=begin)
        if begin is not None:
            case.places[60:] = case.places[60:].flip(0)
        together = case.run(row)
        cache = [pages.clone() for pages in case.cache]
        for pages in case.cache:
            pages.fill_(7.0)
        for i in range(70):
            assert torch.equal(case.run(row, i, i + 1), together[i : i + 1])
        assert all(map(torch.equal, case.cache, cache))


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_that_are_kept_have_the_bits_of_those_computed_alone(dtype: torch.dtype) -> None:
    way = RotarySpec(18, 10_000.0)
    frequencies = way.frequencies()
    kept = CosSinCache(way, dtype)
    for positions in ([0], [5, 1023, 5], [1024], [70_000, 3], [1023]):
        turns = kept.at_positions(np.array(positions, np.int32))
        expected = cos_sin(frequencies, torch.tensor(positions), dtype)
        assert torch.equal(torch.stack(turns.by_token), torch.stack(expected))


def test_linear_scaling_slows_every_frequency() -> None:
    plain, scaled = RotarySpec(8, 100.0), RotarySpec(8, 100.0, LinearScaling(4.0))
    torch.testing.assert_close(scaled.frequencies(), plain.frequencies() / 4)


def test_a_dynamic_rotation_is_a_function_of_the_position_alone() -> None:
    plain, way = RotarySpec(16, 100.0), RotarySpec(16, 100.0, DynamicScaling(3.0, 32))
    frequencies = way.frequencies_at(torch.arange(64))
    assert torch.equal(frequencies[:32], plain.frequencies().expand(32, 8))
    assert (frequencies[33:, 1:] < frequencies[32:-1, 1:]).all()
    # Of the last token of twice the trained text: a base of 100 * (3 * 2 - 2) ** (16 / 14).
    expected = RotarySpec(16, 100.0 * 4.0 ** (16 / 14)).frequencies()
    torch.testing.assert_close(frequencies[63], expected)
    assert torch.equal(way.frequencies_at(torch.tensor([40])), frequencies[40:41])


@pytest.mark.parametrize("trained", [64, 8192])
def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones(trained: int) -> None:
    plain = RotarySpec(64, 500_000.0)
    scaled = RotarySpec(64, 500_000.0, Llama3Scaling(8.0, 1.0, 4.0, trained))
    turns = trained * plain.frequencies() / (2 * math.pi)
    ratio = plain.frequencies() / scaled.frequencies()
    torch.testing.assert_close(ratio[turns > 4], torch.ones(int((turns > 4).sum())))
    torch.testing.assert_close(ratio[turns < 1], torch.full((int((turns < 1).sum()),), 8.0))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1) & (between < 8)).all()
