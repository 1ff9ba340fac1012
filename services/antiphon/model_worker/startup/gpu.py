"""The GPU of a worker: whether there is one, its free memory, and what its numerics depend on."""

from __future__ import annotations

from importlib.metadata import version

import torch

from antiphon.resolve.device import INTERPRETER
from antiphon.service.startup import CannotStart


def find_gpu(name: str) -> int:
    """Look for the GPU `cuda` or `cuda:N`  ->  its free memory in bytes.

    Raises:
        CannotStart: There is none; says what was looked for.
    """
    if torch.version.cuda is None:
        lacks = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        lacks = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no driver or no GPU"
    else:
        index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
        if index < count:
            free, _ = torch.cuda.mem_get_info(index)
            return free
        lacks = f"torch finds {count} GPUs, the last of them is cuda:{count - 1}"
    raise CannotStart(f"model.device = {name}: no such device: {lacks}")


def gpu_numerics(name: str) -> dict[str, str]:
    """What determines the bits of a result on a device, apart from its operands."""
    if name == INTERPRETER:
        device = INTERPRETER
    else:
        major, minor = torch.cuda.get_device_capability(name)
        device = f"sm_{major}{minor}"
    return {
        "isa": device,
        "kernels": f"triton {version('triton')}",
        "torch": torch.__version__,
    }
