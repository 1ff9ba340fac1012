"""Launches on the stream of a device: of Triton kernels, and of calls between devices."""

from __future__ import annotations

from threading import local
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Constant = int | float | bool | None

WARPS, WARP_BYTES = 4, 512
"""Warps of a program, and what the threads of a warp load at once with 128 bits each."""


class Kernel(Protocol):
    """A function that `triton.jit` has made, to be compiled or interpreted."""

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]: ...


class Recorder(Protocol):
    """Takes a launch in place of running it."""

    def __call__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: tuple[Tensor | float, ...],
        constants: dict[str, Constant],
        /,
    ) -> None: ...


class _Recording(local):
    recorder: Recorder | None = None
    calls: Callable[[Callable[[], object]], None] | None = None


RECORDING = _Recording()
"""What takes the launches of kernels and the other calls of this thread; None: they run."""


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    *arguments: Tensor | float,
    warps: int = WARPS,
    stages: int = 2,
    **constants: Constant,
) -> None:
    """Run a kernel on a grid of programs; an empty grid runs none."""
    if 0 in grid:
        return
    constants |= {"num_warps": warps, "num_stages": stages}
    if RECORDING.recorder is None:
        kernel[grid](*arguments, **constants)
    else:
        RECORDING.recorder(kernel, grid, arguments, constants)


def enqueue(call: Callable[[], object]) -> None:
    """Make a call in the order of the stream that is neither a kernel's nor torch's.

    On a GPU it launches what it does, and does not wait for it.
    """
    if RECORDING.calls is None:
        call()
    else:
        RECORDING.calls(call)


def warps_of(size_bytes: int) -> int:
    """With more warps, a program that loads so many bytes at once would load less than 128 bits."""
    return max(1, min(WARPS, size_bytes // WARP_BYTES))


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
