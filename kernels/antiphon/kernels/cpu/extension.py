"""The compiled kernels, loaded once, or one sentence that says why there are none."""

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
    """The module of the kernels. Nothing is compiled here.

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
    """Processor time that threads which call kernels have spent in them, in seconds.

    The other threads of torch's pool, which help them, are not counted.
    """
    return load().kernel_cpu_s() if unavailable_reason() is None else 0.0


def numerics_info() -> dict[str, str]:
    """What the bits of a result depend on in this process, beside its operands.

    Sums are as wide as an instruction set's registers, and some of its products round otherwise;
    what has no kernel of ours, torch computes by an instruction set of its own choice.
    """
    ours = unavailable_reason() is None
    return {
        "isa": load().isa() if ours else "none",
        "kernels": build.version() if ours else "none",
        "torch": f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
    }


def unsupported_reason(device: DeviceCapability) -> str | None:
    """What a device lacks to run them: the `needs` of every `cpu` row."""
    if device.kind != "cpu":
        return "it runs on the CPU only"
    if device.dtype not in (torch.bfloat16, torch.float32):
        return f"it does not compute in {device.dtype}"
    return unavailable_reason()
