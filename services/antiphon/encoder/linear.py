"""Linears of towers and of what is behind them, packed for the CPU kernels as a worker's are.

Where the kernels do not run, torch multiplies. Axes: I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from antiphon.kernels.cpu import extension
from antiphon.layers.methods import LinearMethod, LinearShape, RankSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.kernels.cpu.linear import CompiledLinear


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias, if any: (O, I) and (O,) of a linear, (C,) and (C,) of a norm; float32."""

    weight: Tensor
    bias: Tensor | None


def by_halves(linear: Affine, heads: int) -> Affine:
    """Outputs whose pairs to rotate are neighbours, so that they are half a head apart."""

    def ordered(x: Tensor) -> Tensor:
        return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    return Affine(ordered(linear.weight), None if linear.bias is None else ordered(linear.bias))


class Linear:
    """Linears with the same inputs as one, whose outputs lie behind each other.

    It computes in `dtype`, and sums in float32 are not rounded. In `halves` the parts are a gate
    and what it multiplies.
    """

    def __init__(self, *parts: Affine, dtype: torch.dtype, halves: bool = False) -> None:
        built = extension.unavailable_reason() is None
        method = LinearMethod.PACKED if built else LinearMethod.PLAIN
        biased = any(part.bias is not None for part in parts)
        self.inputs = parts[0].weight.shape[1]
        self.outputs = sum(len(part.weight) for part in parts)
        self.dtype, self.halves = dtype, halves
        shape = LinearShape(self.inputs, self.outputs, biased, halves)
        self._weights = method.create(shape, dtype, torch.device("cpu"))
        first = 0
        for part in parts:
            place = RankSlice(slice(None), slice(None), into=first)
            self._weights.load("weight", part.weight, place)
            if biased:
                bias = torch.zeros(len(part.weight)) if part.bias is None else part.bias
                self._weights.load("bias", bias, place)
            first += len(part.weight)

    @property
    def packed(self) -> CompiledLinear | None:
        """What the kernels have of it; None: they do not run here."""
        return self._weights.packed

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: x (..., I)  ->  (..., O) float32, bias added."""
        rows = x.reshape(-1, self.inputs).to(self.dtype)
        return self._weights.apply_wide(rows).view(*x.shape[:-1], self.outputs)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the greatest input of a linear, and output; () each."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor


class ClippedLinear:
    """Linears with the same inputs, each with bounds of its own; outputs lie behind each other.

    Otherwise as `Linear`, of which it has one for each.
    """

    packed = None

    def __init__(self, parts: Sequence[tuple[Linear, Bounds]], *, halves: bool = False) -> None:
        self._parts = parts
        first, _ = parts[0]
        self.inputs, self.dtype, self.halves = first.inputs, first.dtype, halves

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: x (..., I)  ->  (..., O) float32."""
        made = [
            linear(x.clamp(each.input_min, each.input_max)).clamp(each.output_min, each.output_max)
            for linear, each in self._parts
        ]
        return torch.cat(made, dim=-1)
