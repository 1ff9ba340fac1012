"""Runs launches of Triton's interpreter with each access of memory checked.

Every tensor of a launch has addresses of its own, far from those of others: an access beyond its
ends is found, and so is one by a wrong pointer. Programs run in a random order. What programs read
and write is compared when all have run: on a GPU they run at once.
"""

# pyright: basic

from __future__ import annotations

import inspect
import random
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton.runtime import interpreter

from antiphon.kernels.triton.launch import RECORDING

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.triton.launch import Constant

SPACE_BITS = 44
"""Addresses of a tensor, which begins in their middle."""
MIDDLE = 1 << (SPACE_BITS - 1)


class Unsafe(Exception):
    """A launch reads or writes what it must not."""


@contextmanager
def sanitized() -> Generator[None]:
    """Check the launches of this thread.

    Raises:
        Unsafe: By a launch inside: an access beyond a tensor; two programs, or two lanes with
            different values, that write to an address; a program that reads what another one
            writes, or, without a barrier, what it has written itself.
    """
    order = random.Random(1)
    RECORDING.recorder = lambda *launch: _run(order, *launch)
    try:
        yield
    finally:
        RECORDING.recorder = None


def _run(
    order: random.Random,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Tensor | float, ...],
    constants: dict[str, Constant],
) -> None:
    function = kernel.rewrite()
    options = {name: constants[name] for name in kernel.arg_names if name in constants}
    given = inspect.getcallargs(function, *arguments, **options)
    memory = _Memory(kernel.__name__, {n: t for n, t in given.items() if torch.is_tensor(t)})
    builder = interpreter.interpreter_builder
    native, barrier = interpreter._interpreter, builder.create_barrier
    patched = interpreter._patch_lang(function)
    interpreter._interpreter, builder.create_barrier = memory, memory.barrier
    try:
        handles = {
            name: memory.pointer(name)
            if torch.is_tensor(value)
            else value
            if name in constants
            else interpreter._implicit_cvt(value)
            for name, value in given.items()
        }
        whole = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*whole)
        programs = list(product(*map(range, whole)))
        order.shuffle(programs)
        for number, program in enumerate(programs):
            builder.set_grid_idx(*program)
            memory.begin(number)
            function(**handles)
    finally:
        interpreter._interpreter, builder.create_barrier = native, barrier
        patched.restore()
    memory.compare()


class _Memory:
    """Stands for the module by which the interpreter accesses memory."""

    def __init__(self, kernel: str, tensors: dict[str, Tensor]) -> None:
        self._native = interpreter._interpreter
        self._kernel = kernel
        self._names, self._tensors = list(tensors), list(tensors.values())
        self._starts = np.array([each.data_ptr() for each in self._tensors], np.int64)
        self._ends = np.array([_extent_bytes(each) for each in self._tensors], np.int64)
        # Addresses, and the program that has accessed them.
        self._reads: list[tuple[NDArray[np.int64], int]] = []
        self._writes: list[tuple[NDArray[np.int64], int]] = []
        self._program = 0
        self._unordered: list[NDArray[np.int64]] = []  # writes of the program since a barrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def pointer(self, name: str) -> Any:
        """The first address of a tensor, as a kernel sees it."""
        place = self._names.index(name)
        handle = interpreter._implicit_cvt(self._tensors[place])
        handle.handle.data[:] = _first_address(place)
        return handle

    def begin(self, program: int) -> None:
        self._program = program
        self.barrier()

    def barrier(self) -> None:
        self._unordered = []

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        real = self._real(pointers, mask, dtype.itemsize, "reads")
        read = real[mask]
        self._reads.append((read, self._program))
        for written in self._unordered:
            self._refuse(read[np.isin(read, written)], "is read behind a write, without a barrier")
        return self._native.load(real.view(np.uint64), mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        real = self._real(pointers, mask, values.dtype.itemsize, "writes")
        written = real[mask]
        self._writes.append((written, self._program))
        self._unordered.append(written)
        _, first, which = np.unique(written, return_index=True, return_inverse=True)
        if len(first) < len(written):
            bits = np.broadcast_to(values, mask.shape)[mask].view(f"u{values.dtype.itemsize}")
            self._refuse(written[bits != bits[first][which]], "is written to by two lanes")
        return self._native.store(real.view(np.uint64), values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        real = self._real(pointers, mask, values.dtype.itemsize, "writes")
        return self._native.atomic_rmw(operation, real.view(np.uint64), values, mask, order)

    def _real(self, pointers: Any, mask: Any, size: int, verb: str) -> NDArray[np.int64]:
        """Addresses that there are; those that are masked are 0."""
        real = np.zeros(pointers.shape, np.int64)
        used = pointers[mask].astype(np.int64)
        if not len(used):
            return real
        lowest, highest = int(used.min()), int(used.max())
        number = (lowest >> SPACE_BITS) - 1
        inside = 0 <= number < len(self._names)
        start, end = _first_address(number), int(self._ends[number]) if inside else 0
        if lowest < start or highest + size > start + end:
            name = self._names[number] if inside else "no tensor"
            place = (lowest if lowest < start else highest) - start
            raise Unsafe(f"{self._kernel} {verb} {name} at byte {place}, of {end}")
        real[mask] = used + (self._starts[number] - start)
        return real

    def compare(self) -> None:
        """Check what programs that run at once would do to each other."""
        written, writers = _joined(self._writes)
        if not len(written):
            return
        order = np.argsort(written, kind="stable")
        written, writers = written[order], writers[order]
        twice = (written[1:] == written[:-1]) & (writers[1:] != writers[:-1])
        self._refuse(written[1:][twice], "is written to by two programs")
        read, readers = _joined(self._reads)
        place = np.minimum(np.searchsorted(written, read), len(written) - 1)
        raced = (written[place] == read) & (writers[place] != readers)
        self._refuse(read[raced], "is read by a program, and written to by another")

    def _refuse(self, addresses: NDArray[np.int64], what: str) -> None:
        if len(addresses):
            raise Unsafe(f"{self._kernel}: {self._name_of(addresses[0])} {what}")

    def _name_of(self, address: int) -> str:
        offsets = address - self._starts
        place = int(np.flatnonzero((offsets >= 0) & (offsets < self._ends))[0])
        return f"{self._names[place]} at byte {offsets[place]}"


def _first_address(place: int) -> int:
    """Of a tensor of a launch, as a kernel sees it."""
    return ((place + 1) << SPACE_BITS) + MIDDLE


def _joined(accesses: list[tuple[NDArray[np.int64], int]]) -> NDArray[np.int64]:
    """All addresses, and the program of each, (2, N)."""
    columns = [np.stack([found, np.full_like(found, program)]) for found, program in accesses]
    return np.concatenate([np.zeros((2, 0), np.int64), *columns], axis=1)


def _extent_bytes(tensor: Tensor) -> int:
    """From its first element to behind its last one."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()
