"""Rotary position embedding in the layout of halves, and its frequencies.

Source: Su et al. 2021, arXiv:2104.09864. Pairs are (i, i + D / 2), not neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor. Source: Chen et al. 2023, arXiv:2306.15595."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by a factor, short ones kept, a ramp between them.

    Source: the Llama 3.1 model card's `rope_scaling` of type `llama3`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    trained_tokens: int


_POSITIONS_MIN = 1024

RotaryScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of a model: the size of what is rotated, the base, and how it was stretched."""

    head_size: int
    base: float
    scaling: RotaryScaling | None = None

    def frequencies(self) -> Tensor:
        """Radians a position, (D / 2,) float32."""
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        frequencies = 1.0 / (self.base**exponent)
        match self.scaling:
            case None:
                return frequencies
            case LinearScaling(factor):
                return frequencies / factor
            case Llama3Scaling():
                return _stretch_long_waves(frequencies, self.scaling)


def angles(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of each token's position.

    Axes: T tokens, D head size. frequencies (D / 2,) float32, positions (T,)  ->  (T, 1, D) both.
    The sine of the first half is negative, so that the rotation is one product with the halves
    swapped.
    """
    angle = torch.outer(positions.float(), frequencies)  # (T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    return (
        torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
        torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
    )


@dataclass(frozen=True)
class Turns:
    """How each token of a pass is rotated.

    Attributes:
        cos: Of every position up to the last, (P, 1, D).
        sin: Likewise, signed as in `angles`.
        positions: (T,) int32.
    """

    cos: Tensor
    sin: Tensor
    positions: NDArray[np.int32]

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each token, (T, 1, D) both."""
        positions = torch.as_tensor(self.positions)
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


class AngleTable:
    """What `angles` gives, kept by position as far as positions have been asked for.

    Computed in every pass they would take longer than the rest of a small pass beside its layers.
    """

    def __init__(self, frequencies: Tensor, dtype: torch.dtype) -> None:
        self._frequencies = frequencies
        self._dtype = dtype
        self._cos, self._sin = self._computed(_POSITIONS_MIN)

    def turns(self, positions: NDArray[np.int32]) -> Turns:
        """The rotation of tokens at these positions, (T,)."""
        last = int(positions.max())
        if last >= len(self._cos):
            self._cos, self._sin = self._computed(1 << last.bit_length())
        return Turns(self._cos, self._sin, positions)

    def _computed(self, positions: int) -> tuple[Tensor, Tensor]:
        every = torch.arange(positions, device=self._frequencies.device)
        return angles(self._frequencies, every, self._dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's angles.

    Axes: T tokens, H heads, D head size.
    x (T, H, D); cos, sin (T, 1, D) in the dtype of x, sin signed as in `angles`
    ->  (T, H, D)
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def _stretch_long_waves(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.trained_tokens * frequencies / (2 * math.pi)  # full turns in the trained text
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretched, 1: kept
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
