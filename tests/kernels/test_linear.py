"""Packed linears against torch, and the same bits however many rows there are.

Every instruction set that this machine runs, by itself.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.rows import ISAS, threads, using

from antiphon.kernels.activation import silu_mul
from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.linear import Format, PackedWeight, head_linears, quantize
from antiphon.kernels.op import DeviceCapability

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

pytestmark = pytest.mark.skipif(
    bool(extension.unavailable_reason()), reason=str(extension.unavailable_reason())
)

DTYPES = (torch.bfloat16, torch.float32)
FORMATS: tuple[Format, ...] = ("packed", "int8", "int8_dynamic")
SHAPES = ((64, 64), (96, 35), (33, 130), (1, 1), (200, 2))
"""Outputs and inputs: whole panels and ragged ones, pairs and fours of inputs that are not full."""
ROWS = 70
every_kind = pytest.mark.parametrize(
    ("dtype", "format_"), list(itertools.product(DTYPES, FORMATS)), ids=str
)


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def drawn(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(
    weight: Tensor, bias: Tensor | None, format_: Format = "packed", *, halves: bool = False
) -> PackedWeight:
    made = PackedWeight(
        weight.shape[1],
        len(weight),
        bias=bias is not None,
        dtype=weight.dtype,
        format_=format_,
        halves=halves,
    )
    made.write(0, weight)
    if bias is not None:
        made.write_bias(0, bias)
    return made


def kept(weight: Tensor, format_: Format) -> Tensor:
    """What a format makes of a weight, in float64."""
    if format_ == "packed":
        return weight.double()
    steps, scales = quantize(weight)
    return steps.double() * scales.double()[:, None]


def steps_of(x: Tensor, format_: Format) -> int | None:
    """How many steps of a row's activations its greatest is, where they are rounded."""
    if format_ == "int8_dynamic":
        return 127
    on_squares = extension.load().isa() == "amx" and x.dtype is torch.bfloat16
    return 127 << 8 if format_ == "int8" and on_squares else None


def cut(x: Tensor, format_: Format) -> Tensor:
    """What a format makes of activations, in float64."""
    steps = steps_of(x, format_)
    if steps is None:
        return x.double()
    scale = x.float().abs().amax(dim=1, keepdim=True) / steps
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (x.float() * inverse).round().double() * scale.double()


def assert_near(ours: Tensor, exact: Tensor, inputs: int) -> None:
    """Within one rounding of the sum and one of the result."""
    unit = torch.finfo(ours.dtype).eps
    slack = 4 * torch.finfo(torch.float32).eps * inputs**0.5 * (1 + exact.abs().max())
    assert bool(((ours.double() - exact).abs() <= exact.abs() * unit + slack).all())


@every_kind
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_is_the_product_of_what_its_format_keeps(
    outputs: int, inputs: int, dtype: torch.dtype, format_: Format, bias: bool
) -> None:
    weight, x = drawn(outputs, inputs, dtype=dtype), drawn(ROWS, inputs, dtype=dtype, seed=1)
    added = drawn(outputs, dtype=dtype, seed=2) if bias else None
    linear = packed(weight, added, format_).linear
    exact = cut(x, format_) @ kept(weight, format_).T
    if added is not None:
        exact = exact + added.double()
    assert_near(linear.multiply(x), exact, inputs)
    assert_near(linear.multiply_wide(x), exact, inputs)
    assert torch.equal(linear.multiply_wide(x).to(dtype), linear.multiply(x))


@every_kind
@pytest.mark.parametrize(("outputs", "inputs"), [(160, 96), (50, 37)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    outputs: int, inputs: int, dtype: torch.dtype, format_: Format
) -> None:
    x = drawn(ROWS, inputs, dtype=dtype, seed=1)
    weight = drawn(outputs, inputs, dtype=dtype)
    linear = packed(weight, drawn(outputs, dtype=dtype, seed=2), format_).linear
    whole = linear.multiply_wide(x)
    for rows in range(1, ROWS + 1):
        assert torch.equal(linear.multiply_wide(x[:rows]), whole[:rows])
    for row in range(ROWS):
        assert torch.equal(linear.multiply_wide(x[row : row + 1]), whole[row : row + 1])


@every_kind
@pytest.mark.parametrize("halves", [False, True])
def test_a_row_has_the_same_bits_in_blocks_of_rows(
    dtype: torch.dtype, format_: Format, halves: bool
) -> None:
    """The first and the last rows of many, cut into blocks, against the same rows by themselves."""
    x = drawn(520, 70, dtype=dtype, seed=1)
    linear = packed(drawn(160, 70, dtype=dtype), None, format_, halves=halves).linear
    for rows in (127, 128, 255, 256, 257, 520):
        whole = linear.multiply_wide(x[:rows])
        assert torch.equal(whole[:5], linear.multiply_wide(x[:5]))
        assert torch.equal(whole[-5:], linear.multiply_wide(x[rows - 5 : rows]))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_row_has_the_same_bits_from_any_number_of_threads(number: int) -> None:
    weight = drawn(300, 200, dtype=torch.bfloat16)
    x = drawn(ROWS, 200, dtype=torch.bfloat16, seed=1)
    linear = packed(weight, None).linear
    alone = linear.multiply_wide(x)
    with threads(number):
        for _ in range(20):
            assert torch.equal(linear.multiply_wide(x), alone)


@every_kind
@pytest.mark.parametrize(("width", "inputs"), [(32, 64), (21, 18), (80, 48)])
def test_the_gate_in_the_epilogue_is_the_gate_by_itself(
    width: int, inputs: int, dtype: torch.dtype, format_: Format
) -> None:
    weight, bias = drawn(2 * width, inputs, dtype=dtype), drawn(2 * width, dtype=dtype, seed=2)
    x = drawn(ROWS, inputs, dtype=dtype, seed=1)
    halves: Any = packed(weight, bias, format_, halves=True).linear
    assert torch.equal(halves.multiply(x), packed(weight, bias, format_).linear.multiply(x))
    gated = halves.multiply_gated(x)
    by_itself = silu_mul.select(DeviceCapability("cpu", dtype=dtype)).call(halves.multiply(x))
    assert torch.equal(gated, by_itself)
    torch.testing.assert_close(gated, silu_mul.reference(halves.multiply(x)))


@every_kind
@pytest.mark.parametrize("halves", [False, True])
def test_a_table_is_looked_up_from_the_packed_copy(
    dtype: torch.dtype, format_: Format, halves: bool
) -> None:
    weight = drawn(86, 33, dtype=dtype)
    ids = torch.tensor([85, 0, 31, 32, 42, 43, 0] * 10)
    found = packed(weight, None, format_, halves=halves).linear.rows(ids)
    assert torch.equal(found, kept(weight, format_).float().to(dtype)[ids])


@given(data=st.data())
def test_weights_written_in_any_pieces_are_the_same(data: st.DataObject) -> None:
    outputs, inputs = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 9))
    halves = outputs % 2 == 0 and data.draw(st.booleans())
    dtype, format_ = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(FORMATS))
    weight, bias = drawn(outputs, inputs, dtype=dtype), drawn(outputs, dtype=dtype, seed=2)
    pieces = PackedWeight(inputs, outputs, bias=True, dtype=dtype, format_=format_, halves=halves)
    ends = sorted(data.draw(st.sets(st.integers(1, outputs), max_size=4)) | {outputs})
    for first, end in zip([0, *ends], ends, strict=False):
        pieces.write(first, weight[first:end])
        pieces.write_bias(first, bias[first:end])
    x = drawn(3, inputs, dtype=dtype, seed=1)
    whole = packed(weight, bias, format_, halves=halves).linear
    assert torch.equal(pieces.linear.multiply(x), whole.multiply(x))


def test_weights_written_again_are_used_from_then_on() -> None:
    old, new = (drawn(64, 32, dtype=torch.bfloat16, seed=seed) for seed in (0, 9))
    x = drawn(2, 32, dtype=torch.bfloat16, seed=1)
    made = packed(old, None)
    linear = made.linear
    made.write(0, new)
    assert torch.equal(linear.multiply(x), packed(new, None).linear.multiply(x))


@every_kind
def test_a_number_that_is_not_finite_reaches_its_own_row_only(
    dtype: torch.dtype, format_: Format
) -> None:
    x = drawn(20, 48, dtype=dtype, seed=1)
    linear = packed(drawn(64, 48, dtype=dtype), None, format_).linear
    clean = linear.multiply(x)
    for trouble in (float("nan"), float("inf")):
        dirty = x.clone()
        dirty[7, 11] = trouble
        found = linear.multiply(dirty)
        assert not bool(torch.isfinite(found[7]).any())
        others = torch.arange(20) != 7
        assert torch.equal(found[others], clean[others])


def test_weights_of_zero_are_quantized_to_zero() -> None:
    weight = torch.zeros(4, 8)
    steps, scales = quantize(weight)
    assert not bool(steps.any())
    assert not bool(scales.any())
    x = drawn(3, 8, dtype=torch.float32)
    for format_ in ("int8", "int8_dynamic"):
        assert not bool(packed(weight, None, format_).linear.multiply(x).any())
    assert not bool(packed(x, None, "int8_dynamic").linear.multiply(torch.zeros(2, 8)).any())


def lanes_of(outputs: int, *, halves: bool) -> tuple[Tensor, Tensor]:
    """Panel and lane of each output."""
    each = torch.arange(outputs)
    if not halves:
        return each // 32, each % 32
    within = each % (outputs // 2)
    return within // 16, within % 16 + (each >= outputs // 2) * 16


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
@pytest.mark.parametrize("whole", [True, False], ids=["as it lies", "transposed"])
def test_panels_hold_the_weight_bit_by_bit(
    dtype: torch.dtype, format_: Format, halves: bool, whole: bool
) -> None:
    """From a checkpoint in any number format, rounded as torch rounds."""
    for inputs in (1, 2, 15, 35, 64, 130):
        weight = drawn(70, inputs, dtype=dtype) if whole else drawn(inputs, 70, dtype=dtype).T
        assert_panels_hold(weight, format_, halves=halves)


def assert_panels_hold(weight: Tensor, format_: Format, *, halves: bool) -> None:
    dtype, inputs = weight.dtype, weight.shape[1]
    kept_in = torch.bfloat16 if dtype is torch.float16 else dtype
    made = PackedWeight(inputs, 70, bias=False, dtype=kept_in, format_=format_, halves=halves)
    made.write(0, weight[:41])
    made.write(41, weight[41:])
    panel, lane = lanes_of(70, halves=halves)
    at = torch.arange(inputs)
    group = made._panels.shape[3]  # (panels, groups, lanes, inputs of a group)
    found = made._panels[panel[:, None], at // group, lane[:, None], at % group]
    if format_ == "packed":
        assert torch.equal(found, weight.to(kept_in))
        return
    steps, scales = quantize(weight)
    assert torch.equal(found.short() - (128 if format_ == "int8_dynamic" else 0), steps.short())
    assert made._scales is not None
    assert torch.equal(made._scales[panel, lane], scales)


def test_rows_that_no_panel_takes_are_refused() -> None:
    linear = packed(drawn(64, 31, dtype=torch.bfloat16), None).linear
    rows = torch.zeros(32, 32, dtype=torch.bfloat16)
    linear.write(rows, panel=1, lane=0, lanes=32)
    for wrong, message in (
        ({"panel": 2}, "panels 2 to 3 of 2"),
        ({"panel": -1}, "panels -1 to 0 of 2"),
        ({"lane": 1}, "no panel has lanes 1 to 33"),
        ({"lanes": 0}, "no panel has lanes 0 to 0"),
        ({"lanes": 3}, "no panel has lanes 0 to 3"),
        ({"rows": rows[:, 1:]}, "rows must be"),
        ({"rows": rows.float()}, "as they are"),
        ({"rows": rows.half()}, "no kernel for Half"),
    ):
        said: dict[str, Any] = {"rows": rows, "panel": 0, "lane": 0, "lanes": 32} | wrong
        with pytest.raises(RuntimeError, match=message):
            linear.write(**said)


def test_no_rows_give_no_rows_and_what_does_not_fit_is_refused() -> None:
    linear: Any = packed(drawn(64, 32, dtype=torch.float32), None).linear
    assert linear.multiply(torch.zeros(0, 32)).shape == (0, 64)
    assert linear.rows(torch.zeros(0, dtype=torch.int64)).shape == (0, 32)
    with pytest.raises(RuntimeError, match="x must be"):
        linear.multiply(torch.zeros(2, 31))
    with pytest.raises(RuntimeError, match="x must be"):
        linear.multiply(torch.zeros(2, 32, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="halves"):
        linear.multiply_gated(torch.zeros(2, 32))
    with pytest.raises(IndexError, match="no output 64"):
        linear.rows(torch.tensor([64]))


def test_rows_that_are_not_contiguous_are_read_as_they_are() -> None:
    wide = drawn(5, 64, dtype=torch.float32)
    linear = packed(drawn(40, 32, dtype=torch.float32, seed=3), None).linear
    assert torch.equal(linear.multiply(wide[:, ::2]), linear.multiply(wide[:, ::2].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 50, 130])
def test_heads_in_one_call_have_the_bits_of_each(dtype: torch.dtype, rows: int) -> None:
    heads = [packed(drawn(35, 20, dtype=dtype, seed=head), None).linear for head in range(5)]
    wide = drawn(rows, 5, 29, dtype=dtype, seed=9)
    for x in (
        wide[..., :20],
        wide[..., 9:].contiguous(),
        wide[..., 9:].transpose(1, 2).clone().transpose(1, 2),
    ):
        want = [head.multiply(x[:, index].contiguous()) for index, head in enumerate(heads)]
        assert torch.equal(head_linears(heads).multiply(x), torch.stack(want, dim=1))


def test_heads_that_do_not_fit_are_refused() -> None:
    heads = [
        packed(drawn(35, 20, dtype=torch.float32, seed=head), None).linear for head in range(3)
    ]
    with pytest.raises(RuntimeError, match="x must be"):
        head_linears(heads).multiply(torch.zeros(2, 4, 20))
    with pytest.raises(RuntimeError, match="there are heads"):
        head_linears([])
    with pytest.raises(RuntimeError, match="one shape"):
        head_linears([heads[0], packed(torch.zeros(35, 21), None).linear])
