"""Codes in groups against the numbers that they stand for, for every kind of codes and scales.

Every instruction set that this machine runs, by itself.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kernels.rows import ISAS, threads, using
from tests.kernels.test_linear import assert_near, drawn

from antiphon.kernels.activation import silu_mul
from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.linear import Grouping, PackedGroups
from antiphon.kernels.op import DeviceCapability
from antiphon.layers.quantization.storage import SIX_BITS, GroupedWeight, common_grouping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

pytestmark = pytest.mark.skipif(
    bool(extension.unavailable_reason()), reason=str(extension.unavailable_reason())
)

ROWS = 70
DTYPES = (torch.bfloat16, torch.float32)
GROUPINGS = {
    f"{bits} bits, {scales}{', minimums' if minimums else ''}": Grouping(
        bits,
        32,
        getattr(torch, scales),
        minimums=minimums,
        values=tuple(float((7 * code) % 61 - 30) for code in range(1 << bits)) if bits < 8 else (),
    )
    for bits, scales, minimums in itertools.product(
        (4, 5, 6, 8), ("float16", "bfloat16", "float32"), (False, True)
    )
}
"""Values in no order, so that a code which is taken for its neighbour shows."""
every_grouping = pytest.mark.parametrize("grouping", GROUPINGS.values(), ids=GROUPINGS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def weight_of(grouping: Grouping, outputs: int, inputs: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 1 << grouping.bits, (outputs, inputs), generator=generator)
    groups = -(-inputs // grouping.group)
    # In a dtype that the kernel's scales have.
    dtype = torch.float16 if grouping.scales is torch.float32 else grouping.scales
    scales = drawn(outputs, groups, dtype=dtype, seed=4).float()
    minimums = drawn(outputs, groups, dtype=dtype, seed=5).float()
    return GroupedWeight(
        grouping,
        codes.to(torch.uint8),
        scales,
        minimums=minimums if grouping.minimums else None,
    )


def packed(
    weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None = None, *, halves: bool = False
) -> Any:
    outputs, inputs = weight.codes.shape
    has_bias = bias is not None
    made = PackedGroups(inputs, outputs, weight.grouping, bias=has_bias, dtype=dtype, halves=halves)
    # In pieces that begin and end in the middle of panels.
    for first, last in itertools.pairwise((0, outputs // 3, outputs)):
        part = slice(first, last)
        lowest = None if weight.lowest is None else weight.lowest[part]
        made.write(first, weight.codes[part], weight.scales[part], lowest)
    if bias is not None:
        made.write_bias(0, bias)
    return made.linear


@every_grouping
@every_dtype
def test_product_is_that_of_the_numbers(grouping: Grouping, dtype: torch.dtype) -> None:
    """The last group of 160 inputs has 32 of 64."""
    for outputs, inputs, group in ((50, 96, 32), (64, 160, 64), (33, 96, 96)):
        weight = weight_of(_with_group(grouping, group), outputs, inputs)
        x, bias = drawn(ROWS, inputs, dtype=dtype, seed=1), drawn(outputs, dtype=dtype, seed=2)
        exact = x.double() @ weight.dequantize().double().T + bias.double()
        linear = packed(weight, dtype, bias)
        # A value counts as often as it is large, and minimums are added apart.
        slack = 30 * inputs
        assert_near(linear.multiply_wide(x), exact, slack)
        assert torch.equal(linear.multiply_wide(x).to(dtype), linear.multiply(x))


def _with_group(grouping: Grouping, group: int) -> Grouping:
    return Grouping(grouping.bits, group, grouping.scales, grouping.minimums, grouping.values)


@every_grouping
@every_dtype
def test_row_has_the_same_bits_among_any_number_of_rows(
    grouping: Grouping, dtype: torch.dtype
) -> None:
    x = drawn(ROWS, 96, dtype=dtype, seed=1)
    linear = packed(weight_of(grouping, 160, 96), dtype, drawn(160, dtype=dtype, seed=2))
    whole = linear.multiply_wide(x)
    for rows in range(1, ROWS + 1):
        assert torch.equal(linear.multiply_wide(x[:rows]), whole[:rows])
    for row in range(ROWS):
        assert torch.equal(linear.multiply_wide(x[row : row + 1]), whole[row : row + 1])
    with threads(3):
        assert torch.equal(linear.multiply_wide(x), whole)


@every_grouping
@every_dtype
def test_gate_in_the_epilogue_is_the_gate_by_itself(grouping: Grouping, dtype: torch.dtype) -> None:
    x = drawn(ROWS, 64, dtype=dtype, seed=1)
    for width in (32, 21):
        weight = weight_of(grouping, 2 * width, 64)
        halves = packed(weight, dtype, halves=True)
        assert torch.equal(halves.multiply(x), packed(weight, dtype).multiply(x))
        by_itself = silu_mul.select(DeviceCapability("cpu", dtype=dtype)).call(halves.multiply(x))
        assert torch.equal(halves.multiply_gated(x), by_itself)


@every_grouping
@every_dtype
def test_table_is_looked_up_from_the_packed_codes(grouping: Grouping, dtype: torch.dtype) -> None:
    weight = weight_of(grouping, 86, 64)
    ids = torch.tensor([85, 0, 31, 32, 42, 43, 0] * 10)
    for halves in (False, True):
        found = packed(weight, dtype, halves=halves).rows(ids)
        assert torch.equal(found, weight.dequantize().to(dtype)[ids])


def test_number_that_is_not_finite_reaches_its_own_row_only() -> None:
    grouping = GROUPINGS["4 bits, float16, minimums"]
    x = drawn(20, 64, dtype=torch.bfloat16, seed=1)
    linear = packed(weight_of(grouping, 64, 64), torch.bfloat16)
    clean = linear.multiply(x)
    x[7, 11] = float("inf")
    found = linear.multiply(x)
    others = torch.arange(20) != 7
    assert not bool(torch.isfinite(found[7]).any())
    assert torch.equal(found[others], clean[others])


def test_what_does_not_fit_is_refused() -> None:
    grouping = GROUPINGS["4 bits, float16"]
    assert grouping.fits(64)
    assert not grouping.fits(60)
    assert not Grouping(5, 16, torch.float16, minimums=False).fits(64)
    assert not Grouping(6, 16, torch.float16, minimums=False).fits(24)
    with pytest.raises(RuntimeError, match="groups and inputs are multiples of 8"):
        PackedGroups(60, 32, grouping, bias=False, dtype=torch.bfloat16)
    linear = packed(weight_of(grouping, 64, 64), torch.bfloat16)
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    scales = torch.zeros(32, 2, dtype=torch.float16)
    linear.write_groups(codes, scales, None, panel=1, lane=0, lanes=32)
    for wrong, message in (
        ({"panel": 2}, "panels 2 to 3 of 2"),
        ({"lane": 1}, "no panel has lanes 1 to 33"),
        ({"codes": codes[:, 1:]}, "expected"),
        ({"scales": scales.float()}, "expected"),
        ({"scales": scales[:31]}, "scales of other rows"),
        ({"minimums": scales}, "minimums are there, or are not"),
    ):
        said: dict[str, Any] = {"codes": codes, "scales": scales, "minimums": None}
        said |= {"panel": 1, "lane": 0, "lanes": 32} | wrong
        with pytest.raises(RuntimeError, match=message):
            linear.write_groups(**said)
    with pytest.raises(RuntimeError, match="written with scales"):
        linear.write(torch.zeros(32, 64), panel=0, lane=0, lanes=32)


def test_different_groupings_have_one_in_common_or_none() -> None:
    four = Grouping(4, 32, torch.float16, minimums=True, values=tuple(map(float, range(16))))
    six = Grouping(6, 16, torch.float32, minimums=False, values=tuple(map(float, range(-32, 32))))
    halves = Grouping(4, 32, torch.float16, minimums=False, values=(0.5,) * 16)
    assert common_grouping([four, four]) == four
    assert common_grouping([four, halves]) is None
    eight = Grouping(8, 32, torch.float16, minimums=False)
    for others, common in (
        ((four, six), Grouping(6, 16, torch.float32, minimums=True, values=SIX_BITS)),
        ((four, six, eight), Grouping(8, 16, torch.float32, minimums=True)),
        ((four, eight), Grouping(8, 32, torch.float16, minimums=True)),
    ):
        assert common_grouping(others) == common
        for one in others:
            weight = weight_of(one, 40, 96)
            assert torch.equal(weight.regrouped(common).dequantize(), weight.dequantize())


def test_wide_scales_are_rounded_for_activations_of_fewer_bits() -> None:
    wide = GROUPINGS["4 bits, float32, minimums"]
    assert wide.multiplied_in(torch.float32) is wide
    assert wide.multiplied_in(torch.bfloat16) == GROUPINGS["4 bits, float16, minimums"]
    powers = GROUPINGS["4 bits, bfloat16"]
    assert powers.multiplied_in(torch.bfloat16) is powers
