"""Rotary position embedding (RoPE) in the layout of halves, with its frequencies.

Also the operation between the QKV projection and attention: QK norm, RoPE and the KV cache store.

Source: Su et al. 2021, arXiv:2104.09864. Pairs are (i, i + D / 2), not interleaved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from antiphon.kernels.cpu.extension import cpu
from antiphon.kernels.kv import UNSCALED, KvScales, store_kv
from antiphon.kernels.norm import NormKind, NormWeights, layernorm, rmsnorm, rmsnorm_wide
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.kernels.upload import Upload


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor. Source: Chen et al. 2023, arXiv:2306.15595."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by a factor, short ones unchanged, with a ramp between them.

    Source: the Llama 3.1 model card's `rope_scaling` of type `llama3`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: low frequencies divided by a factor, high ones unchanged, with a ramp between them.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.
    """

    factor: float
    trained_tokens: int
    # Pairs that make more turns than this in the trained context are unchanged.
    beta_fast: float = 32.0
    beta_slow: float = 1.0  # pairs that make fewer turns are divided by the whole `factor`
    amplitude: float = 1.0  # cosine and sine are multiplied by this
    truncate: bool = True  # whether the ends of the ramp are whole pairs


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE: each pair divided by its own factor. Source: Ding et al. 2024, arXiv:2402.13753.

    Cosine and sine are multiplied by `amplitude`.
    """

    factors: tuple[float, ...]  # one a pair
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the position of a token beyond the trained context.

    Each token is rotated as if it were the last of its text, whatever follows it, so that a key is
    the same in all texts with a common prefix.

    Source: the NTK-aware base of Peng et al. 2023, arXiv:2309.00071, section 3.1 and appendix A.
    """

    factor: float  # maximum length of a text, relative to the trained context
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first pairs of a head turn, each as in a head that turns whole.

    Source: `rope_type` proportional of Gemma 4's config, as transformers computes it.
    """

    pairs: int  # that turn; the others have the frequency 0
    factor: float = 1.0  # positions are divided by this


_POSITIONS_MIN = 1024

RotaryScaling = (
    LinearScaling | Llama3Scaling | YarnScaling | LongScaling | DynamicScaling | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """The RoPE of a layer: rotated elements of a head, base and scaling.

    With a `size` below the head's, the rest of each head is not rotated. With `sections` positions
    have as many axes, and so many pairs of each head are rotated by that along each: one section
    after the other, or `interleaved`, axis by axis while all have pairs left, and the first one's
    rest at the end.
    """

    size: int
    base: float
    scaling: RotaryScaling | None = None
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def axes(self) -> list[int]:
        """The axis by whose position each pair is rotated, (R / 2,)."""
        if not self.interleaved:
            return [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]
        count, found = len(self.sections), [0] * sum(self.sections)
        for axis, pairs in enumerate(self.sections[1:], start=1):
            found[axis : pairs * count : count] = [axis] * pairs
        return found

    @property
    def amplitude(self) -> float:
        match self.scaling:
            case YarnScaling() | LongScaling():
                return self.scaling.amplitude
            case _:
                return 1.0

    def frequencies_at(self, positions: Tensor) -> Tensor:
        """Radians per position: (R / 2,) float32; with dynamic scaling (T, R / 2)."""
        if not isinstance(self.scaling, DynamicScaling):
            return self.frequencies().to(positions.device)
        exponent = torch.arange(0, self.size, 2, device=positions.device).float() / self.size
        factor, trained = self.scaling.factor, self.scaling.trained_tokens
        # In float32 and in this order, as transformers computes it.
        grown = factor * (positions + 1).clamp_min(trained) / trained - (factor - 1)
        base = self.base * grown ** (self.size / (self.size - 2))
        return 1.0 / (base[:, None] ** exponent)

    def frequencies(self) -> Tensor:
        """Radians per position, (R / 2,) float32; with dynamic scaling, in the trained context."""
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
            case ProportionalScaling(pairs, factor):
                frequencies[pairs:] = 0.0
                return frequencies / factor


def cos_sin(
    frequencies: Tensor, positions: Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of each token's position.

    Axes: T tokens, R rotated elements of a head. frequencies (R / 2,) or (T, R / 2) float32,
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
    """Cosine and sine for the tokens of a pass."""

    cos: Tensor  # for every position up to the last, or for every token, (P, 1, R)
    sin: Tensor  # likewise, signed as in `cos_sin`
    # (T,) int32, the row of each token in `cos` and `sin`
    positions: NDArray[np.int32] | Tensor
    query_scale: Tensor | None = None  # (P,) float32, what multiplies queries before all else
    upload: Upload = torch.as_tensor

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        positions = self.positions
        if not isinstance(positions, Tensor):
            positions = self.upload(positions)
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Scores of the query at position p are multiplied by 1 + scale * ln(1 + (p + 1) // floor).

    Source: Nakanishi 2025, arXiv:2501.19399, as used by Llama 4.
    """

    floor: int
    scale: float

    def of(self, positions: Tensor) -> Tensor:
        """The factors of positions (T,), float32."""
        passed = torch.div(positions + 1, self.floor, rounding_mode="floor")
        # In float64: the tail of a tensor is computed in another way, and must round to the same.
        return (torch.log1p(passed.double()) * self.scale + 1.0).float()


class CosSinCache:
    """`cos_sin` by position, cached up to the highest position requested so far.

    With a temperature also what it multiplies queries by.

    Computing it in every pass would take longer than the rest of a small pass outside its layers.
    """

    def __init__(
        self,
        rotary: RotarySpec | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
        temperature: Temperature | None = None,
        upload: Upload = torch.as_tensor,
    ) -> None:
        self._upload = upload
        self._temperature = temperature
        self._rotary = rotary or RotarySpec(0, 1.0)
        self._dtype = dtype
        self._device = device
        self._known = _POSITIONS_MIN
        self._cos, self._sin, self._query_scale = self._computed(self._known)

    def at_positions(self, positions: NDArray[np.int32]) -> TokenCosSin:
        """Of positions (T,), or (A, T) along axes."""
        if positions.ndim > 1:
            return self._at_axes(positions)
        # Python integers: numpy's maximum and torch's length go through Python, cold code.
        self.reach(max(positions.tolist()))
        return TokenCosSin(self._cos, self._sin, positions, self._query_scale, self._upload)

    def at(self, positions: Tensor) -> TokenCosSin:
        """Of positions (T,) int32 on the device, all of which were reached before."""
        return TokenCosSin(self._cos, self._sin, positions, self._query_scale)

    def _at_axes(self, positions: NDArray[np.int32]) -> TokenCosSin:
        """Of positions (A, T) along axes: each pair of elements by that along its own."""
        assert len(self._rotary.sections) == len(positions), "a RoPE with as many sections as axes"
        assert self._query_scale is None, "a temperature goes by the index of a token"
        self.reach(int(positions.max()))
        places = self._upload(positions)
        axes = self._rotary.axes() * 2  # of the first half, and of the second one
        of_each = places[axes].T  # (T, R)
        cos, sin = (table[:, 0].gather(0, of_each)[:, None] for table in (self._cos, self._sin))
        every = np.arange(positions.shape[1], dtype=np.int32)
        return TokenCosSin(cos, sin, every, None, self._upload)

    def reach(self, last: int) -> None:
        """Compute all positions up to the last one."""
        if last >= self._known:
            known = 1 << last.bit_length()
            self._cos, self._sin, self._query_scale = self._computed(known)
            self._known = known

    def _computed(self, positions: int) -> tuple[Tensor, Tensor, Tensor | None]:
        every = torch.arange(positions, device=self._device)
        frequencies = self._rotary.frequencies_at(every)
        angles = cos_sin(frequencies, every, self._dtype, self._rotary.amplitude)
        return *angles, None if self._temperature is None else self._temperature.of(every)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R elements of each head.

    Axes: T tokens, H heads, D head size, R rotated elements of a head.
    x (T, H, D); cos, sin (T, 1, R) in the dtype of x, sin signed as in `cos_sin`
    ->  (T, H, D)
    """
    size = cos.shape[-1]
    rotated = x if size == x.shape[-1] else x[..., :size]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((second, first), dim=-1) * sin
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)


class QkNormWeights(NamedTuple):
    """Weights of QK norms: of each head (D,), or of all heads of a token, (Q * D,) and (H * D,)."""

    query: NormWeights
    key: NormWeights
    eps: float
    kind: NormKind = "rms"
    over: Literal["head", "token"] = "head"  # what is normalised together

    def reference(self, heads: Tensor, weights: NormWeights) -> Tensor:
        """Normalise heads (T, *, D) of queries or of keys."""
        x = heads if self.over == "head" else heads.flatten(1)
        match self.kind:
            case "rms":
                x = rmsnorm.reference(x, weights.weight, self.eps)
            case "rms_wide":
                x = rmsnorm_wide.reference(x, weights.weight, self.eps)
            case "layer":
                x = layernorm.reference(x, weights.weight, weights.bias, self.eps)
        return x.view(heads.shape)


@kernel(
    "attention.heads", cpu("qk_norm_rope_store"), triton("heads:qk_norm_rope_store", caches=True)
)
def qk_norm_rope_store(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    norms: QkNormWeights | None,
    scales: KvScales = UNSCALED,
) -> Tensor:
    """Apply QK norm and RoPE to queries and keys, and write keys and values to the cache.

    Axes: T tokens, Q query heads, H kv heads, D head size.
    heads (T, Q + 2 H, D), queries before keys before values; cos, sin (T, 1, D) from `cos_sin`;
    pages of keys and values, mutated, and their scales; places (T,) int64, their slots
    ->  the queries (T, Q, D)
    """
    kv_heads = keys.shape[1]
    queries = heads.shape[1] - 2 * kv_heads
    q, k = heads[:, :queries], heads[:, queries : queries + kv_heads]
    if norms is not None:
        q = norms.reference(q, norms.query)
        k = norms.reference(k, norms.key)
    rotated = apply_rotary(torch.cat((q, k), dim=1), cos, sin)
    store_kv(rotated[:, queries:], heads[:, queries + kv_heads :], keys, values, places, scales)
    return rotated[:, :queries]


def _stretch_long_waves(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.trained_tokens * frequencies / (2 * math.pi)  # turns in the trained context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: scaled, 1: unchanged
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _stretch_slow_pairs(frequencies: Tensor, rotary: RotarySpec, scaling: YarnScaling) -> Tensor:
    def pair_of(turns: float) -> float:
        """The pair that makes so many turns in the trained context, as an index into a head."""
        tokens_a_turn = scaling.trained_tokens / (turns * 2 * math.pi)
        return rotary.size * math.log(tokens_a_turn) / (2 * math.log(rotary.base))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.size - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rotary.size // 2) - first) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
