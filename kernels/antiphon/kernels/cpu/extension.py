"""The CPU extension, loaded once: its backends, its memory, or the reason why there is none."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import TYPE_CHECKING, NewType, Protocol

import torch

from antiphon.kernels.cpu import build
from antiphon.kernels.op import Backend, DeviceCapability

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

CompiledMetadata = NewType("CompiledMetadata", object)
"""`Rows` of the extension: validated, and split into tasks for its threads."""

CompiledStates = NewType("CompiledStates", object)
"""`StateMetadata` of the extension."""


class CompiledRecurrence(Protocol):
    """A layer with a recurrence in the CPU extension; it reads the weights where they are."""

    def forward(
        self, projected: Tensor, conv_states: Tensor, states: Tensor, rows: CompiledStates
    ) -> Tensor: ...


class TeamSeat(Protocol):
    """A seat for one more thread in the teams of the thread that offers it."""

    def offer(self) -> None:
        """Offer it in what this thread computes from now on."""

    def finish(self, step: int) -> None:
        """The steps up to this one are over."""

    def help(self, step: int) -> int:
        """Compute with the thread that offers it, until a step is over.

        Returns in how many of its calls it has taken part.
        """
        ...


@cache
def load() -> ModuleType:
    """The compiled extension module. Nothing is compiled here.

    Raises:
        ImportError: There is none for these sources, this torch and this processor.
    """
    library = build.library()
    if not library.exists():
        raise ImportError("not built: python -m antiphon.kernels.cpu.build")
    spec = importlib.util.spec_from_file_location(build.MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def unavailable_reason() -> str | None:
    """Why the kernels cannot run in this process, or None."""
    try:
        load()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


def cpu(name: str) -> Backend:
    """The backend `cpu` of an op: a function of `antiphon.kernels.cpu.ops`."""
    # All CPU kernels are batch-invariant: the order of computing a row depends on that row alone.
    target = f"antiphon.kernels.cpu.ops:{name}"
    return Backend("cpu", target, _unsupported_reason, invariant=True)


def _unsupported_reason(device: DeviceCapability) -> str | None:
    if device.kind != "cpu":
        return "it runs on the CPU only"
    if device.dtype not in (torch.bfloat16, torch.float32):
        return f"it does not compute in {device.dtype}"
    return unavailable_reason()


def huge_zeros(*size: int, dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages, where the kernel has any, for memory that every step reads."""
    # Small pages cost a batch of one a tenth of its time: each needs a lookup in a page table that
    # is itself in memory. Tensors share huge pages: memory is freed when the last of a group is
    # gone.
    flat: Tensor = load().zeros(math.prod(size) * dtype.itemsize)
    return flat.view(dtype).view(size)


def pool_zeros(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for memory with scattered reads: in huge pages, where possible and if there are any."""
    if math.prod(size) and device.type == "cpu" and unavailable_reason() is None:
        return huge_zeros(*size, dtype=dtype)
    return torch.zeros(size, dtype=dtype, device=device)


def team_seat() -> TeamSeat | None:
    """A seat in the teams of kernels; None if they are torch's."""
    return load().TeamSeat() if unavailable_reason() is None else None


def kernel_cpu_s() -> float:
    """CPU time that threads calling kernels have spent in them, in seconds."""
    # The threads of torch's pool that help them are not counted.
    return load().kernel_cpu_s() if unavailable_reason() is None else 0.0


def numerics_info() -> dict[str, str]:
    """What determines the bits of a result in this process, apart from its operands."""
    # Sums are as wide as an instruction set's registers, and some of its products round
    # differently; where there is no kernel of ours, torch chooses an instruction set itself.
    ours = unavailable_reason() is None
    return {
        "isa": load().isa() if ours else "none",
        "kernels": build.version() if ours else "none",
        "torch": f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
    }
