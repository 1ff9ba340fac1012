"""Kernels that compute on a device, called with tensors of the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from antiphon.kernels.attention import AttentionMetadata

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray


class OnDevice:
    """A module of kernels whose arguments are copied to a device, and back when it has computed.

    Views stay views: the memory that tensors share on the CPU, they share on the device, with the
    same offsets and strides.
    """

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module = module
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._module, name))

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        copies = _Copies(self._device)
        arguments, named = tree_map(copies.of, (arguments, named))
        made = function(*arguments, **named)
        copies.bring_back()
        return tree_map(lambda part: part.cpu() if isinstance(part, Tensor) else part, made)


class _Copies:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # bytes of storages, by address

    def of(self, value: Any) -> Any:
        if isinstance(value, AttentionMetadata):
            return replace(value, upload=self._upload)
        if not isinstance(value, Tensor):
            return value
        here = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        if here.data_ptr() not in self._pairs:
            self._pairs[here.data_ptr()] = here, here.to(self._device, copy=True)
        _, there = self._pairs[here.data_ptr()]
        return torch.empty(0, dtype=value.dtype, device=self._device).set_(
            there.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    def bring_back(self) -> None:
        for here, there in self._pairs.values():
            here.copy_(there)

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return torch.as_tensor(values).to(self._device, copy=True)
