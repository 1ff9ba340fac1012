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


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow pairs stretched, fast ones kept, a ramp over pairs between them.

    Attributes:
        fast_turns: Pairs that turn more often than this in the trained text are kept.
        slow_turns: Those that turn less often are stretched by all of `factor`.
        amplitude: What cosine and sine are multiplied by.
        truncate: Whether the ends of the ramp are whole pairs.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.
    """

    factor: float
    trained_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each pair divided by a factor of its own. Source: Ding et al. 2024, arXiv:2402.13753.

    Attributes:
        factors: One a pair.
        amplitude: What cosine and sine are multiplied by.
    """

    factors: tuple[float, ...]
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the position of a token that is beyond the trained text.

    Each token is rotated as if it were the last of its text, whatever follows it: so a key is the
    same in all texts that begin alike.

    Attributes:
        factor: How many times the trained text a text may be long.

    Source: the NTK-aware base of Peng et al. 2023, arXiv:2309.00071, section 3.1 and appendix A.
    """

    factor: float
    trained_tokens: int


_POSITIONS_MIN = 1024

RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | DynamicScaling


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """A rotation: how many numbers of a head it turns, the base, and how it was stretched.

    With a `size` below the head's the rest of each head stays as it is.
    """

    size: int
    base: float
    scaling: RotaryScaling | None = None

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        match self.scaling:
            case YarnScaling() | LongScaling():
                return self.scaling.amplitude
            case _:
                return 1.0

    def frequencies_at(self, positions: Tensor) -> Tensor:
        """Radians a position for each of `positions` (T,).

        Returns:
            (R / 2,) float32; of a dynamic rotation (T, R / 2).
        """
        if not isinstance(self.scaling, DynamicScaling):
            return self.frequencies().to(positions.device)
        exponent = torch.arange(0, self.size, 2, device=positions.device).float() / self.size
        factor, trained = self.scaling.factor, self.scaling.trained_tokens
        # In float32 and in this order, as transformers computes it.
        grown = factor * (positions + 1).clamp_min(trained) / trained - (factor - 1)
        base = self.base * grown ** (self.size / (self.size - 2))
        return 1.0 / (base[:, None] ** exponent)

    def frequencies(self) -> Tensor:
        """Radians a position, (R / 2,) float32; of a dynamic rotation in the trained text."""
        exponent = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        frequencies = 1.0 / (self.base**exponent)
        match self.scaling:
            case None | DynamicScaling():
                return frequencies
            case LinearScaling(factor):
                return frequencies / factor
            case Llama3Scaling():
                return _stretch_long_waves(frequencies, self.scaling)
            case YarnScaling():
                return _stretch_slow_pairs(frequencies, self, self.scaling)
            case LongScaling(factors):
                return 1.0 / (torch.tensor(factors) * self.base**exponent)


def cos_sin(
    frequencies: Tensor, positions: Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of each token's position.

    Axes: T tokens, R rotated numbers of a head. frequencies (R / 2,) or (T, R / 2) float32,
    positions (T,)  ->  (T, 1, R) both. The sine of the first half is negative, so that the rotation
    is one product with the halves swapped.
    """
    angle = positions.float()[:, None] * frequencies  # (T, R / 2)
    cos, sin = angle.cos() * amplitude, angle.sin() * amplitude
    return (
        torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
        torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
    )


@dataclass(frozen=True)
class TokenCosSin:
    """How each token of a pass is rotated.

    Attributes:
        cos: Of every position up to the last, (P, 1, R).
        sin: Likewise, signed as in `angles`.
        positions: (T,) int32.
    """

    cos: Tensor
    sin: Tensor
    positions: NDArray[np.int32]

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each token, (T, 1, R) both."""
        positions = torch.as_tensor(self.positions)
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


class CosSinCache:
    """What `angles` gives, kept by position as far as positions have been asked for.

    Computed in every pass they would take longer than the rest of a small pass beside its layers.
    """

    def __init__(
        self, rotary: RotarySpec, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._device = device
        self._known = _POSITIONS_MIN
        self._cos, self._sin = self._computed(self._known)

    def at_positions(self, positions: NDArray[np.int32]) -> TokenCosSin:
        """The rotation of tokens at these positions, (T,)."""
        # Plain numbers: a maximum of numpy's and a length of torch's go through Python, cold code.
        last = max(positions.tolist())
        if last >= self._known:
            known = 1 << last.bit_length()
            self._cos, self._sin = self._computed(known)
            self._known = known
        return TokenCosSin(self._cos, self._sin, positions)

    def _computed(self, positions: int) -> tuple[Tensor, Tensor]:
        every = torch.arange(positions, device=self._device)
        frequencies = self._rotary.frequencies_at(every)
        return cos_sin(frequencies, every, self._dtype, self._rotary.amplitude)


class StepCosSin:
    """The rotations of one pass: each way of rotating at the positions of its tokens."""

    def __init__(self, tables: CosSinCaches, positions: NDArray[np.int32]) -> None:
        self._tables = tables
        self._positions = positions
        self._made: dict[RotarySpec | None, TokenCosSin] = {}

    def of(self, rotary: RotarySpec | None) -> TokenCosSin:
        """How this way of rotating turns each token; None turns nothing."""
        if rotary not in self._made:
            self._made[rotary] = self._tables.of(rotary).at_positions(self._positions)
        return self._made[rotary]


class CosSinCaches:
    """A table of angles for each way of rotating that layers ask for."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tables: dict[RotarySpec | None, CosSinCache] = {}

    def of(self, rotary: RotarySpec | None) -> CosSinCache:
        """The table of one way, made when it is first asked for; None: of nothing rotated."""
        if rotary not in self._tables:
            self._tables[rotary] = CosSinCache(
                rotary or RotarySpec(0, 1.0), self._dtype, self._device
            )
        return self._tables[rotary]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the start of each head by its token's angles.

    Axes: T tokens, H heads, D head size, R rotated numbers of a head.
    x (T, H, D); cos, sin (T, 1, R) in the dtype of x, sin signed as in `angles`
    ->  (T, H, D)
    """
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((second, first), dim=-1) * sin
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


def _stretch_long_waves(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.trained_tokens * frequencies / (2 * math.pi)  # full turns in the trained text
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretched, 1: kept
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _stretch_slow_pairs(frequencies: Tensor, rotary: RotarySpec, scaling: YarnScaling) -> Tensor:
    def pair_of(turns: float) -> float:
        """The pair that makes so many turns in the trained text, counted in numbers of a head."""
        tokens_a_turn = scaling.trained_tokens / (turns * 2 * math.pi)
        return rotary.size * math.log(tokens_a_turn) / (2 * math.log(rotary.base))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.size - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rotary.size // 2) - first) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
