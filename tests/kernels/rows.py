"""Every row of an op that this machine runs, each instruction set of the C++ kernels by itself."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from antiphon.kernels.cpu import extension
from antiphon.kernels.op import DeviceCapability, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ISAS: tuple[str, ...] = () if extension.unavailable_reason() else tuple(extension.load().isas())


@dataclass(frozen=True)
class Row:
    """One way to compute an op."""

    name: str
    function: Callable[..., Any]
    isa: str | None
    invariant: bool

    def __call__(self, *arguments: Any) -> Any:
        """Compute it."""
        with using(self.isa):
            return self.function(*arguments)


@contextmanager
def using(isa: str | None) -> Iterator[None]:
    """Let the C++ kernels use one instruction set; None leaves them alone."""
    if isa is None:
        yield
        return
    library = extension.load()
    before = library.isa()
    library.use_isa(isa)
    try:
        yield
    finally:
        library.use_isa(before)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch and the C++ kernels use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def each_row(
    op: Op[..., Any], name: str = "row", *, invariant: bool = False
) -> pytest.MarkDecorator:
    """Run a test with every way to compute an op, or with those that are batch-invariant."""
    rows = [row for row in rows_of(op) if row.invariant or not invariant]
    return pytest.mark.parametrize(name, rows, ids=lambda row: row.name)


def rows_of(op: Op[..., Any], dtype: torch.dtype = torch.float32) -> list[Row]:
    """The reference, and every backend that can run here."""
    rows = [Row("torch", op.reference, None, invariant=False)]
    for backend in op.backends:
        if backend.needs(DeviceCapability("cpu", dtype=dtype)) is None:
            call = op.select(DeviceCapability("cpu", dtype=dtype), backend.name).call
            for isa in ISAS if backend.name == "cpu" else (None,):
                name = f"{backend.name}-{isa}" if isa else backend.name
                rows.append(Row(name, call, isa, backend.invariant))
    return rows
