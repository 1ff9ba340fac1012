"""The device that a process computes on, and what it can do."""

from __future__ import annotations

import re

import msgspec

from antiphon.resolve.device import INTERPRETER, HostDevice, detect_device
from antiphon.service.startup import CannotStart

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|interpreter")


def interpret(device: str) -> None:
    """Prepare this process for its device. Before anything imports Triton, as transformers does."""
    if device == INTERPRETER:
        from antiphon.kernels.triton.interpreter import enable  # noqa: PLC0415 (it imports Triton)

        enable()


def host_device(name: str = "cpu", ranks: int = 1) -> HostDevice:
    """The device of that name in this machine, or the first of several `ranks`, and its numerics.

    Raises:
        CannotStart: There is none, or there are fewer GPUs than ranks.
    """
    # torch takes seconds to import; meanwhile the process reports that it is starting.
    from antiphon.kernels.cpu.extension import numerics_info, unavailable_reason  # noqa: PLC0415

    host = detect_device()
    if _DEVICE.fullmatch(name) is None:
        raise CannotStart(f"model.device = {name}: must be auto, cpu, cuda, or cuda:N")
    if name in ("auto", "cpu"):
        return msgspec.structs.replace(
            host, lacking=unavailable_reason(), arithmetic=numerics_info()
        )
    from antiphon.model_worker.startup.gpu import (  # noqa: PLC0415 (it imports torch)
        find_gpu,
        gpu_numerics,
        lacking_fp8,
        lacking_int8,
        plan_memory,
    )

    memory_bytes = host.memory_bytes if name == INTERPRETER else find_gpu(name, ranks)
    return msgspec.structs.replace(
        host,
        kind=name.partition(":")[0],
        memory_bytes=memory_bytes,
        lacking=f"model.device is {name}",
        arithmetic=gpu_numerics(name),
        lacking_fp8=lacking_fp8(name),
        lacking_int8=lacking_int8(name),
        plan_memory=plan_memory(),
    )
