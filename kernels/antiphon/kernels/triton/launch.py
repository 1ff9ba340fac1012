"""Launches of Triton kernels, and a record of them: what is launched is what must compile."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class Kernel(Protocol):
    """A function that `triton.jit` has made, to be compiled or interpreted."""

    fn: Any

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]: ...


Constant = int | float | bool | None


@dataclass(frozen=True, slots=True)
class Launch:
    """What of a launch determines its binary."""

    kernel: str  # its module and name
    # Their types, as `triton.compile` names them, and alignment. Integers are not specialised: what
    # is the same in every pass is a constant, and what is not must not make another binary.
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    stages: int


_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
ALIGNMENT = 16
ALIGNED = ":16"
"""Behind the type of a pointer to so many whole bytes: only there are 128 bits loaded at once."""
_records: list[set[Launch]] = []


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    *arguments: torch.Tensor | float,
    warps: int = 4,
    stages: int = 2,
    **constants: Constant,
) -> None:
    """Run a kernel on a grid of programs; an empty grid runs none."""
    if _records:
        types = tuple(map(_type_of, arguments))
        name = f"{kernel.fn.__module__.rpartition('.')[2]}:{kernel.fn.__name__}"
        made = Launch(name, types, tuple(constants.items()), warps, stages)
        for record in _records:
            record.add(made)
    if 0 in grid:
        return
    kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


@contextmanager
def recording() -> Generator[set[Launch]]:
    """The launches of what runs meanwhile."""
    record = set[Launch]()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def _type_of(argument: torch.Tensor | float) -> str:
    if isinstance(argument, torch.Tensor):
        aligned = argument.data_ptr() % ALIGNMENT == 0
        return _TYPES[argument.dtype] + (ALIGNED if aligned else "")
    return "fp32" if isinstance(argument, float) else "i32"
