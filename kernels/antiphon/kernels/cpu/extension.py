"""Loads the CPU extension once, or gives the reason why there is none."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu import build

if TYPE_CHECKING:
    from types import ModuleType

    from antiphon.kernels.op import DeviceCapability


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


def kernel_cpu_s() -> float:
    """CPU time that threads calling kernels have spent in them, in seconds.

    The threads of torch's pool that help them are not counted.
    """
    return load().kernel_cpu_s() if unavailable_reason() is None else 0.0


def numerics_info() -> dict[str, str]:
    """What determines the bits of a result in this process, apart from its operands.

    Sums are as wide as an instruction set's registers, and some of its products round differently;
    where there is no kernel of ours, torch chooses an instruction set itself.
    """
    ours = unavailable_reason() is None
    return {
        "isa": load().isa() if ours else "none",
        "kernels": build.version() if ours else "none",
        "torch": f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
    }


def unsupported_reason(device: DeviceCapability) -> str | None:
    """The requirement that a device lacks, or None: the `needs` of every `cpu` backend."""
    if device.kind != "cpu":
        return "it runs on the CPU only"
    if device.dtype not in (torch.bfloat16, torch.float32):
        return f"it does not compute in {device.dtype}"
    return unavailable_reason()
