"""A GPU of fake tensors: a call is checked as a GPU would check it, and nothing is computed.

The interpreter has CPU tensors, so it cannot know which of them should have been on the device.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kernels.dry_run import taken_by
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Generator

    from antiphon.kernels.triton.launch import Constant

GPU = torch.device("cuda", 0)


class OffDevice(Exception):
    """A launch has operands that are not on the device, or the host reads what is there."""


@contextmanager
def fake_gpu() -> Generator[None]:
    """Tensors that are made inside on `GPU` are fakes, and launches of Triton run nothing.

    Raises:
        Exception: Inside, by operands of several devices, by a read of the host, and by a shape
            that follows from data.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        with FakeTensorMode(), _Reads(), _Indexing(), taken_by(_check):
            yield


class _Reads(TorchDispatchMode):
    """Refuses copies to the host, of which fake tensors make some."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if GPU in _devices((args, kwargs)) and _devices(made) - {GPU}:
            raise OffDevice(f"{func} makes a tensor of the host of one of the device")
        return made


class _Indexing(TorchFunctionMode):
    """Calls the operations of `tensor[index]` and of copies: torch itself wants a driver for them.

    No part of an index is a tensor.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _viewed(*args)
        if func is Tensor.__setitem__:
            tensor, index, value = args
            value = value if isinstance(value, Tensor) else tensor.new_full((), value)
            func, args = Tensor.copy_, (_viewed(tensor, index), value)
        if func is Tensor.contiguous and not args[0].is_contiguous():
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.aten.clone.default(*args, memory_format=torch.contiguous_format)
        if func is Tensor.copy_:
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _viewed(tensor: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    axes = sum(part is not None and part is not Ellipsis for part in parts)
    axis = 0
    for part in parts:
        if part is Ellipsis:
            axis = tensor.dim() - axes
            continue
        if part is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(part, slice):
            whole = torch.ops.aten.slice.Tensor
            tensor = whole(tensor, axis, part.start, part.stop, part.step or 1)
        else:
            tensor = tensor.select(axis, int(part))
            axis -= 1
        axes -= part is not None
        axis += 1
    return tensor


def _check(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Tensor | float, ...],
    constants: dict[str, Constant],
) -> None:
    if _devices(arguments) != {GPU}:
        raise OffDevice(f"{kernel.fn.__name__} is launched with a tensor of the host")


def _devices(values: object) -> set[torch.device]:
    return {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
