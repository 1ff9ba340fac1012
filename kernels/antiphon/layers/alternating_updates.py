"""Alternating updates (AltUp): a token has several residual streams, and a layer computes one.

A layer first predicts all streams from all of them, by coefficients that go by the active stream.
Its blocks then compute the active stream, and by what they have changed all streams are corrected.
So a token has a representation of several times the width of the blocks.

Source: Baykal et al. 2023, arXiv:2301.13310, and Gemma 3n as transformers computes it.

Axes: T tokens, S streams, D hidden size, P size of the layer's own input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.layers.linear import ColumnLinear, kernels_of, multiply, replicated
from antiphon.layers.methods import WHOLE_SLICE, LinearMethod, LinearShape
from antiphon.layers.per_layer_embedding import PerLayerInput, PerLayerInputSpec
from antiphon.layers.weights import BuildContext, Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.norm import NormSpec
    from antiphon.layers.sublayer import LayerBuildContext

_SQUARE_MIN = 1e-5
"""Mean squares of projections are taken to be at least this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """The streams of a model; names have `{}` for the number of a stream behind the first."""

    count: int
    projection: str = "model.altup_projections.{}"
    merging: str = "model.altup_unembed_projections.{}"


class Streams(Module):
    """Makes all streams from the one that the embedding gives, and one from all for the head.

    The streams behind the first are projections, with the magnitude of the first one.
    """

    def __init__(
        self, spec: StreamsSpec, hidden: int, build: BuildContext, method: LinearMethod
    ) -> None:
        def linears(name: str) -> list[ColumnLinear]:
            return [
                replicated(
                    name.format(number), hidden, hidden, bias=False, build=build, method=method
                )
                for number in range(spec.count - 1)
            ]

        self._projections, self._merging = linears(spec.projection), linears(spec.merging)
        self.children = (*self._projections, *self._merging)

    def split(self, ctx: ForwardContext, stream: Tensor) -> Tensor:
        """All streams (S, T, D) of the one that enters the first layer (T, D)."""
        others = (projection(ctx, stream) for projection in self._projections)
        return torch.stack([stream, *(_scaled_like(other, stream) for other in others)])

    def merge(self, ctx: ForwardContext, streams: Tensor) -> Tensor:
        """The one (T, D) that the final norm reads, of all streams (S, T, D)."""
        first, *others = streams.unbind()
        merged = (linear(ctx, other) for linear, other in zip(self._merging, others, strict=True))
        return torch.stack([first, *(_scaled_like(other, first) for other in merged)]).mean(dim=0)


def _scaled_like(x: Tensor, stream: Tensor) -> Tensor:
    """Scale x (T, D) to the root mean square that the stream (T, D) has, by token."""
    wide = x.float()
    target = stream.float().square().mean(dim=-1, keepdim=True)
    own = wide.square().mean(dim=-1, keepdim=True).clamp(min=_SQUARE_MIN)
    return (wide * (target / own).sqrt()).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternatingUpdatesSpec:
    """How a layer predicts and corrects the streams; names of tensors are relative to the layer."""

    streams: int
    active: int  # the stream that the blocks compute
    norm: NormSpec  # of what the router reads
    # What it adds to all streams but the first, by the corrected active stream and its own input.
    per_layer_input: PerLayerInputSpec
    # Name of factors of what is read for that, one for each element.
    scale: str = "altup.correct_output_scale"
    router: str = "altup.modality_router"
    norm_name: str = "altup.router_norm"
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"


class AlternatingUpdates(Module):
    """Predicts the streams, lets the layer compute one, and corrects them all.

    The router and the coefficients are small, and in float32.
    """

    def __init__(self, site: LayerBuildContext, spec: AlternatingUpdatesSpec) -> None:
        self._active, self._router_scale = spec.active, site.hidden**-1.0
        self._norm = site.norm(spec.norm, spec.norm_name, site.hidden)
        device = site.build.device
        self._router_name = site.tensor_name(f"{spec.router}.weight")
        self._router_shape = (spec.streams, site.hidden)
        shape = LinearShape(site.hidden, spec.streams, bias=False)
        self._router = site.method.exact().create(shape, torch.float32, device)
        self.kernels = kernels_of(self._router)
        self._input = PerLayerInput(site, spec.per_layer_input)
        self.children = (self._norm, self._input)
        # In float32, by name in the checkpoint.
        self._small: dict[str, Tensor] = {}

        def small(name: str, *size: int) -> Tensor:
            kept = torch.empty(size, dtype=torch.float32, device=device)
            return self._small.setdefault(site.tensor_name(name), kept)

        count = spec.streams
        self._prediction = small(f"{spec.prediction}.weight", count * count, count)
        self._correction = small(f"{spec.correction}.weight", count, count)
        self._scale = small(spec.scale, site.hidden)

    def __call__(
        self, ctx: ForwardContext, streams: Tensor, own: Tensor, run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The streams behind the layer, (S, T, D).

        streams (S, T, D) before it; own (T, P), the layer's input; `run` applies its blocks to the
        active stream (T, D).
        """
        predicted = self._predict(ctx, streams)
        corrected = self._correct(ctx, predicted, run(predicted[self._active]))
        read = (corrected[self._active] * self._scale).to(corrected.dtype)
        # The first stream has none of it, whichever is active.
        corrected[1:] += self._input(ctx, read, own)
        return corrected

    def _predict(self, ctx: ForwardContext, streams: Tensor) -> Tensor:
        count, wide = len(streams), streams.float()
        factors = self._route(ctx, streams[self._active], self._prediction)
        factors = factors.view(-1, count, count).permute(2, 1, 0)[..., None]  # (from, to, T, 1)
        # One stream after the other: a batched product has other bits in other batches.
        predicted = wide.clone()
        for origin, stream in zip(factors, wide, strict=True):
            predicted.addcmul_(origin, stream)
        return predicted.to(streams.dtype)

    def _correct(self, ctx: ForwardContext, predicted: Tensor, made: Tensor) -> Tensor:
        factors = 1.0 + self._route(ctx, made, self._correction)  # (T, S)
        changed = made.float() - predicted[self._active].float()
        return torch.addcmul(predicted.float(), factors.T[..., None], changed).to(made.dtype)

    def _route(self, ctx: ForwardContext, x: Tensor, matrix: Tensor) -> Tensor:
        """Coefficients (T, C), by what the router makes of x (T, D) and a matrix (C, S)."""
        read = self._norm(ctx, x).float() * self._router_scale
        routed = multiply(ctx, self._router, read).tanh()  # (T, S)
        return (routed[:, None] * matrix).sum(dim=-1)

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        router = self._router
        yield WeightSource(
            self._router_name,
            self._router_shape,
            lambda tensor: router.load("weight", tensor, WHOLE_SLICE),
        )
        for name, kept in self._small.items():
            yield from replicated_source(name, kept)
