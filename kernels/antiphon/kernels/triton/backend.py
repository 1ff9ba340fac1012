"""The backend `triton` of an op: what its kernels need of a device."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch

from antiphon.kernels.op import Backend, DeviceCapability

INTERPRETER = "interpreter"
"""The kind of a device whose kernels Triton's interpreter runs, on CPU tensors."""
SMS = (80, 86, 89, 90, 100, 103, 120)
"""The compute capabilities for which the kernels are meant, without the point."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def triton(target: str, *, sms: tuple[int, ...] = SMS, invariant: bool = False) -> Backend:
    """The backend `triton` of an op: a function `module:name` of `antiphon.kernels.triton`."""
    return Backend(
        "triton",
        f"antiphon.kernels.triton.{target}",
        partial(_unsupported_reason, sms=sms),
        invariant=invariant,
    )


def _unsupported_reason(device: DeviceCapability, sms: tuple[int, ...]) -> str | None:
    if device.kind not in ("cuda", INTERPRETER):
        return "it runs on CUDA only"
    if device.dtype not in DTYPES:
        return f"it does not compute in {str(device.dtype).removeprefix('torch.')}"
    if device.sm is not None and device.sm not in sms:
        return f"it is not compiled for sm_{device.sm}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
