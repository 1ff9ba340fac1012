"""The backend `triton` of an op: what its kernels need of a device."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import partial
from pathlib import Path

import torch

from antiphon.kernels.op import Backend, DeviceCapability

INTERPRETER = "interpreter"
"""The kind of a device whose kernels Triton's interpreter runs, on CPU tensors."""
SMS = (80, 86, 89, 90, 100, 103, 120)
"""The compute capabilities for which the kernels are meant, without the point."""
E4M3_SM = 89
"""The first compute capability that converts float8_e4m3fn."""
INT8_SMS = (80, 86, 89, 90, 120)
"""Those where what Triton compiles multiplies int8 at a higher rate than bfloat16."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SOURCES = Path(__file__).parent
_VERSION_DIGITS = 8


def version() -> str:
    """A hash of the kernels and of how they are launched, equal wherever these are the same."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_VERSION_DIGITS]


def triton(
    target: str,
    *,
    caches: bool = False,
    e4m3: bool = False,
    int8: bool = False,
    fixed: str | None = "",
) -> Backend:
    """The backend `triton` of an op: a function `module:name` of `antiphon.kernels.triton`.

    `caches`: it reads or writes the KV cache; `e4m3`: it computes with float8_e4m3fn; `int8`: it
    multiplies int8. A kernel is batch-invariant, unless its tiles follow the batch: then another
    function of the module, that is `fixed`, is, or None.
    """
    module, _, _ = target.partition(":")
    return Backend(
        "triton",
        f"antiphon.kernels.triton.{target}",
        partial(_unsupported_reason, caches=caches, e4m3=e4m3, int8=int8),
        invariant=fixed == "",
        fixed=f"antiphon.kernels.triton.{module}:{fixed}" if fixed else "",
    )


def _unsupported_reason(
    device: DeviceCapability, *, caches: bool, e4m3: bool, int8: bool
) -> str | None:
    if device.kind not in ("cuda", INTERPRETER):
        return "it runs on CUDA only"
    if device.dtype not in DTYPES:
        return f"it does not compute in {str(device.dtype).removeprefix('torch.')}"
    if device.sm is not None and device.sm not in SMS:
        return f"it is not compiled for sm_{device.sm}"
    if device.sm is not None and device.sm < E4M3_SM:
        if e4m3:
            return f"sm_{device.sm} does not multiply float8_e4m3fn"
        if caches and device.cache_dtype is torch.float8_e4m3fn:
            return f"sm_{device.sm} does not convert float8_e4m3fn; float8_e5m2 it does"
    if int8 and device.sm is not None and device.sm not in INT8_SMS:
        return f"Triton does not multiply int8 by the matrix units that sm_{device.sm} has"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
