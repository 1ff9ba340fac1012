"""The RoPE fields of config.json."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.kernels.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)
from antiphon.model_worker.model.errors import ModelLoadError

Positive = Annotated[float, Meta(gt=0)]
Part = Annotated[float, Meta(gt=0, le=1)]
"""A fraction of a head."""
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


class RopeField(msgspec.Struct, frozen=True):
    """`rope_scaling` (`type` in old files), or `rope_parameters`, which includes theta.

    Some models have one of these for each type of layer.
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Part | None = None
    factor: Positive | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    full_attention: RopeField | None = None
    sliding_attention: RopeField | None = None

    @property
    def kind(self) -> str:
        """`default`, or the name of a scaling."""
        return self.rope_type or self.type or "default"

    def context_tokens(self, trained: int) -> int:
        """The maximum context length of a model with `trained` as its `max_position_embeddings`."""
        field = self.of("full_attention")
        return int(trained * (field.factor or 1.0)) if field.kind == "dynamic" else trained

    def of(self, kind: str) -> RopeField:
        """The field for layers of a type."""
        own = self.sliding_attention if kind == "sliding_attention" else self.full_attention
        return own or self

    def rotary(
        self,
        *,
        head_size: int,
        theta: float,
        partial: float,
        context_tokens: int,
        trained_tokens: int | None,
    ) -> RotarySpec:
        """The RoPE that the field describes.

        Args:
            head_size: Elements of a head.
            theta: The base, unless this field has one.
            partial: The fraction of each head that is rotated, unless this field has one.
            context_tokens: `max_position_embeddings`.
            trained_tokens: The context length before it was extended, unless this field has one.

        Raises:
            ModelLoadError: The scaling is not supported, or its factors are missing.
        """
        rotated = int(head_size * (self.partial_rotary_factor or partial))
        trained = self.original_max_position_embeddings or trained_tokens or context_tokens
        scaling = self._scaling(rotated, context_tokens, trained)
        return RotarySpec(rotated, self.rope_theta or theta, scaling)

    def _scaling(self, rotated: int, context_tokens: int, trained: int) -> RotaryScaling | None:
        match self.kind:
            case "default":
                return None
            case "dynamic":
                return self._dynamic(rotated, context_tokens)
            case "linear":
                return LinearScaling(self.factor or 1.0)
            case "llama3":
                return Llama3Scaling(
                    self.factor or 1.0, self.low_freq_factor, self.high_freq_factor, trained
                )
            case "yarn":
                return self._yarn(self.factor or context_tokens / trained, trained)
            case "longrope" | "su":
                return self._long(rotated, self.factor or context_tokens / trained, trained)
            case kind:
                raise ModelLoadError(
                    f"config.json: rope scaling {kind!r} is not supported:"
                    f" there are {', '.join(KINDS)}"
                )

    def _dynamic(self, rotated: int, trained: int) -> DynamicScaling:
        if rotated <= 2:  # the exponent of the base divides by rotated - 2
            raise ModelLoadError("config.json: dynamic RoPE scaling needs over 2 rotated elements")
        return DynamicScaling(self.factor or 1.0, trained)

    def _yarn(self, factor: float, trained: int) -> YarnScaling:
        amplitude = self.attention_factor
        if amplitude is None and self.mscale and self.mscale_all_dim:
            amplitude = _grown(factor, self.mscale) / _grown(factor, self.mscale_all_dim)
        return YarnScaling(
            factor,
            trained,
            self.beta_fast or 32.0,
            self.beta_slow or 1.0,
            _grown(factor, 1.0) if amplitude is None else amplitude,
            self.truncate,
        )

    def _long(self, rotated: int, factor: float, trained: int) -> LongScaling:
        # The context length has selected one list by now, see `longrope_factors` of model_card;
        # not with RoPE by layer type, which uses the model's maximum context length.
        factors = self.long_factor if factor > 1.0 else self.short_factor
        if len(factors) != rotated // 2:
            raise ModelLoadError(
                f"config.json: rope scaling has {len(factors)} factors for {rotated // 2} pairs"
            )
        amplitude = self.attention_factor
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        return LongScaling(factors, amplitude)


def _grown(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0
