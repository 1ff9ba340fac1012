"""Tensors of a vision model by their names in its safetensors files, as float32."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.encoder.linear import Affine, Bounds, ClippedLinear, Linear
from antiphon.encoder.tower_digest import record
from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from pathlib import Path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        ConfigError: There is none.
    """
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ConfigError(f"{folder}: there is no .safetensors file")
    return files


_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class _OpenSafetensors(Protocol):
    """An open safetensors file; the package has no type hints for it."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class TensorFiles:
    """Open files. What stands before the name that ends in `last` is before all names.

    Linears compute in bfloat16 if `dtype` is that, or if it is `auto` and that tensor is stored so;
    else in float32.
    """

    def __init__(
        self,
        files: list[Path],
        open_files: ExitStack,
        *,
        last: str,
        dtype: Dtype = Dtype.FLOAT32,
    ) -> None:
        self._homes: dict[str, tuple[Path, _OpenSafetensors]] = {}
        for file in files:
            try:
                opened = cast(
                    "_OpenSafetensors", open_files.enter_context(safe_open(file, framework="pt"))
                )
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file}: not a safetensors file: {error}") from error
            self._homes |= dict.fromkeys(opened.keys(), (file, opened))
        self._folder = files[0].parent
        # A model of text and images may have the same embeddings in both towers: not this one.
        found = (name for name in self._homes if name == last or name.endswith("." + last))
        self._prefix = next(found, last).removesuffix(last)
        self._last, self._dtype = last, dtype

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""
        return self._prefix + name in self._homes

    def length(self, name: str) -> int:
        """The length of the first dimension of a tensor."""
        return self._shape(name)[0]

    def width(self, name: str) -> int:
        """The length of the last dimension of a tensor."""
        return self._shape(name)[-1]

    def _shape(self, name: str) -> Sequence[int]:
        return self._stored(self._prefix + name)[1].shape

    def _stored(self, name: str) -> tuple[Path, Tensor]:
        if name not in self._homes:
            raise ConfigError(f"{self._folder}: the weights lack {name}")
        file, opened = self._homes[name]
        return file, opened.get_tensor(name)

    def read(self, name: str, *shape: int) -> Tensor:
        name = self._prefix + name
        file, tensor = self._stored(name)
        if tensor.shape != shape:
            raise ConfigError(f"{file}: {name} is {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(f"{file}: {name} is {tensor.dtype}: only floats are read")
        record(name, tensor)
        return tensor.float()

    def affine(self, name: str, *shape: int, bias: bool = True) -> Affine:
        """`shape` is that of the weight; the bias, if any, is as long as its first dimension."""
        weight = self.read(f"{name}.weight", *shape)
        return Affine(weight, self.read(f"{name}.bias", shape[0]) if bias else None)

    def linear(self, *parts: Affine, halves: bool = False) -> Linear:
        """Linears with the same inputs as one: a gate and what it multiplies in `halves`."""
        return Linear(*parts, dtype=self._computed, halves=halves)

    def clipped(self, *names: str, shape: tuple[int, int], halves: bool = False) -> ClippedLinear:
        """Linears of these names with the same inputs, and bounds of each; none has a bias."""
        parts: list[tuple[Linear, Bounds]] = []
        for name in names:
            linear = self.linear(self.affine(f"{name}.linear", *shape, bias=False))
            bounds = (self.read(f"{name}.{bound}") for bound in _BOUNDS)
            parts.append((linear, Bounds(*bounds)))
        return ClippedLinear(parts, halves=halves)

    @cached_property
    def _computed(self) -> torch.dtype:
        short = self._dtype is Dtype.BFLOAT16
        if self._dtype is Dtype.AUTO:
            short = self._stored(self._prefix + self._last)[1].dtype is torch.bfloat16
        # On some machines torch is slower in bfloat16 than in float32.
        return torch.bfloat16 if short and not extension.unavailable_reason() else torch.float32
