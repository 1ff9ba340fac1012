"""Tensors of a vision model by their names in its safetensors files, as float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias, if any: (out, in) and (out,) of a linear, (C,) and (C,) of a norm."""

    weight: Tensor
    bias: Tensor | None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        ConfigError: There is none.
    """
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise ConfigError(f"{folder}: there is no .safetensors file")
    return files


class _OpenSafetensors(Protocol):
    """An open safetensors file; the package has no type hints for it."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class TensorFiles:
    """Open files. What stands before the name that ends in `last` is before all names."""

    def __init__(self, files: list[Path], open_files: ExitStack, *, last: str) -> None:
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

    def length(self, name: str) -> int:
        """The length of the first dimension of a tensor."""
        return self._shape(name)[0]

    def width(self, name: str) -> int:
        """The length of the last dimension of a tensor."""
        return self._shape(name)[-1]

    def _shape(self, name: str) -> Sequence[int]:
        name = self._prefix + name
        if name not in self._homes:
            raise ConfigError(f"{self._folder}: the weights lack {name}")
        _, opened = self._homes[name]
        return opened.get_tensor(name).shape

    def read(self, name: str, *shape: int) -> Tensor:
        name = self._prefix + name
        if name not in self._homes:
            raise ConfigError(f"{self._folder}: the weights lack {name}")
        file, opened = self._homes[name]
        tensor = opened.get_tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"{file}: {name} is {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(f"{file}: {name} is {tensor.dtype}: only floats are read")
        return tensor.float()

    def affine(self, name: str, *shape: int, bias: bool = True) -> Affine:
        """`shape` is that of the weight; the bias, if any, is as long as its first dimension."""
        weight = self.read(f"{name}.weight", *shape)
        return Affine(weight, self.read(f"{name}.bias", shape[0]) if bias else None)


def fused(*parts: Affine) -> Affine:
    """Linears with the same inputs as one, whose outputs lie behind each other."""
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "all have a bias, or none"
    weight = torch.cat([part.weight for part in parts])
    return Affine(weight, torch.cat(biases) if biases else None)
