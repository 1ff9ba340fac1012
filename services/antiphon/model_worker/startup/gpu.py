"""The GPU of a worker: whether there is one, its free memory, and what its numerics depend on."""

from __future__ import annotations

from importlib.metadata import version

import torch

from antiphon.kernels.flashinfer.backend import modules_version
from antiphon.kernels.flashinfer.plans import STEP_BYTES, WRAPPER_BYTES
from antiphon.kernels.linear_fp8 import linear_fp8
from antiphon.kernels.linear_int8 import linear_int8
from antiphon.kernels.op import DeviceCapability, Op
from antiphon.kernels.triton.backend import version as kernels_version
from antiphon.resolve.device import INTERPRETER, PlanMemory
from antiphon.service.startup import CannotStart


def find_gpu(name: str, ranks: int = 1) -> int:
    """Look for the GPU `cuda` or `cuda:N`  ->  its free memory in bytes.

    Each of several ranks has one of its own, from this one on. Only this one's memory is read: that
    takes a part of it, and each rank has its own process.

    Raises:
        CannotStart: There is none, or there are too few; says what was looked for.
    """
    index = int(name.partition(":")[2] or 0)
    if torch.version.cuda is None:
        lacks = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        lacks = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no driver or no GPU"
    else:
        count = torch.cuda.device_count()
        if index + ranks <= count:
            free, _ = torch.cuda.mem_get_info(index)
            return free
        lacks = f"torch finds {count} GPUs, the last of them is cuda:{count - 1}"
    asked = "no such device"
    if ranks > 1:
        asked = f"each of {ranks} ranks needs a GPU, from cuda:{index} on"
    raise CannotStart(f"model.device = {name}: {asked}: {lacks}")


def gpu_numerics(name: str) -> dict[str, str]:
    """What determines the bits of a result on a device, apart from its operands."""
    sm, flashinfer = _sm(name), modules_version()
    return {
        "isa": INTERPRETER if sm is None else f"sm_{sm}",
        "kernels": f"{kernels_version()} by triton {version('triton')}",
        "torch": str(torch.__version__),
        **({} if flashinfer is None else {"flashinfer": flashinfer}),
    }


def lacking_fp8(name: str) -> str | None:
    """What the kernel that multiplies fp8 needs of a device and does not find; None: nothing."""
    return _lacking(linear_fp8, name)


def lacking_int8(name: str) -> str | None:
    """The same of the kernel that multiplies int8."""
    return _lacking(linear_int8, name)


def plan_memory() -> PlanMemory | None:
    """What FlashInfer takes of a GPU's memory where it attends; None: it is not installed."""
    return None if modules_version() is None else PlanMemory(STEP_BYTES, WRAPPER_BYTES)


def _lacking(op: Op[..., object], name: str) -> str | None:
    kernel = next(each for each in op.backends if each.name == "triton")
    return kernel.needs(DeviceCapability(name.partition(":")[0], torch.bfloat16, _sm(name)))


def _sm(name: str) -> int | None:
    """The compute capability without its point; of the interpreter there is none."""
    if name == INTERPRETER:
        return None
    major, minor = torch.cuda.get_device_capability(name)
    return 10 * major + minor
