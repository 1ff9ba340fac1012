"""What the other files rely on: narrow floats in the interpreter, and the sanitizer."""

# pyright: basic
# ruff: noqa: N803 (constants of kernels)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.interpreted.sanitizer import Unsafe, sanitized

from antiphon.kernels.triton.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
SIDE = 16


@triton.jit
def cast_kernel(x, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


@triton.jit
def arithmetic_kernel(x, y, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    a, b = tl.load(x + place), tl.load(y + place, mask=place < COUNT, other=1.0)
    tl.store(out + place, a + b)
    tl.store(out + COUNT + place, a * b - a)
    tl.store(out + 2 * COUNT + place, tl.where(a < b, tl.abs(a), -b))
    tl.store(out + 3 * COUNT + place, tl.maximum(a, b) * 3)
    tl.store(out + 4 * COUNT + place, (a.to(tl.float32) / 3.0).to(a.dtype) + 0.1)


@triton.jit
def matrix_kernel(x, y, out, sums, SIDE: tl.constexpr):
    row = tl.arange(0, SIDE)
    place = row[:, None] * SIDE + row[None, :]
    a, b = tl.load(x + place), tl.load(y + place)
    made = tl.dot(a, tl.trans(b), input_precision="ieee")
    tl.store(out + place, made.to(out.dtype.element_ty))
    tl.store(sums + row, tl.sum(a, axis=1).to(sums.dtype.element_ty))
    tl.store(sums + SIDE + row, tl.max(a, axis=1))


def equal(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_narrow_float_is_read_and_written(dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    every = torch.arange(2**bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.uint16)
    x, wide = every.view(dtype), torch.empty(2**bits)
    launch(cast_kernel, (1,), x, wide, COUNT=2**bits)
    equal(wide, x.float())
    back = torch.empty_like(x)
    launch(cast_kernel, (1,), wide, back, COUNT=2**bits)
    equal(back, x)


@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_wide_floats_are_rounded_to_the_nearest(dtype: torch.dtype, source: torch.dtype) -> None:
    """Halves to even ones, and what is too large as torch does."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, generator=generator) * torch.logspace(-40, 38, 4096)
    exact = torch.randn(1024, generator=generator).to(torch.bfloat16).float()
    x[:1024] = (exact.view(torch.int32) + 0x8000).view(torch.float32)  # halfway between two
    x[-3:] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    x = x.to(source)
    out = torch.empty(4096, dtype=dtype)
    launch(cast_kernel, (1,), x, out, COUNT=4096)
    equal(out, x.to(dtype))


def test_each_operation_rounds_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(2048, generator=generator).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(5, 2048, dtype=torch.bfloat16)
    launch(arithmetic_kernel, (1,), a, b, out, COUNT=2048)
    tenth = torch.tensor(0.1, dtype=torch.bfloat16)
    third = (a.float() / 3).to(torch.bfloat16)
    expected = [a + b, a * b - a, torch.where(a < b, a.abs(), -b), torch.maximum(a, b) * 3]
    equal(out, torch.stack([*expected, third + tenth]))
    assert not torch.equal(out[1].float(), a.float() * b.float() - a.float()), "rounded once"


def test_products_of_bfloat16_are_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(SIDE, SIDE, generator=generator).to(torch.bfloat16) for _ in range(2))
    out, sums = torch.empty(SIDE, SIDE), torch.empty(2, SIDE, dtype=torch.bfloat16)
    launch(matrix_kernel, (1,), a, b, out, sums, SIDE=SIDE)
    torch.testing.assert_close(out, a.float() @ b.float().T, atol=1e-5, rtol=1e-5)
    equal(sums, torch.stack([a.float().sum(dim=1).to(torch.bfloat16), a.amax(dim=1)]))


@triton.jit
def copy_kernel(x, out, count, shift, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * (BLOCK - OVERLAP) + tl.arange(0, BLOCK) + shift
    tl.store(out + place, tl.load(x + place, mask=place < count, other=0.0), mask=place < count)


@triton.jit
def lanes_kernel(x, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place // 2, tl.load(x + place))


@triton.jit
def neighbour_kernel(x, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + (place + 1) % (2 * BLOCK)))


@triton.jit
def turn_kernel(x, out, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + place, tl.load(out + BLOCK - 1 - place))


@triton.jit
def count_kernel(out):
    tl.atomic_add(out, 1)


def test_a_launch_that_is_safe_is_run() -> None:
    x, out = torch.arange(40.0), torch.empty(40)
    counted = torch.zeros(1, dtype=torch.int32)
    with sanitized():
        launch(copy_kernel, (3,), x, out, 40, 0, OVERLAP=0, BLOCK=16)
        launch(turn_kernel, (1,), out, torch.empty(32), BARRIER=True, BLOCK=32)
        launch(count_kernel, (5,), counted)
    assert torch.equal(out, torch.cat((x[:32].flip(0), x[32:])))
    assert counted.item() == 5


def unsafe_launches() -> list[Any]:
    x, out, views = torch.zeros(32), torch.zeros(32), torch.zeros(64)
    copied = {"OVERLAP": 0, "BLOCK": 16}
    return [
        pytest.param(("reads x at byte 156, of 128", copy_kernel, (3,), x, views, 40, 0), copied),
        pytest.param(("writes out at byte 128", copy_kernel, (3,), views, out, 33, 0), copied),
        pytest.param(("reads x at byte -4", copy_kernel, (2,), x, out, 32, -1), copied),
        pytest.param(
            ("writes out at byte 188", copy_kernel, (3,), views, views[:32], 48, 0), copied
        ),
        pytest.param(
            ("out at byte 48 is written to by two programs", copy_kernel, (2,), x, out, 28, 0),
            {"OVERLAP": 4, "BLOCK": 16},
        ),
        pytest.param(
            ("is read by a program, and written to by another", neighbour_kernel, (2,), x),
            {"BLOCK": 16},
        ),
        pytest.param(
            (
                "out at byte 0 is written to by two lanes",
                lanes_kernel,
                (1,),
                torch.arange(8.0),
                out,
            ),
            {"BLOCK": 8},
        ),
        pytest.param(
            ("is read behind a write, without a barrier", turn_kernel, (1,), x, out),
            {"BARRIER": False, "BLOCK": 16},
        ),
    ]


@pytest.mark.parametrize(("call", "constants"), unsafe_launches())
def test_a_launch_that_is_not_safe_is_found(call: tuple[Any, ...], constants: Any) -> None:
    message, kernel, grid, *arguments = call
    with sanitized(), pytest.raises(Unsafe, match=message):
        launch(kernel, grid, *arguments, **constants)
