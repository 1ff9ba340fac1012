"""How the arrays of a step reach the device.

A step writes nothing else to it, and reads back only its outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    Upload = Callable[[NDArray[Any]], Tensor]
    """An array of the host as a tensor of the device. On the CPU it is the array itself; elsewhere
    the array may change afterwards."""


def upload_to(kind: str, device: torch.device) -> Upload:
    """How arrays reach a device of a kind."""
    match kind:
        case "cpu":
            return torch.as_tensor
        case "interpreter":
            return _copied
        case _:
            return _Pinned(device)


def _copied(values: NDArray[Any]) -> Tensor:
    """A copy of a copy: the first one is pinned memory, of which the stream makes the second one.

    The array itself must not be read any more: no GPU would see it.
    """
    pinned = torch.as_tensor(values.copy())
    return torch.empty_like(pinned).copy_(pinned)


class _Pinned:
    """Copies through pinned memory, in the order of the current stream: no call waits for it.

    Pinned memory returns to torch's allocator, which reuses it once the copy was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, values: NDArray[Any]) -> Tensor:
        return torch.as_tensor(values).pin_memory().to(self._device, non_blocking=True)
