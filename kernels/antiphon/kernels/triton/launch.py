"""Launches of Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Constant = int | float | bool | None


class Kernel(Protocol):
    """A function that `triton.jit` has made, to be compiled or interpreted."""

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]: ...


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    *arguments: Tensor | float,
    warps: int = 4,
    stages: int = 2,
    **constants: Constant,
) -> None:
    """Run a kernel on a grid of programs; an empty grid runs none."""
    if 0 not in grid:
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
